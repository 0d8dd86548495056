"""FlexAttention on a real GPU: results and gradients against dense eager in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from altbackend import alt
from benchmarks import flex

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # eager's advice to compile
]
T = torch.Tensor


def r(*sizes: int, dtype: torch.dtype = torch.float32) -> T:
    return torch.randn(sizes, device="cuda").to(dtype)


@pytest.mark.parametrize("case", flex.CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", flex.DTYPES.values(), ids=str)
@pytest.mark.parametrize("size", [flex.Size(2, 4, 4, 1000, 64), flex.Size(1, 4, 2, 777, 80)], ids=["equal", "grouped"])
def test_common_functions(case: flex.Case, dtype: torch.dtype, size: flex.Size) -> None:
    assert flex.check(case, size, dtype, "cuda")


def test_gradients_of_captured_tensors(tmp_path: Path) -> None:
    def fn(q: T, k: T, v: T, bias: T, slopes: T) -> T:
        def score(s: T, b: T, h: T, i: T, j: T) -> T:
            return s + bias[b, h, i, j] + slopes[h] * (i - j) * 0.01

        out = flex_attention(q, k, v, score_mod=score)
        assert isinstance(out, torch.Tensor)
        return out

    inputs = [r(2, 4, 200, 64), r(2, 4, 300, 64), r(2, 4, 300, 64), r(2, 4, 200, 300), r(4)]
    by = torch.randn(2, 4, 200, 64, device="cuda")

    def gradients(f: Any, xs: list[T]) -> tuple[T, ...]:
        xs = [x.detach().requires_grad_() for x in xs]
        return torch.autograd.grad(f(*xs), xs, by.to(xs[0].dtype))

    compiled = torch.compile(fn, backend=alt, options={"strict": True, "debug_dir": str(tmp_path)})
    for got, want in zip(gradients(compiled, inputs), gradients(fn, [x.double() for x in inputs]), strict=True):
        assert float((got - want).abs().max()) <= 1e-4 * float(want.abs().max())
    decisions = "".join(f.read_text() for f in tmp_path.rglob("decisions.txt"))
    assert "flex_attention: kernel" in decisions
    assert "flex_attention_backward: kernel" in decisions


def test_few_queries_and_sizes_that_vary() -> None:
    def fn(q: T, k: T, v: T) -> T:
        out = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.01 * j, enable_gqa=True)
        assert isinstance(out, torch.Tensor)
        return out

    compiled = torch.compile(fn, backend=alt, dynamic=True, options={"strict": True})
    with torch.no_grad():
        for rows, columns in ((2, 5000), (3, 4097), (200, 200), (129, 65)):
            inputs = [r(2, 8, rows, 64), r(2, 2, columns, 64), r(2, 2, columns, 64)]
            torch.testing.assert_close(compiled(*inputs), fn(*inputs), rtol=1e-4, atol=1e-5)


def test_position_out_of_range() -> None:
    table = r(60)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 70, 70, device="cuda", BLOCK_SIZE=64)
    compiled = torch.compile(
        lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i], block_mask=mask),
        backend=alt,
        options={"strict": True},
    )
    with torch.no_grad():
        compiled(*(r(1, 2, 70, 16) for _ in range(3)))
        torch.cuda.synchronize()
        with pytest.raises(IndexError):  # the next call reports it
            compiled(*(r(1, 2, 70, 16) for _ in range(3)))


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("masked", ["", "causal", "bias"])
@pytest.mark.parametrize("sizes", [(2, 4, 384, 64), (3, 2, 1000, 24)], ids=str)
@pytest.mark.usefixtures("tf32")
def test_written_attention_in_tf32(sizes: tuple[int, ...], masked: str) -> None:
    """Products, a mask and a softmax become one kernel, whose errors are those of products in TF32."""
    q, k, v = (r(*sizes) for _ in range(3))
    hidden, bias = torch.ones(sizes[-2], sizes[-2], device="cuda").triu(1).bool(), r(sizes[1], 1, sizes[-2])

    def attend(q: T, k: T, v: T, bias: T) -> T:
        scores = q @ k.transpose(-2, -1) * sizes[-1] ** -0.5
        if masked == "causal":
            scores = scores.masked_fill(hidden, float("-inf"))
        if masked == "bias":
            scores = scores + bias
        return scores.softmax(-1) @ v

    exact = attend(q.double(), k.double(), v.double(), bias.double())
    with torch.no_grad():
        eager = attend(q, k, v, bias)
        compiled = torch.compile(attend, backend=alt, dynamic=False)
        compiled(q, k, v, bias)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = compiled(q, k, v, bias)
        used = torch.cuda.max_memory_allocated() - before
    errors = [float((y - exact).norm() / exact.norm()) for y in (got, eager)]
    assert errors[0] <= 1.5 * errors[1]
    assert used < 4 * q.shape[0] * q.shape[1] * sizes[-2] ** 2  # the scores are not stored


@pytest.mark.parametrize("masked", ["", "causal", "bias"])
@pytest.mark.parametrize("sizes", [(2, 4, 384, 64), (3, 2, 1000, 24)], ids=str)
@pytest.mark.usefixtures("tf32")
def test_gradients_of_written_attention_in_tf32(sizes: tuple[int, ...], masked: str) -> None:
    """Gradients have the errors of products in TF32, whatever the mask."""
    hidden = torch.ones(sizes[-2], sizes[-2], device="cuda").triu(1).bool()

    def attend(q: T, k: T, v: T, bias: T) -> T:
        scores = q @ k.transpose(-2, -1) * sizes[-1] ** -0.5 + bias
        if masked == "causal":
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ v

    compiled = torch.compile(attend, backend=alt, dynamic=False)
    operands = [r(*sizes) for _ in range(3)]
    bias = r(sizes[1], 1, sizes[-2]) if masked == "bias" else torch.zeros((), device="cuda")
    results = []
    for fn, dtype in ((attend, torch.float64), (attend, torch.float32), (compiled, torch.float32)):
        a, b, c = (x.to(dtype).requires_grad_() for x in operands)
        results.append(torch.autograd.grad(fn(a, b, c, bias.to(dtype)).square().sum(), (a, b, c)))
    for exact, eager, got in zip(*results, strict=True):
        errors = [float((y - exact).norm() / exact.norm()) for y in (got, eager)]
        assert errors[0] <= 1.5 * errors[1]
