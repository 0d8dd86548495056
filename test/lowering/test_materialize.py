"""Values that one operator reads in two orders are computed twice on a GPU, not stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import difference
from test.graphs import schedule, trace

T = torch.Tensor


def flipped(x: T, y: T) -> T:
    z = x + y
    return z - z.flip(1)


def rolled(x: T, y: T) -> T:
    z = (x - y).view(-1, y.shape[0] // 2, 6)
    return z * z.roll(2, 1)


def read_by_another(x: T, y: T) -> tuple[T, T]:
    z = x + y
    return z - z.flip(1), z.cumsum(1)


def matrix(x: T, y: T) -> T:
    z = x + y
    return z @ z.flip(1).t()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("fn", "kernels"), [(flipped, 1), (rolled, 1), (read_by_another, 2)])
def test_one_reader_of_two_orders_computes_the_value(fn: Callable[..., T], kernels: int, dtype: torch.dtype) -> None:
    x, y = (torch.randn(512, 6).to(dtype) for _ in range(2))
    (gm,) = trace(fn, x, y)
    steps = schedule(gm, None, ScheduleContext(H200)).steps
    assert sum(not isinstance(k, Extern) for k in steps) == kernels, [type(k) for k in steps]
    for got, want in zip(_results(triton_run.compiled(fn)(x, y)), _results(fn(x.double(), y.double())), strict=True):
        assert not difference(got, want.to(dtype), strides=False, tolerance=2 * torch.finfo(dtype).eps)


def _results(result: T | tuple[T, ...]) -> tuple[T, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_library_calls_read_stored_values() -> None:
    x, y = torch.randn(64, 6), torch.randn(64, 6)
    assert not difference(triton_run.compiled(matrix)(x, y), matrix(x, y), strides=False, tolerance=1e-5)
