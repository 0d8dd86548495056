"""Lengths of the rows of mapped nodes, and their layout in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.value import Value
from .device import Gpu
from .loop_mapping import MappedNode

# Rows of one GPU program where neighbouring rows, not the points in them, are contiguous: a cache line of 16 bits.
ROWS_OF_COLUMNS = 64
MOST_SYMBOLIC = 1024  # a symbolic size counts as at most so many when costs are compared


def exceeds(n: Index, most: int) -> bool:
    """Return whether `n` is, or as a symbol may be, larger than `most`."""
    return not isinstance(n, int) or n > most


def is_long(n: Index, device: Gpu) -> bool:
    """Return whether a row of `n` points does not fit in the registers of a program, which then reads it in blocks."""
    return exceeds(n, device.row_limit)


def estimate(n: Index) -> int:
    """Return the largest value of `n` if no symbol in it exceeds MOST_SYMBOLIC."""
    return ex.bounds(ex.substitute(n, {s: min(s.hi, MOST_SYMBOLIC) for s in ex.syms_of(n)}))[1]


def total_points(q: MappedNode) -> int:
    """Return an estimate of the points of all rows."""
    return estimate(ex.prod((ex.size_of(q.row), *q.sizes)))


def rows_are_neighbours(members: Sequence[MappedNode]) -> bool:
    """Return whether memory is contiguous from row to row, as in a reduction over columns, and not along rows."""
    counts = [_contiguous(q.value, q.index, q.inner, q.row) for q in members if q.inner and q.points != 1]
    return sum(across for _, across in counts) > sum(along for along, _ in counts)


@functools.lru_cache(maxsize=4096)  # fusion asks about a member with every node that may join its kernel
def _contiguous(value: Value, store: Index, inner: tuple[Atom, ...], row: Atom) -> tuple[int, int]:
    """Count the accesses that are contiguous along a row, and those contiguous from row to row."""
    along = across = 0
    for index in (*(i for _, i in va.loads(value)), store):
        strides = [ex.coefficient(index, v) for v in inner]
        along += any(s == 1 for s in strides)
        row_stride = ex.sub(ex.substitute(index, {row: 1}), ex.substitute(index, {row: 0}))
        across += row_stride == 1 and all(s not in (0, 1) for s in strides)
    return along, across
