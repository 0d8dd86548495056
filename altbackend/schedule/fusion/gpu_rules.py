"""Rules for a device whose programs keep rows in registers: a value is found only at the point that computed it.

A program holds whole rows as one tile of at most `row_limit` points a row. A row that is longer, or of symbolic
length, is read in blocks by one pass after the other, and every pass computes again what an earlier one had.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.loops import Program
from ...ir.value import Value
from ..device import Target
from ..loop_mapping import MappedNode, Refusal

AGAIN = 256  # float additions that a pass over a long row may repeat
COLUMNS = 64  # rows of a program where rows, not the points in them, are neighbours in memory: a cache line of 16 bits
SCATTERED = 128  # points of a row, each in a cache line of its own, that a kernel of other rows may compute
MOST_OF_COLUMNS = 2048  # points of each of them that one of few programs should compute: about the cost of a launch


def inner_points(q: MappedNode) -> Index:
    return ex.prod(q.sizes)


def kept_points(q: MappedNode) -> Index:
    """Results of one row."""
    return ex.prod(ex.size_of(v) for v in q.inner if v not in q.reduced)


def is_long(n: Index, target: Target) -> bool:
    """A row that is read in blocks."""
    return _above(n, target.row_limit)


def _above(n: Index, most: int) -> bool:
    return not isinstance(n, int) or n > most


def openings(ways: Sequence[MappedNode]) -> tuple[MappedNode, ...]:
    """The placements with which a kernel starts: totals over rows are only for kernels that others opened."""
    return tuple(q for q in ways if q.kind != "outer")


def read_back(writer: MappedNode, reader: MappedNode, b: str, here: bool, target: Target) -> Refusal | None:
    """None where the reader's program holds the value; the caller has excluded plain points read at the same point.

    `here`: every read is at just the point that was written.
    """
    if writer.kind == "scan" and here and writer.sizes == reader.sizes and not is_long(inner_points(writer), target):
        return None
    if writer.kind in ("point", "inner") and kept_points(writer) == 1:
        return None
    return Refusal(f"{b} is read at other points of the row than it is written: needs shared memory")


def check(p: Program, mapped: list[MappedNode], rows: Index, target: Target) -> Refusal | None:
    """Whether tiles can express these members together."""
    for q in mapped:
        if (no := _member(q, target)) is not None:
            return no
    if rows == 1:
        return _check_single(mapped, target)
    lengths = [inner_points(q) for q in mapped]
    long = [n for n in lengths if is_long(n, target)]
    if long and any(q.kind == "outer" for q in mapped):
        return Refusal("totals over rows need rows that fit in registers")
    columns = rows_are_neighbours(mapped)
    few = isinstance(rows, int) and rows < (COLUMNS if columns else 1) * target.parallel // 8
    most = MOST_OF_COLUMNS if columns else target.row_limit
    if few and any(q.kind == "point" and _above(inner_points(q), most) for q in mapped):
        return Refusal(f"{rows} rows would leave most of the device idle")
    if not columns:
        for q in mapped:
            if q.kind == "point" and _above(inner_points(q), SCATTERED) and rows_are_neighbours([q]):
                return Refusal(f"{q.node.out} would be reached a row at a time, which its memory is not")
    return _check_passes(p, mapped) if long else None


def _member(q: MappedNode, target: Target) -> Refusal | None:
    name, kept = q.node.out, kept_points(q)
    if q.kind == "inner" and kept != 1:
        return Refusal(f"{name} has several results in a row: needs shared memory")
    if q.kind == "scan" and any(v not in q.scanned and ex.size_of(v) != 1 for v in q.inner):
        return Refusal(f"{name} is several scans in a row: needs shared memory")
    if q.kind != "outer":
        return None
    if kept != 1 and q.reduced:
        return Refusal(f"{name} is reduced across rows and within them, and keeps points of the row")
    if not isinstance(kept, int) or kept > target.row_limit // 2:
        return Refusal(f"{name} keeps {ex.show(kept)} totals, more than fit in registers")
    return None


def _check_single(mapped: list[MappedNode], target: Target) -> Refusal | None:
    """Without rows: points in parallel and totals of all of them, or everything in one program."""
    lengths = dict.fromkeys(inner_points(q) for q in mapped)
    if all(q.kind == "point" for q in mapped):
        return None
    if any(is_long(n, target) for n in lengths) and any(q.kind == "scan" for q in mapped):
        return Refusal("a scan without rows would run on one program")
    if len(lengths) > 1 and any(is_long(n, target) for n in lengths):
        return Refusal("totals of different sizes")
    return None


def _check_passes(p: Program, mapped: list[MappedNode]) -> Refusal | None:
    """Long rows: what an earlier pass computed is computed again from unchanged inputs, at a bounded cost."""
    again: dict[str, int] = {}
    for q in mapped:
        read = {b for b, _ in va.loads(q.value)}
        if any(p.buffers[w.node.out].kind != "temp" and w.node.out in read for w in mapped):
            return Refusal(f"{q.node.out} reads what a long row overwrites")
        cost = va.flops(q.value) + sum(again.get(b, 0) for b in read)
        if q.kind == "point":
            again[q.node.out] = cost
        if cost > AGAIN:
            return Refusal(f"{q.node.out} would repeat {cost} operations in every pass over a long row")
    return None


def rows_are_neighbours(members: Sequence[MappedNode]) -> bool:
    """Whether memory is contiguous from row to row, as in a reduction over columns, and not along the rows."""
    found = [_neighbours(q.value, q.index, q.inner, q.row) for q in members if q.inner and inner_points(q) != 1]
    return sum(across for _, across in found) > sum(along for along, _ in found)


@functools.lru_cache(maxsize=4096)  # a member is asked about with every node that may join its kernel
def _neighbours(value: Value, at: Index, inner: tuple[Atom, ...], row: Atom) -> tuple[int, int]:
    """How many accesses are contiguous along the row, and from row to row."""
    along = across = 0
    for index in (*(i for _, i in va.loads(value)), at):
        steps = [ex.coefficient(index, v) for v in inner]
        along += any(s == 1 for s in steps)
        here = ex.sub(ex.substitute(index, {row: 1}), ex.substitute(index, {row: 0}))
        across += here == 1 and all(s not in (0, 1) for s in steps)
    return along, across
