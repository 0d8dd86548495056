"""Tiles that threads access in the order of their rows, and parameters that runs of points read without a mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.codegen.cpp.ast import name
from altbackend.codegen.triton.contiguity import blocks_of_neighbours
from altbackend.ir import expr as ex
from altbackend.ir.expr import Index
from altbackend.ir.loops import Extern
from test import triton_run

T = torch.Tensor
X, R = ex.var("x", 4096), ex.var("r0", 98)
x, r = ex.ix(X), ex.ix(R)


@pytest.mark.parametrize(
    ("index", "blocks"),
    [
        (ex.add(ex.mul(x, 98), r), None),  # Triton sees neighbours along a row
        (ex.add(ex.mul(r, 4096), x), None),  # and from row to row
        (ex.add(ex.mul(x, 196), ex.mul(r, 2)), (1, 8)),
        (ex.add(ex.mul(x, 98), ex.mul(r, -1), 97), (1, 8)),
        (ex.add(ex.mul(x, 98), ex.mul(ex.floordiv(r, 49), 7919), ex.mod(r, 49)), (1, 8)),
        (ex.add(ex.mul(x, 98), ex.mul(ex.floordiv(r, 14), 28), ex.mod(r, 14)), None),  # pairs of neighbours
        (ex.add(ex.mul(x, 2), ex.floordiv(r, 49)), (1, 1)),
        (ex.add(ex.mul(ex.floordiv(x, 3), 300), ex.mul(r, 3), ex.mod(x, 3)), (1, 3)),
        (7, None),
    ],
    ids=str,
)
def test_blocks_of_neighbours(index: Index, blocks: tuple[int, int] | None) -> None:
    assert blocks_of_neighbours(index, {}, 32) == blocks


def test_looked_up_parts_count_along_their_axes() -> None:
    place, row = name("place", torch.int64), name("row", torch.int64)
    columns = ex.add(ex.mul(ex.lookup(place, 0, 90), 57), ex.lookup(row, 0, 56))
    assert blocks_of_neighbours(columns, {place: frozenset("r"), row: frozenset("x")}, 32) == (8, 1)
    assert blocks_of_neighbours(columns, {place: frozenset("x"), row: frozenset("r")}, 32) == (1, 8)
    assert blocks_of_neighbours(ex.mul(r, ex.lookup(row, 0, 9)), {row: frozenset("x")}, 32) is None


PROGRAMS: dict[str, Callable[[T], T]] = {
    "windows": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 3).mean(2),
    "every second": lambda x: F.avg_pool2d(x, (1, 2)).softmax(3),
    "reversed": lambda x: x.flip(3).softmax(3),
    "reversed scan": lambda x: x.flip(3).cumsum(3),
    "parameters": lambda x: F.group_norm(x, 4, torch.linspace(1, 2, 8).to(x.dtype), torch.arange(8).to(x.dtype)),
    "stored as columns": lambda x: x.transpose(1, 3).softmax(3).transpose(2, 3).contiguous(),
    "looked up": lambda x: x.gather(3, torch.arange(13).flip(0).expand(6, 8, 7, 13)).softmax(3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_eager(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 8, 7, 14 if name == "every second" else 13).to(dtype)
    got, want = triton_run.compiled(PROGRAMS[name])(x), PROGRAMS[name](x.double()).to(dtype)
    torch.testing.assert_close(got, want, rtol=4 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


def sources(fn: Callable[..., T], *inputs: T) -> str:
    """Return the kernels of a function, of which Triton's interpreter computes what eager does."""
    seen: list[triton_run.Step] = []
    torch.testing.assert_close(triton_run.compiled(fn, seen=seen)(*inputs), fn(*inputs), equal_nan=True)
    return "\n".join(step[0].source for step in seen if not isinstance(step, Extern))


def test_threads_read_strided_windows_in_the_order_of_rows() -> None:
    source = sources(lambda x: F.avg_pool2d(x, (1, 2)).softmax(3), torch.randn(64, 16, 8, 24))
    assert source.count("tl.reshape(tl.load(") == 2


def test_reversed_columns_are_read_as_triton_decides() -> None:
    source = sources(lambda x: x.softmax(1), torch.randn(4, 32, 8, 200))
    assert "tl.reshape(tl.load(" not in source


def test_runs_of_points_read_a_parameter_without_a_mask() -> None:
    weight = torch.linspace(1, 2, 32)
    weight[-1] = float("inf")  # what points beyond the end of the last row read
    source = sources(lambda x: F.group_norm(x + weight.view(-1, 1, 1), 16), torch.randn(2, 32, 36, 40))
    assert "tl.minimum(r0, 2879)" in source
