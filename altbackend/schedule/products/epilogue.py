"""Join matrix products with the pointwise kernels that read them, where one kernel is possible and pays.

The pass works on the fused groups of a GPU. A library call and the kernel that reads its result become one kernel under
one condition: every node of the reader is pointwise over the product's points. Its sums are then used in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ...debug.trace import DecisionKind
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom
from ...ir.loops import Pointwise, Program, reads
from ..access import same_point
from ..deps import Deps
from ..fusion.group import Decision, Group
from ..fusion.order import order, verified
from ..loop_mapping import MappedNode, Refusal, cut_points, fit
from .matmul import LEAST, Matmul, Tiles, is_matmul, node_of, of_extern, with_columns


@dataclass(frozen=True)
class Candidate:
    """A product, its library call and the kernel that reads it; `fused` is both as one kernel, without tiles."""

    matmul: Matmul
    library: Group
    reader: Group
    fused: Group

    def with_tiles(self, tiles: Tiles) -> Group:
        """Return the fused kernel with its product in `tiles`."""
        return replace(self.fused, matmul=replace(self.matmul, tiles=tiles))


@dataclass(frozen=True)
class _Call:
    """A product with the group of its library call."""

    matmul: Matmul
    group: Group


# the tiles of a candidate and the reason for them, or the refusal for which the library call stays
Choose = Callable[[Program, Deps, Candidate], "tuple[Tiles, str] | Refusal"]


def attach(p: Program, deps: Deps, groups: list[Group], decide: Decision, choose: Choose) -> list[Group]:
    """Return `groups` with products joined to their readers where `choose` gives tiles. Records every refusal."""
    alive = {g.number: g for g in groups}
    for call in groups:
        if call.extern is None or not is_matmul(call.extern):
            continue
        subject = f"product {call.extern.outs[0]}"
        m = of_extern(p, call.extern)
        if isinstance(m, Refusal):
            decide(DecisionKind.TEMPLATE, subject, "library call", m.reason)
            continue
        for reader in [g for g in alive.values() if g.mapped and m.out in g.reads]:
            pair = f"{subject} with kernel of {reader.mapped[-1].node.out}"
            candidate = _candidate(p, deps, alive, _Call(m, call), reader)
            choice = candidate if isinstance(candidate, Refusal) else choose(p, deps, candidate)
            if isinstance(choice, Refusal):
                decide(DecisionKind.TEMPLATE, pair, "library call", choice.reason)
                continue
            assert isinstance(candidate, Candidate)
            tiles, reason = choice
            decide(DecisionKind.TEMPLATE, pair, f"one kernel of {tiles}", reason)
            _replace(alive, candidate, tiles)
            break
    return verified(order(list(alive.values())), deps)


def _replace(alive: dict[int, Group], candidate: Candidate, tiles: Tiles) -> None:
    """Put the fused kernel in place of the reader and remove the library call."""
    gone, number = candidate.library.number, candidate.reader.number
    del alive[gone]
    alive[number] = candidate.with_tiles(tiles)
    for g in list(alive.values()):
        if gone in g.needs:
            alive[g.number] = g.with_needs((g.needs - {gone}) | {number})


def _candidate(p: Program, deps: Deps, alive: dict[int, Group], call: _Call, reader: Group) -> Candidate | Refusal:
    m, library = call.matmul, call.group
    if reader.matmul is not None:
        return Refusal("the kernel computes another product already")
    if len(deps.writers[m.out]) != 1:
        return Refusal(f"another node writes {m.out} too")
    if _depends(alive, reader.needs - {library.number}, library.number):
        return Refusal("the kernel needs another one that reads the product")
    m = _without_unread_columns(p, deps, m, reader)
    mapped = _mapped(p, m, library, reader)
    if isinstance(mapped, Refusal):
        return mapped
    members = (*library.members, *sorted(reader.members))
    fused = Group(
        number=reader.number,
        rows=ex.size_of(mapped[0].row),
        members=members,
        nodes=tuple(p.nodes[k] for k in members),
        mapped=mapped,
        needs=(library.needs | reader.needs) - {library.number, reader.number},
        reads=library.reads | reader.reads,
        writes=library.writes | reader.writes,
        matmul=m,
    )
    return Candidate(m, library, reader, fused)


def _without_unread_columns(p: Program, deps: Deps, m: Matmul, reader: Group) -> Matmul:
    """Return the product without its last columns if its only reader does not read them: padding added them."""
    rows = m.batch * m.rows
    lengths = {ex.exact_div(ex.prod(ex.size_of(d) for d in q.node.dims), rows) for q in reader.mapped}
    columns = lengths.pop()
    only_reader = m.out not in deps.escaping and set(deps.readers[m.out]) <= set(reader.members)
    if lengths or not only_reader or not isinstance(columns, int) or not LEAST <= columns < m.columns:
        return m
    return with_columns(m, columns)


def _depends(alive: dict[int, Group], starts: Iterable[int], goal: int) -> bool:
    """Return whether one of the groups `starts` depends on the group `goal`."""
    stack, visited = list(starts), set(starts)
    while stack:
        n = stack.pop()
        if n == goal:
            return True
        new = alive[n].needs - visited
        visited |= new
        stack.extend(new)
    return False


def _mapped(p: Program, m: Matmul, library: Group, reader: Group) -> tuple[MappedNode, ...] | Refusal:
    """Map all nodes onto the rows and columns of the product."""
    assert library.extern is not None
    first = fit(node_of(m, library.extern), m.batch * m.rows)
    if isinstance(first, Refusal):
        return first
    mapped = [first]
    for k in sorted(reader.members):
        node = p.nodes[k]
        if not isinstance(node, Pointwise):
            return Refusal(f"{getattr(node, 'out', 'a member')} is not pointwise")
        if p.buffers[node.out].kind != "temp":
            return Refusal(f"{node.out} is an input written in place, which other programs may still read")
        q = _at_same_points(mapped, node)
        if isinstance(q, Refusal):
            return q
        mapped.append(q)
    return tuple(mapped)


def _at_same_points(earlier: Sequence[MappedNode], node: Pointwise) -> MappedNode | Refusal:
    """Map `node` with its loops in an order in which it visits just the points of the earlier nodes."""
    writers = {q.node.out: q for q in earlier}
    read = [b for b in reads(node) if b in writers]
    points = ex.prod(ex.size_of(q) for q in (earlier[0].row, *earlier[0].inner))
    if ex.prod(ex.size_of(d) for d in node.dims) != points:
        return Refusal(f"{node.out} has other points than the product")
    for loops in _orders(node, read):
        q = cut_points(node, loops, ex.size_of(earlier[0].row))
        if isinstance(q, MappedNode) and all(same_point(writers[b], q) for b in read):
            return q
    return Refusal(f"{node.out} reads the product at other points")


def _orders(node: Pointwise, buffers: Sequence[str]) -> Iterator[list[Atom]]:
    """Yield the loops ordered by their strides in each of `buffers`, slow to fast; then in the node's order."""
    for b, index in va.loads(node.value):
        if b in buffers:
            strides = [ex.coefficient(index, d) for d in node.dims]
            if all(isinstance(s, int) and s > 0 for s in strides):
                yield [d for _, d in sorted(zip(strides, node.dims, strict=True), key=lambda x: -x[0])]  # type: ignore[operator]
    yield list(node.dims)
