"""Readers of different parts of a value compute their own elements: nothing is stored for them, or computed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test import triton_run
from test.compare import difference
from test.graphs import schedule, trace

T = torch.Tensor


def gate(x: T) -> T:
    a, b = F.elu(x).chunk(2, 1)
    return a * F.silu(b)


def selected(x: T) -> T:
    y = x.tanh().exp()
    return y[:, 0].sin() + y[:, 1].cos()


def sliced(x: T) -> T:
    y = x.tanh().exp()
    return (y[:, :4] * 2).sum(2) - y[:, 4:].amax(2)


def overlapping(x: T) -> T:
    y = x.tanh().exp()
    return (y[:, :5] * 2).sum(2) - y[:, 3:].amax(2)


def along_two_dimensions(x: T) -> T:
    y = x.tanh().exp()
    return y[:, :4].sum() + y[:, :, :3].amax()


def a_half_and_all(x: T) -> T:
    y = x.tanh().exp()
    return y[:, :4].sum() + y.amax()


@pytest.mark.parametrize(
    ("fn", "kernels"),
    [(gate, 1), (selected, 1), (sliced, 1), (overlapping, 2), (along_two_dimensions, None), (a_half_and_all, None)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_parts(fn: Callable[[T], T], kernels: int | None) -> None:
    x = torch.randn(3, 8, 37)
    assert not difference(triton_run.compiled(fn)(x), fn(x), strides=False, tolerance=2e-5)
    s = schedule(trace(fn, torch.empty(64, 8, 3700))[0], ctx=triton_run.TARGET)
    stored = [b for b in s.program.buffers.values() if b.kind == "temp" and b.numel == 64 * 8 * 3700]
    assert len(stored) == (fn in (overlapping, along_two_dimensions, a_half_and_all))
    if kernels:
        assert s.kernels == kernels


def test_open_sizes() -> None:
    def fn(x: T) -> Any:
        y = x.tanh().exp()
        return y[: x.shape[0] - 1].sin(), y[1:].cos()

    x = torch.randn(5, 7)
    for got, expected in zip(triton_run.compiled(fn, dynamic=True)(x), fn(x), strict=True):
        assert not difference(got, expected, strides=False, tolerance=2e-5)
