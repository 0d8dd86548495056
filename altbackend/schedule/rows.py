"""Lengths of the rows of mapped nodes, and their layout in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.value import Value
from .device import Gpu
from .loop_mapping import MappedNode

# Rows of one GPU program where neighbouring rows, not the points in them, are contiguous: a cache line of 16 bits.
ROWS_OF_COLUMNS = 64
COLUMN_LIMIT = 512  # points of a row that stay in registers where neighbouring rows, not points, are contiguous
SHORT_COLUMN = 32  # points of a column that two warps hold: 16 of them took 50 us with two, 94 with four
ROW_TILE = 2048  # elements of a tile of several short rows
TILED_ROW = 1024  # points of a row of which a tile holds several where neighbouring rows are neighbours in memory
SECTOR = 32  # bytes of the smallest memory access of a GPU
CACHED = 16  # an access to so many times fewer elements than another one comes from the cache
# Elements between the places that neighbouring rows read, at most, for a warp to share their sectors. A maximum over
# 1,552 channels of a convolution with stride 2 took 1,373 us row by row, 190 in tiles; sums over every third column of
# 16 bits 115 and 62. A tile of several rows of up to NEAR_COLUMN points reads whole sectors anyway: depthwise
# convolutions of volumes with stride 2 and 343 terms took 2,957 us in such tiles, 3,701 in tiles of columns.
NEAR, NEAR_COLUMN = 4, 64
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


def touched(index: Index) -> int:
    """Return the number of elements from the first to the last that an access touches."""
    lowest, highest = ex.bounds(index)
    return highest - lowest + 1


def total_points(q: MappedNode) -> int:
    """Return an estimate of the points of all rows."""
    return estimate(ex.prod((ex.size_of(q.row), *q.sizes)))


def rows_are_neighbours(members: Sequence[MappedNode], stored: frozenset[str] | None = None) -> bool:
    """Return whether memory is contiguous from row to row, as in a reduction over columns, and not along rows.

    `stored`: the buffers that the kernel of `members` writes to memory. None while kernels are being fused: all values
    count as if they were in memory.
    """
    along, across = _contiguous_accesses(members, stored)
    return across > along


def is_along_rows(q: MappedNode) -> bool:
    """Return whether all accesses of a node that are contiguous are contiguous along its rows."""
    along, across = _contiguous_accesses([q], None)
    return along > 0 and across == 0


def some_rows_are_neighbours(members: Sequence[MappedNode], stored: frozenset[str]) -> bool:
    """Return whether an access is contiguous from row to row, though most may be contiguous along rows."""
    return _contiguous_accesses(members, stored)[1] > 0


def is_turned(q: MappedNode, stored: frozenset[str]) -> bool:
    """Return whether a node that is stored accesses memory along its rows and from row to row."""
    along, across = _contiguous_accesses([q], stored)
    return q.node.out in stored and along > 0 and across > 0


def _contiguous_accesses(members: Sequence[MappedNode], stored: frozenset[str] | None) -> tuple[int, int]:
    """Count the accesses to memory that are contiguous along a row, and those contiguous from row to row.

    An access does not count if it touches few elements beside the others: those of a weight, or the means of many rows.
    It comes from the cache.
    """
    written = set() if stored is None else {q.node.out for q in members}
    accesses: list[_Contiguity] = []
    for q in members:
        if not q.inner or q.points == 1:
            continue
        if stored is None:
            accesses += _contiguities(q.value, q.index, q.inner, q.row)
            continue
        indices = [i for name, i in va.loads(q.value) if name not in written]
        if q.node.out in stored:
            indices.append(q.index)
        accesses += [_contiguous(i, q.inner, q.row) for i in indices if q.row in ex.vars_of(i)]
    least = max((a.elements for a in accesses), default=0) // CACHED
    counted = [a for a in accesses if a.elements >= least]
    return sum(a.along for a in counted), sum(a.across for a in counted)


class _Contiguity(NamedTuple):
    """An access to memory: its elements from first to last, and whether it is contiguous in two directions.

    `along`: from point to point of a row. `across`: from row to row, at most NEAR elements apart, and along no row.
    """

    elements: int
    along: bool
    across: bool


@functools.lru_cache(maxsize=8192)  # fusion asks about a member with every node that may join its kernel
def _contiguities(value: Value, stored: Index, inner: tuple[Atom, ...], row: Atom) -> tuple[_Contiguity, ...]:
    """Return the accesses of a node on rows, its loads and then its store, that depend on the row."""
    indices = (*(i for _, i in va.loads(value)), stored)
    return tuple(_contiguous(i, inner, row) for i in indices if row in ex.vars_of(i))


@functools.lru_cache(maxsize=8192)
def _contiguous(index: Index, inner: tuple[Atom, ...], row: Atom) -> _Contiguity:
    strides = [ex.coefficient(index, v) for v in inner]
    step, farthest = row_step(index, row), NEAR if exceeds(ex.prod(map(ex.size_of, inner)), NEAR_COLUMN) else 1
    nearest = 1 if step == 1 else NEAR  # elements between points, at most, for which points and not rows are near
    across = 1 <= step <= farthest and all(s != 0 and _distance(s) > nearest for s in strides)
    return _Contiguity(touched(index), any(s == 1 for s in strides), across)


def row_step(index: Index, row: Atom) -> int:
    """Return the elements between the first row's access and the second row's; more than NEAR where it is a symbol."""
    return _distance(ex.sub(ex.substitute(index, {row: 1}), ex.substitute(index, {row: 0})))


def _distance(stride: Index | None) -> int:
    return abs(stride) if isinstance(stride, int) else NEAR + 1
