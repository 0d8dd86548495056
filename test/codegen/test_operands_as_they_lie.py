"""Rows of a GPU that cross the fastest dimension of their operand and of their result."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.config.resolve import resolve
from altbackend.ir import expr as ex
from altbackend.ir.loops import View
from altbackend.schedule.kernel import Kernel
from test import triton_run
from test.fx_passes.test_cuda_inference import T, traced
from test.graphs import Scheduled, schedule

LAST = torch.channels_last
SIZES = 2, 6, 5, 7


def scheduled(fn: Callable[..., T], *args: T) -> Scheduled:
    return schedule(traced(fn, *args), resolve(), triton_run.TARGET)


def checked(fn: Callable[..., T], *args: T) -> Scheduled:
    """Return a program for a GPU whose interpreted result is that of eager, in values and strides."""
    s = scheduled(fn, *args)
    (got,) = triton_run.run(s.program, triton_run.steps_of(s), list(args), s.constants)
    want = fn(*args)
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    tolerance = 4 * torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return s


def temporaries(s: Scheduled, points: int) -> list[tuple[int, ...]]:
    """Return the strides of the temporaries of a program that have so many elements."""
    results = {o.buffer for o in s.program.outputs if isinstance(o, View)}
    written = {name for step in s.steps if isinstance(step, Kernel) for name in step.stored}
    buffers = [s.program.buffers[name] for name in sorted(written - results)]
    return [tuple(ex.numbers(b.strides)) for b in buffers if math.prod(ex.numbers(b.sizes)) == points]


def image(*sizes: int, dtype: torch.dtype = torch.float32) -> T:
    return torch.randn(sizes).to(dtype).contiguous(memory_format=LAST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax], ids=["softmax", "log-softmax"])
def test_a_softmax_over_the_height_stores_totals_alone(fn: Callable[[T, int], T], dtype: torch.dtype) -> None:
    """Neither a copy in the layout of the result nor exponentials are stored for other kernels."""
    assert temporaries(checked(lambda x: fn(x, 2), image(*SIZES, dtype=dtype)), math.prod(SIZES)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scan_that_kernels_read_lies_as_its_operand(dtype: torch.dtype) -> None:
    x = image(*SIZES, dtype=dtype)
    for fn in (lambda x: x.cumsum(2) + 1, lambda x: x.cumsum(2)[:, 1:] * 2):
        strides = temporaries(checked(fn, x), math.prod(SIZES))
        assert set(strides) == {x.stride()}
    checked(lambda x: x.cumsum(2), x)  # the result is plain


def test_kernels_of_a_norm_add_the_bias_again() -> None:
    """Kernels of statistics and of the result read the operand: its sum with a bias is not stored for both."""

    def fn(x: T, b: T) -> T:
        return F.group_norm(x + b[:, None, None], 16)

    assert temporaries(scheduled(fn, image(4, 16, 64, 64), torch.randn(16)), 4 * 16 * 64 * 64) == []


def test_an_argmax_compares_stored_elements() -> None:
    """A kernel that computes a value anew may round it otherwise, and finds no element that equals the largest."""
    args = torch.randn(3000, 40), torch.randn(40), torch.randn(40)
    s = scheduled(lambda x, w, b: (x * w + b).argmax(), *args)
    assert temporaries(s, 3000 * 40) != []
