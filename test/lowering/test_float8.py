"""Floats of 8 bits: kernels convert them as eager does, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from test import triton_run
from test.compare import as_list, compiled

T = torch.Tensor
FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def hard(*sizes: int) -> T:
    """Return ties between neighbours, subnormal and too large numbers, zeros of both signs, infinities and NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.cat([codes.view(d).float() for d in FLOATS])
    finite = values[values.isfinite()].sort().values.unique()
    ties = (finite[1:] + finite[:-1]) / 2
    special = torch.tensor(
        [0.0, -0.0, 464.0, 464.1, 480.0, -1e9, 61440.0, 61441.0, 1e-9, torch.inf, -torch.inf, torch.nan]
    )
    all_ = torch.cat([special, values, ties, ties * (1 + 2**-20), ties * (1 - 2**-20)])
    x = torch.randn(sizes).flatten() * 300
    x[: min(len(all_), len(x))] = all_[: len(x)]
    return x.view(sizes)


def casts(x: T) -> tuple[T, ...]:
    return tuple(x.to(d) for d in FLOATS)


def back(x: T) -> tuple[T, ...]:
    return tuple((x.to(d) if x.dtype == torch.float32 else x).float() * 2 for d in FLOATS)


def quantize(x: T) -> tuple[T, T]:
    """Scale each row so that its largest number becomes 448."""
    scale = 448 / x.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn), 1 / scale


def pieces(x: T) -> tuple[T, ...]:
    y = x.to(torch.float8_e4m3fn)
    zeros = torch.zeros_like(y)
    return y.t().contiguous(), torch.cat([y, zeros]), y[:, ::2].float() + 1, torch.where(x > 0, y, zeros)


def bits(results: Any) -> list[T]:
    """Compare bits, where all NaNs count as equal."""
    out = []
    for t in as_list(results):
        t = torch.where(t.float().isnan(), torch.full_like(t.float(), torch.nan), t.float()) if t.dtype in FLOATS else t
        out.append(t)
    return out


CASES: dict[str, tuple[Callable[..., Any], T]] = {
    "casts": (casts, hard(32, 64)),
    "casts of bfloat16": (casts, hard(32, 64).bfloat16()),
    "casts of float64": (casts, hard(32, 64).double()),
    "back": (back, hard(32, 64)),
    "quantize": (quantize, torch.randn(8, 96)),
    "pieces": (pieces, hard(32, 64)),
}


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("way", ["cpp", "triton"])
def test_as_eager(name: str, way: str) -> None:
    fn, x = CASES[name]
    got = compiled(fn, strict=True)(x) if way == "cpp" else triton_run.compiled(fn)(x)
    for g, w in zip(bits(got), bits(fn(x)), strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)


VIEWS: dict[str, Callable[[T], Any]] = {
    "of an input": lambda x: (x.view(torch.uint8), x.view(torch.int8)[1:], x.t().view(torch.uint8)),
    "read": lambda x: (x.view(torch.uint8) + 1, x, x.view(torch.uint8).float() * 2),
    "of a result": lambda x: (lambda y: (y, y.view(torch.uint8), y.view(torch.int8).t()))((x.float() * 2).to(x.dtype)),
    "back": lambda x: (x.view(torch.uint8).view(x.dtype), (x.view(torch.uint8) // 2).view(x.dtype)),
    "written": lambda x: (x.view(torch.uint8)[1:].fill_(3), x.float() + 1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", list(VIEWS))
def test_views_as_bytes(name: str, dtype: torch.dtype) -> None:
    def fn(x: T) -> Any:
        return VIEWS[name](x)

    mine = torch.randn(6, 8).to(dtype)
    theirs = mine.clone()
    pairs = zip((*compiled(fn)(mine), mine), (*fn(theirs), theirs), strict=True)
    for got, want in pairs:
        assert (got.dtype, got.stride()) == (want.dtype, want.stride())
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
