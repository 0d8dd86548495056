"""The parts of a row's number from which a position in memory is computed: (row // fewer) % size, at a stride."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Pointwise, Scan
from .loop_mapping import Kind, MappedNode, cut_ordered, cut_points, rdims


class RowPart(NamedTuple):
    """A part (row // fewer) % size of a row's number: `stride` elements of memory lie between its values."""

    stride: int
    fewer: int
    size: int


@functools.lru_cache(maxsize=8192)  # fusion and the numbering of rows ask about the same positions
def parts_of_row(index: Index, row: Atom) -> tuple[RowPart, ...]:
    """Return the parts of the row's number that a position is linear in. Terms of another form are left out."""
    if isinstance(index, int):
        return ()
    terms = ((m[0], c) for m, c in index.terms if len(m) == 1 and row in m[0].vars)
    return tuple(RowPart(c, *part) for a, c in terms if (part := _part(a, row)) is not None)


def _part(a: Atom, row: Atom) -> tuple[int, int] | None:
    """Return `fewer` and `size` of an atom of the form (row // fewer) % size, or None."""
    if isinstance(a, ex.Mod):
        if not isinstance(a.divisor, int) or (fewer := _divisor(a.dividend, row)) is None:
            return None
        return fewer, a.divisor
    fewer = _divisor(ex.ix(a), row)
    return None if fewer is None else (fewer, ex.bounds(ex.ix(a))[1] + 1)


def _divisor(index: Index, row: Atom) -> int | None:
    """Return `d` if an index is row // d, or None."""
    if index is ex.ix(row):
        return 1
    atom = index.terms[0][0][0] if not isinstance(index, int) and index.terms and index.terms[0][0] else None
    if not isinstance(atom, ex.FloorDiv) or atom.dividend is not ex.ix(row) or index is not ex.ix(atom):
        return None
    return atom.divisor if isinstance(atom.divisor, int) else None


def on_rows_of_group(node: Pointwise | Scan, mapped: Sequence[MappedNode]) -> MappedNode | None:
    """Return a node mapped such that each row reads what the same row of a kernel stored; None without such an order.

    Loops of the node become rows in the order in which the kernel counts its rows. Points follow the totals that they
    read, and functions of totals: a softmax over the width of a channels-last image that is stored plain has channels,
    then heights, as rows.
    Scans follow points.
    """
    for writer in mapped:
        is_statistic = writer.kind in (Kind.IN_ROW, Kind.POINT) and writer.results == 1
        if not (is_statistic if isinstance(node, Pointwise) else writer.kind is Kind.POINT):
            continue
        index = next((i for b, i in va.loads(node.value) if b == writer.node.out), None)
        order = None if index is None else _order(node, index, writer)
        if order is None:
            continue
        if isinstance(node, Scan):
            scan = cut_ordered(node, order, ex.size_of(writer.row))
            return scan if isinstance(scan, MappedNode) else None
        aligned = cut_points(node, order, ex.size_of(writer.row))
        if isinstance(aligned, MappedNode) and _reads_own_row(aligned, writer):
            return aligned
    return None


def _order(node: Pointwise | Scan, index: Index, writer: MappedNode) -> list[Atom] | None:
    """Return the loops of a node whose first ones count the rows of `writer`, which the node reads at `index`."""
    rows: list[Atom] = []
    for part in sorted(parts_of_row(writer.index, writer.row), key=lambda p: -p.fewer):
        loops = _loops_of_part(node, index, part)
        if loops is None or not set(loops).isdisjoint(rows):
            return None
        rows += loops
    return [*rows, *(v for v in (*node.dims, *rdims(node)) if v not in rows)] if rows else None


def _loops_of_part(node: Pointwise | Scan, index: Index, part: RowPart) -> list[Atom] | None:
    """Return the loops, slow to fast, that count a part of a row's number: one, or several that are one in memory.

    The depth and the height of a volume are one part of the rows of its statistics.
    """
    loops: list[Atom] = []
    points = 1
    while points < part.size:
        suits = (v for v in node.dims if ex.coefficient(index, v) == points * part.stride and ex.size_of(v) != 1)
        if (loop := next(suits, None)) is None or loop in loops or not isinstance(size := ex.size_of(loop), int):
            return None
        loops.insert(0, loop)
        points *= size
    return loops if points == part.size else None


def _reads_own_row(q: MappedNode, total: MappedNode) -> bool:
    return all(i == total.index for b, i in va.loads(q.value) if b == total.node.out)
