"""Hints to Triton about neighbours: where it cannot see them itself, and nowhere else. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from altbackend.codegen.triton.contiguity import hidden_run
from altbackend.ir import expr as ex
from altbackend.ir.expr import Index
from altbackend.schedule.kernel import Kernel
from test import triton_run
from test.graphs import schedule, trace

X, R = ex.var("x", 121_200), ex.var("r0", 505)


def columns(width: int, outer: int = 255_025) -> Index:
    """Return the position of a point of a column of images with rows of `width` elements."""
    x = ex.ix(X)
    rows = ex.mul(ex.floordiv(x, width), outer)
    return ex.add(ex.add(rows, ex.mul(ex.ix(R), width)), ex.mod(x, width))


@pytest.mark.parametrize(
    ("index", "run"),
    [
        (columns(505), 64),
        (columns(40), 32),
        (columns(5), 4),
        (columns(3), 0),  # fewer neighbours than count
        (columns(512), 0),  # Triton sees them
        (ex.add(ex.mul(ex.ix(X), 505), ex.ix(R)), 0),  # points of a row are neighbours
        (ex.ix(X), 0),  # one axis
        (7, 0),
    ],
    ids=str,
)
def test_hidden_run(index: Index, run: int) -> None:
    assert hidden_run(index, 64) == run


@pytest.mark.parametrize("width", [505, 512], ids=str)
def test_threads_read_neighbouring_columns(width: int) -> None:
    scheduled = schedule(trace(lambda x: x.log_softmax(1), torch.empty(64, 300, width))[0], ctx=triton_run.TARGET)
    (k,) = (k for k in scheduled.steps if isinstance(k, Kernel))
    kernel, _ = triton_run.emit(scheduled.program, k)
    assert ("max_contiguous" in kernel.source) == (width == 505)
    assert triton_run.access_axes(kernel, 90) == {0}
