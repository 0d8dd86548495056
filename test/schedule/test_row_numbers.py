"""Rows of GPU kernels are numbered as memory lies; concatenations of library results are read where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel
from test import triton_run
from test.compare import as_list, difference
from test.graphs import schedule, trace

T = torch.Tensor
LAST = torch.channels_last


def kernels(fn: Callable[..., Any], *inputs: T) -> list[Kernel]:
    (gm,) = trace(fn, *inputs)
    return [k for k in schedule(gm, None, ScheduleContext(H200)).steps if not isinstance(k, Extern)]


def softmax_over_width(x: T) -> T:
    return torch.softmax(x * 1.5, -1).contiguous()


def largest_of_height(x: T) -> tuple[T, T]:
    y = (x + 0.5).sigmoid()
    return y.amax(2).contiguous(), y.sum(2).contiguous()


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "softmax over the width": (softmax_over_width, (2, 24, 9, 17)),
    "height": (largest_of_height, (3, 16, 11, 6)),
    "odd channels": (softmax_over_width, (2, 7, 5, 13)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager(name: str, dtype: torch.dtype) -> None:
    fn, sizes = PROGRAMS[name]
    x = torch.randn(sizes).to(dtype).contiguous(memory_format=LAST)
    for got, want in zip(as_list(triton_run.compiled(fn)(x)), as_list(fn(x)), strict=True):
        assert not difference(got, want, strides=False, tolerance=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_neighbouring_rows_of_a_softmax_are_neighbouring_channels() -> None:
    x = torch.randn(2, 24, 32, 48).contiguous(memory_format=LAST)
    (k, *_) = kernels(softmax_over_width, x)
    q = k.nodes[0]
    ((_, index),) = va.loads(q.value)
    step = ex.sub(ex.substitute(index, {q.row: 1}), ex.substitute(index, {q.row: 0}))
    assert step == 1


def joined(x: T, w: T, v: T) -> T:
    return torch.softmax(torch.cat([x @ w, (x @ v).relu(), x], -1), -1)


def test_a_concatenation_of_products_is_read_where_they_are() -> None:
    x, w, v = torch.randn(65, 24), torch.randn(24, 40), torch.randn(24, 33)
    assert not difference(triton_run.compiled(joined)(x, w, v), joined(x, w, v), strides=False, tolerance=1e-5)
    assert len(kernels(joined, x, w, v)) == 1


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_of_any_dimension(dim: int) -> None:
    def fn(a: T, b: T, c: T) -> tuple[T, T]:
        y = torch.cat([a, b.transpose(0, 1), c.half().float()], dim)
        return (y * 2).contiguous(), y.sum(dim)

    sizes = [[5, 6, 7] for _ in range(3)]
    for k, s in enumerate(sizes):
        s[dim] = 3 + 2 * k
    a, b, c = (torch.randn(s) for s in sizes)
    b = b.transpose(0, 1).contiguous()
    for got, want in zip(triton_run.compiled(fn)(a, b, c), fn(a, b, c), strict=True):
        assert not difference(got, want, strides=False, tolerance=1e-5)


def test_a_returned_concatenation_is_stored() -> None:
    def fn(x: T, w: T) -> tuple[T, T]:
        y = torch.cat([x @ w, x], -1)
        return y, y.sum(-1)

    x, w = torch.randn(6, 8), torch.randn(8, 5)
    for got, want in zip(triton_run.compiled(fn)(x, w), fn(x, w), strict=True):
        assert not difference(got, want, strides=False, tolerance=1e-5)


def shuffled_norm(x: T) -> T:
    """An instance norm over channels that a shuffle has reordered."""
    n, c, h, w = x.shape
    y = (x * 2).relu().view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)
    return torch.nn.functional.instance_norm(y).contiguous()


def test_long_rows_of_shuffled_channels_lie_side_by_side() -> None:
    x = torch.empty(512, 24, 33, 33).contiguous(memory_format=LAST)
    steps = [
        q for k in kernels(shuffled_norm, x) for q in k.nodes if any(b.startswith("arg") for b, _ in va.loads(q.value))
    ]
    for q in steps:
        for _, index in va.loads(q.value):
            if q.row in ex.vars_of(index) and ex.vars_of(index) & {*q.inner}:
                assert ex.sub(ex.substitute(index, {q.row: 1}), ex.substitute(index, {q.row: 0})) == 1
    small = torch.randn(2, 8, 36, 36).contiguous(memory_format=LAST)
    assert not difference(
        triton_run.compiled(shuffled_norm)(small), shuffled_norm(small), strides=False, tolerance=1e-5
    )


def scan_of_rolled_channels(x: T, statistic: T) -> T:
    return (x.roll(1, 1) - statistic).cumsum(1).contiguous()


def test_rows_that_share_a_statistic_stay_in_the_order_of_the_results() -> None:
    """A statistic of each height touches one sector for all rows of its width, whichever order they have."""
    x = torch.randn(4, 96, 34, 34).contiguous(memory_format=LAST)
    for k in kernels(scan_of_rolled_channels, x, torch.randn(4, 96, 34, 1)):
        for q in k.nodes:
            step = ex.sub(ex.substitute(q.index, {q.row: 1}), ex.substitute(q.index, {q.row: 0}))
            assert step == 1
