"""Rows whose loops end in independent columns run in blocks of columns; values of a column are computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from test.compare import check, check_gradients, compiled

pytestmark = pytest.mark.sample(2)

T = torch.Tensor
PROGRAMS: dict[str, Callable[[T], object]] = {
    "softmax": lambda x: x.softmax(1),
    "log-softmax": lambda x: x.log_softmax(1) * 2,
    "rms": lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5),
    "largest and total": lambda x: (x.amax(1), (x - x.amax(1, keepdim=True)).exp().sum()),
    "shifted": lambda x: x - x.mean(1, keepdim=True) + x.roll(1, -1),
    "flipped": lambda x: (x - x.amax(1, keepdim=True)).flip(-1),
    "scan": lambda x: x.cumsum(1) - x.amax(1, keepdim=True),
    "scan along columns": lambda x: (x - x.amax(1, keepdim=True)).cumsum(-1),
    "total of an image": lambda x: (x.softmax(1) * x.flatten(1).mean(1)[:, None, None]).amax(2),
    "in place": lambda x: x.clone().sub_(x.amax(1, keepdim=True)).exp_(),
}


def kernels(folder: Path) -> str:
    return "".join(p.read_text() for p in folder.glob("*/*kernels.cpp"))


@pytest.mark.sample(8, every_value=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(1, 9, 2048), (3, 16, 576), (2, 5, 331), (40, 32, 784)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(PROGRAMS[name], torch.randn(sizes).to(dtype))


@pytest.mark.parametrize("sizes", [(1, 7, 32, 64), (3, 16, 24, 24)], ids=str)
def test_gradients(sizes: tuple[int, ...]) -> None:
    labels = torch.randint(0, sizes[1], (sizes[0], *sizes[2:]))
    labels[0, 0] = -100
    check_gradients(lambda x: F.cross_entropy(x, labels), torch.randn(sizes))
    check_gradients(lambda x: x.softmax(1).square().sum(1), torch.randn(sizes))


def test_few_rows_become_blocks(tmp_path: Path) -> None:
    compiled(lambda x: x.log_softmax(1), debug_dir=str(tmp_path), cache_graphs=False)(torch.randn(2, 16, 2304))
    text = kernels(tmp_path)
    assert "alt::share(32, " in text
    assert "h0[i1] = " in text


def test_labels_out_of_range_raise_in_blocks() -> None:
    run = compiled(lambda x, y: F.nll_loss(x.log_softmax(1), y), cache_graphs=False)
    x, y = torch.randn(2, 16, 2304), torch.randint(0, 16, (2, 2304))
    torch.testing.assert_close(run(x, y), F.nll_loss(x.log_softmax(1), y))
    y[1, 2000] = 16
    with pytest.raises((IndexError, RuntimeError)):
        run(x, y)
