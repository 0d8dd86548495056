"""Readers of a concatenation choose the part of each element on a GPU, if no kernel computes the parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import difference
from test.graphs import schedule, trace

T = torch.Tensor
SCALE, SHIFT, MEAN, VAR = (torch.rand(12) + 0.5 for _ in range(4))


def normalised(a: T, b: T, c: T) -> T:
    whole = torch.cat([a @ b, c @ b, b @ a], 1)
    return F.batch_norm(whole, MEAN.to(a), VAR.to(a), SCALE.to(a), SHIFT.to(a)).relu()


def activated(a: T, b: T, c: T) -> T:
    return torch.cat([a @ b, c @ b, b @ a], 1).sigmoid()


def hard_activated(a: T, b: T, c: T) -> T:
    """`hardswish` has no tag that says it is pointwise."""
    return F.hardswish(torch.cat([a @ b, c @ b, b @ a], 1)).amax(1)


def scanned(a: T, b: T, c: T) -> T:
    return torch.cat([a @ b, c @ b, b @ a], 1).cumsum(1)


def computed(a: T, b: T, c: T) -> T:
    return F.batch_norm(torch.cat([a @ b, c @ b, b.exp()], 1), MEAN.to(a), VAR.to(a))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("fn", "kernels"), [(normalised, 1), (activated, 1), (hard_activated, 1), (scanned, 1), (computed, 4)]
)
def test_kernels_and_results(fn: Callable[..., T], kernels: int, dtype: torch.dtype) -> None:
    inputs = [torch.randn(5, 4, 4).to(dtype) for _ in range(3)]
    (gm,) = trace(fn, *inputs)
    steps = schedule(gm, None, ScheduleContext(H200)).steps
    assert sum(not isinstance(k, Extern) for k in steps) <= kernels, [type(k) for k in steps]
    expected = fn(*(x.double() for x in inputs)).to(dtype)
    assert not difference(
        triton_run.compiled(fn)(*inputs), expected, strides=False, tolerance=8 * torch.finfo(dtype).eps
    )
