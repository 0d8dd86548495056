"""Matrix products and the pointwise kernel that reads each: one kernel, where that is possible and pays.

Runs on the finished kernels of a GPU. A library call and the kernel of its reader become one kernel if every member
of the reader is pointwise over just the product's points; the sums are then still in registers when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ...debug.trace import DecisionKind
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom
from ...ir.loops import Pointwise, Program, reads
from ..deps import Deps
from ..fusion.fuse import Decision, Group, order, same_point
from ..loop_mapping import MappedNode, Refusal, cut_points, fit
from .matmul import LEAST, Matmul, Tiles, is_matmul, node_of, of_extern, with_columns


@dataclass(frozen=True)
class Candidate:
    """A product, and the kernel that reads it: `fused` is both in one, without a choice of tiles yet."""

    matmul: Matmul
    library: Group
    reader: Group
    fused: Group

    def with_tiles(self, tiles: Tiles) -> Group:
        return replace(self.fused, matmul=replace(self.matmul, tiles=tiles))


# tiles for a candidate and what the choice rests on, or why the library call stays
Choose = Callable[[Program, Deps, Candidate], "tuple[Tiles, str] | Refusal"]


def attach(p: Program, deps: Deps, groups: list[Group], decision: Decision, choose: Choose) -> list[Group]:
    """`groups` with products joined to their readers where `choose` gives tiles. Every refusal is recorded."""
    alive = {g.number: g for g in groups}
    for early in groups:
        if early.extern is None or not is_matmul(early.extern):
            continue
        subject = f"product {early.extern.outs[0]}"
        m = of_extern(p, early.extern)
        if isinstance(m, Refusal):
            decision(DecisionKind.TEMPLATE, subject, "library call", m.reason)
            continue
        for late in [g for g in alive.values() if g.mapped and m.out in g.reads]:
            named = f"{subject} with kernel of {late.mapped[-1].node.out}"
            c = _candidate(p, deps, alive, m, early, late)
            chosen = c if isinstance(c, Refusal) else choose(p, deps, c)
            if isinstance(chosen, Refusal):
                decision(DecisionKind.TEMPLATE, named, "library call", chosen.reason)
                continue
            assert isinstance(c, Candidate)
            tiles, why = chosen
            decision(DecisionKind.TEMPLATE, named, f"one kernel of {tiles}", why)
            _replace(alive, c, tiles)
            break
    return order(list(alive.values()))


def _replace(alive: dict[int, Group], c: Candidate, tiles: Tiles) -> None:
    gone, number = c.library.number, c.reader.number
    del alive[gone]
    alive[number] = c.with_tiles(tiles)
    for g in alive.values():
        if gone in g.needs:
            g.needs = (g.needs - {gone}) | ({number} - {g.number})


def _candidate(
    p: Program, deps: Deps, alive: dict[int, Group], m: Matmul, early: Group, late: Group
) -> Candidate | Refusal:
    if late.matmul is not None:
        return Refusal("the kernel computes another product already")
    if len(deps.writers[m.out]) != 1:
        return Refusal(f"{m.out} is written elsewhere too")
    if _depends(alive, late.needs - {early.number}, early.number):
        return Refusal("the kernel needs another one that reads the product")
    m = _cut(p, deps, m, late)
    mapped = _placed(p, m, early, late)
    if isinstance(mapped, Refusal):
        return mapped
    fused = Group(
        number=late.number,
        rows=ex.size_of(mapped[0].row),
        mapped=mapped,
        members=[*early.members, *sorted(late.members)],
        needs=(early.needs | late.needs) - {early.number, late.number},
        reads=early.reads | late.reads,
        writes=early.writes | late.writes,
        matmul=m,
    )
    return Candidate(m, early, late, fused)


def _cut(p: Program, deps: Deps, m: Matmul, late: Group) -> Matmul:
    """The product without the last columns where its one reader leaves them out, as it does with what padding added."""
    rows = m.batch * m.rows
    lengths = {ex.exact_div(ex.prod(ex.size_of(d) for d in q.node.dims), rows) for q in late.mapped}
    columns = lengths.pop()
    alone = m.out not in deps.escaping and set(deps.readers[m.out]) <= set(late.members)
    if lengths or not alone or not isinstance(columns, int) or not LEAST <= columns < m.columns:
        return m
    return with_columns(m, columns)


def _depends(alive: dict[int, Group], start: set[int], on: int) -> bool:
    stack, seen = list(start), set(start)
    while stack:
        n = stack.pop()
        if n == on:
            return True
        more = alive[n].needs - seen
        seen |= more
        stack.extend(more)
    return False


def _placed(p: Program, m: Matmul, early: Group, late: Group) -> list[MappedNode] | Refusal:
    """All members on the rows and columns of the product."""
    assert early.extern is not None
    first = fit(node_of(m, early.extern), m.batch * m.rows)
    if isinstance(first, Refusal):
        return first
    out = [first]
    for k in sorted(late.members):
        node = p.nodes[k]
        if not isinstance(node, Pointwise):
            return Refusal(f"{getattr(node, 'out', 'a member')} is not pointwise")
        if p.buffers[node.out].kind != "temp":
            return Refusal(f"{node.out} is an input written in place, which other programs may still read")
        q = _at_same_points(out, node)
        if isinstance(q, Refusal):
            return q
        out.append(q)
    return out


def _at_same_points(before: list[MappedNode], node: Pointwise) -> MappedNode | Refusal:
    """`node` with its loops in an order in which it visits just the points of those before it."""
    held = {q.node.out: q for q in before}
    mine = [b for b in reads(node) if b in held]
    points = ex.prod(ex.size_of(q) for q in (before[0].row, *before[0].inner))
    if ex.prod(ex.size_of(d) for d in node.dims) != points:
        return Refusal(f"{node.out} has other points than the product")
    for loops in _orders(node, mine):
        q = cut_points(node, loops, ex.size_of(before[0].row))
        if isinstance(q, MappedNode) and all(same_point(held[b], q) for b in mine):
            return q
    return Refusal(f"{node.out} reads the product at other points")


def _orders(node: Pointwise, mine: list[str]) -> Iterator[list[Atom]]:
    """Loops from slow to fast, as the buffers read from this kernel see them; then as they are."""
    for b, index in va.loads(node.value):
        if b in mine:
            steps = [ex.coefficient(index, d) for d in node.dims]
            if all(isinstance(s, int) and s > 0 for s in steps):
                yield [d for _, d in sorted(zip(steps, node.dims, strict=True), key=lambda x: -x[0])]  # type: ignore[operator]
    yield list(node.dims)
