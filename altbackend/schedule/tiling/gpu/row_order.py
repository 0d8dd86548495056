"""Order the loops within the rows of a GPU kernel as its rows lie in memory.

A program reads a whole row, whatever the order of its loops, and a sum does not depend on it. The fastest loop decides
which elements neighbouring threads read. Take statistics over the channels and points of a channels-last image: in the
order of the traced dimensions, the loops run over points first. Each thread then reads another cache line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Program, Reduction
from ...device import Gpu
from ...loop_mapping import Kind, MappedNode
from ...rows import CACHED, SECTOR, estimate, is_long, rows_are_neighbours
from ...sectors import STORED

THREAD = 8  # most neighbouring elements that one thread holds
LEAST_GAIN = 1.5  # an order other than that of the results is taken where it moves so many times fewer sectors


@dataclass(frozen=True)
class _Access:
    """One read or store of a row. `elements`: the number that it touches, times the cost of each."""

    index: Index
    itemsize: int
    elements: float

    def sectors(self, second: Atom, fastest: Atom) -> float:
        """Return the cost in sectors with these as the two fastest loops.

        A thread holds the neighbours along a short loop, so the threads of a warp are neighbours along the second.
        """
        run = 1
        if ex.coefficient(self.index, fastest) == 1:
            run = estimate(ex.size_of(fastest))
        elif ex.coefficient(self.index, second) == 1 and estimate(ex.size_of(fastest)) <= THREAD:
            run = estimate(ex.size_of(second))
        return self.elements * self.itemsize / min(SECTOR, run * self.itemsize)


def order_rows(p: Program, mapped: Sequence[MappedNode], stored: frozenset[str], device: Gpu) -> list[MappedNode]:
    """Return the nodes with the loops in their rows ordered; nodes that share loops keep sharing them.

    `stored`: the buffers that the kernel writes to memory.
    """
    if rows_are_neighbours(mapped, stored) or any(_keeps_its_order(q) for q in mapped):
        return list(mapped)
    ordered = list(mapped)
    for positions in _by_shared_loops(mapped):
        nodes = [mapped[k] for k in positions]
        loops = nodes[0].inner
        if len(loops) < 2 or _is_read_in_order(loops, mapped):
            continue
        order = _best_order(loops, list(_accesses(p, nodes, stored, device)))
        for k in positions:
            ordered[k] = replace(mapped[k], inner=order)
    return ordered


def _by_shared_loops(mapped: Sequence[MappedNode]) -> list[list[int]]:
    """Return the positions of the nodes, those together that read each other's values at the same point of a row.

    Loops of equal sizes have equal names, so that nodes may have the same loops by chance, in other dimensions.
    """
    parts: list[list[int]] = []
    part_of: dict[str, list[int]] = {}
    for k, q in enumerate(mapped):
        read = {b for b, _ in va.loads(q.value)}
        joined = {id(x): x for b in read if (x := part_of.get(b)) is not None and mapped[x[0]].inner == q.inner}
        part = [n for x in joined.values() for n in x] + [k]
        parts = [x for x in parts if id(x) not in joined] + [part]
        part_of.update({mapped[n].node.out: part for n in part if mapped[n].results != 1})
    return parts


def _keeps_its_order(q: MappedNode) -> bool:
    """Return whether a node's result depends on the order of its loops, or numbers its points by it."""
    if isinstance(q.node, Reduction) and q.node.op.startswith("arg"):
        return True
    return q.kind not in (Kind.POINT, Kind.IN_ROW)


def _is_read_in_order(loops: tuple[Atom, ...], mapped: Sequence[MappedNode]) -> bool:
    """Return whether a node reads, at its place in a row, a value of a node whose row has other loops."""
    points = ex.prod(ex.size_of(v) for v in loops)
    writers = {q.node.out: q for q in mapped if q.results != 1}
    for q in mapped:
        for name, _ in va.loads(q.value):
            w = writers.get(name)
            if w is not None and w.points == q.points == points and (w.inner == loops) != (q.inner == loops):
                return True
    return False


def _best_order(loops: tuple[Atom, ...], accesses: Sequence[_Access]) -> tuple[Atom, ...]:
    """Return the loops in the order that moves the fewest sectors; parameters of the channels come from the cache.

    Counted, four parameters of eight channels had turned over a group norm of images of 49 points: 944 us for 176.
    """
    largest = max((a.elements for a in accesses), default=0)
    counted = [a for a in accesses if a.elements * CACHED >= largest]

    def cost(order: tuple[Atom, ...]) -> float:
        return sum(a.sectors(order[-2], order[-1]) for a in counted)

    orders = [(*(w for w in loops if w is not v), v) for v in loops[:-1]]
    best = min(orders, key=cost)
    return best if cost(best) * LEAST_GAIN <= cost(loops) else loops


def _accesses(p: Program, nodes: Sequence[MappedNode], stored: frozenset[str], device: Gpu) -> Iterator[_Access]:
    """Yield the reads and stores of memory; a row that does not fit in registers is read by each stage anew."""
    written = {q.node.out for q in nodes}
    rereads = is_long(nodes[0].points, device)
    seen: set[tuple[str, Index]] = set()
    for q in nodes:
        for name, index in va.loads(q.value):
            if name not in written and (rereads or (name, index) not in seen):
                seen.add((name, index))
                yield _access(p, q, name, index, 1)
        if q.kind is Kind.POINT and q.node.out in stored:
            yield _access(p, q, q.node.out, q.index, STORED)


def _access(p: Program, q: MappedNode, name: str, index: Index, weight: float) -> _Access:
    touched = estimate(ex.prod(ex.size_of(v) for v in q.inner if v in ex.vars_of(index)))
    return _Access(index, p.buffers[name].dtype.itemsize, touched * weight)
