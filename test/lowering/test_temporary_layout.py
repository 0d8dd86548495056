"""Temporaries lie in the order of their operands; results keep the strides of eager."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from altbackend.lowering import materialize
from test.compare import check_gradients, compiled, difference

T = torch.Tensor


def masked_mean(x: T, t: T) -> T:
    mask = F.one_hot(t, x.shape[1]).permute(0, 3, 1, 2).to(x.dtype)
    p = x.softmax(1)
    return 2 * (p * mask).sum((2, 3)) / p.sum((2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradient_of_a_turned_mask(layout: torch.memory_format, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 12, 16).to(dtype).contiguous(memory_format=layout)
    check_gradients(masked_mean, x, torch.randint(5, (2, 12, 16)))


@pytest.mark.parametrize("plain", [True, False])
def test_its_temporaries_are_plain(plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not plain:
        monkeypatch.setattr(materialize, "operand_strides", lambda *_: None)
    x, t = torch.randn(2, 5, 12, 16, requires_grad=True), torch.randint(5, (2, 12, 16))
    compiled(masked_mean, debug_dir=str(tmp_path), cache_graphs=False)(x, t).sum().backward()
    text = "".join(path.read_text() for path in tmp_path.glob("*/*kernels.txt"))
    turned = re.findall(r"buf\d+\[960\*o \+ 5\*i0 \+ i1\] =", text)
    assert bool(turned) is not plain


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0)], ids=str)
def test_results_keep_their_strides(order: tuple[int, ...]) -> None:
    def f(x: T, m: T) -> tuple[T, T, T]:
        y = (x.sum(0, keepdim=True).expand_as(x) * m.permute(order)).exp()
        return y, y.softmax(1), y.sum((2, 3))

    x = torch.randn(3, 4, 5, 6)
    m = torch.randn([x.shape[order.index(k)] for k in range(4)])
    for got, want in zip(compiled(f)(x, m), f(x, m), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("rows", [512, 1024])
def test_strides_that_a_range_of_sizes_keeps_from_a_division_by_zero(rows: int) -> None:
    """Orders of strides are estimated with a size that the program allows: 97 // (97 // 128) has no value."""

    def fn(x: T) -> T:
        torch._check(x.shape[0] >= 256)
        y = x.sin().view(x.shape[0] // 128, -1, 4)
        return torch.bmm(y.transpose(1, 2) * 2 + y.amax(1)[..., None], y)

    x = torch.randn(rows, 4)
    torch._dynamo.reset()
    assert not difference(compiled(fn, dynamic=True)(x), fn(x), tolerance=1e-4)
