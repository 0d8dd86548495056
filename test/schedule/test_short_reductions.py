"""Short reductions on a GPU are written out: they join pointwise kernels, and normalisations keep their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.ir.loops import Reduction
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import as_list
from test.graphs import Scheduled, schedule, trace

pytestmark = pytest.mark.sample(3)

T = torch.Tensor


def distances(a: T, b: T) -> T:
    return (a[:, None] - b[None]).pow(2).sum(-1).exp()


def nearest(a: T, b: T) -> tuple[T, T]:
    d = (a[:, None] - b[None]).pow(2).sum(-1)
    return d.min(0).values, d.min(1).indices


def overlaps(a: T, b: T) -> T:
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    return (high - low).clamp(min=0).prod(-1) + 1


def extremes(a: T, b: T) -> tuple[T, T, T, T]:
    return a.amax(1) + 1, a.amin(1) * 2, (a > 0).all(1), (a > 1).any(1)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, int], int]] = {
    "distances": (distances, (70, 3), 1),
    "overlaps": (overlaps, (40, 4), 1),
    "extremes": (extremes, (300, 5), 1),
}


def gpu(f: Callable[..., Any], *args: T) -> Scheduled:
    (gm,) = trace(f, *args)
    return schedule(gm, ctx=ScheduleContext(H200))


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    f, size, kernels = PROGRAMS[name]
    a, b = torch.randn(size), torch.randn(size)
    for got, want in zip(as_list(triton_run.compiled(f)(a, b)), as_list(f(a, b)), strict=True):
        torch.testing.assert_close(got, want)
    s = gpu(f, a, b)
    assert s.kernels == kernels
    assert not any(isinstance(n, Reduction) for n in s.program.nodes)


def test_nearest_points() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(33, 3), torch.randn(50, 3)
    for got, want in zip(triton_run.compiled(nearest)(a, b), nearest(a, b), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("f", [lambda x: x.softmax(-1), lambda x: x / x.norm(dim=-1, keepdim=True)])
def test_normalisations_of_short_rows_stay_one_kernel(f: Callable[[T], T]) -> None:
    x = torch.randn(5000, 4)
    assert gpu(f, x).kernels == 1
    torch.testing.assert_close(triton_run.compiled(f)(x), f(x))


def test_equal_reductions_share_a_buffer() -> None:
    def f(x: T) -> tuple[T, T]:
        return x.softmax(1), x.log_softmax(1)

    reductions = [n for n in gpu(f, torch.randn(64, 100)).program.nodes if isinstance(n, Reduction)]
    assert [n.op for n in reductions].count("max") == 1


def test_equal_reductions_around_a_write_do_not() -> None:
    def f(x: T) -> tuple[T, T, T]:
        before = x.sum(1)
        x.mul_(2)
        return before, x.sum(1), x.amax(1)

    x = torch.randn(50, 40)
    mine = x.clone()
    for got, want in zip(triton_run.compiled(f)(mine), f(x), strict=True):
        torch.testing.assert_close(got, want)


def test_equal_results_have_memory_of_their_own() -> None:
    def f(x: T) -> tuple[T, T]:
        return x.amax(1), x.max(1).values

    a, b = triton_run.compiled(f)(torch.randn(50, 40))
    assert a.data_ptr() != b.data_ptr()
