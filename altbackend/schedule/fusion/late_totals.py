"""Let totals of columns join a kernel over the same data that a later node opened.

A kernel of rows takes totals over its rows beside its other work (`Kind.CROSS_ROW`). Fusion goes in program order:
totals that come first open a kernel of their own. Each of its rows is one column, and no other node fits on such rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...debug.trace import DecisionKind
from ...ir.loops import Extern, Loop, Pointwise, Reduction, reads, writes
from ..loop_mapping import Kind, Refusal, ordered_vars
from ..reachability import Reachability
from ..rows import estimate
from .group import Fusion, Group, open_group
from .join import join, redirect

REACH = 24  # how many kernels forward or back a kernel of totals looks for one that reads the same data


def join_late_totals(fusion: Fusion, groups: Sequence[Group], reachability: Reachability) -> list[Group]:
    """Return the kernels, with totals of columns in the kernel of rows with which they share the most bytes.

    Nodes that compute values from the totals stay behind, as a kernel of their own.
    """
    alive = {g.number: g for g in groups}
    users: dict[int, set[int]] = {}
    for g in groups:
        for n in g.needs:
            users.setdefault(n, set()).add(g.number)
    for number in [g.number for g in groups if _are_totals_of_columns(g)]:
        totals = alive[number]
        for rows in _candidates(fusion, totals, alive):
            moved = _moved(fusion, reachability, rows, totals)
            subject = f"totals of {', '.join(sorted(totals.writes))} with kernel of {min(rows.writes)}"
            if isinstance(moved, Refusal):
                fusion.decide(DecisionKind.FUSION, subject, "not fused", moved.reason)
                continue
            fusion.decide(DecisionKind.FUSION, subject, "fused", "one pass over the data")
            alive[rows.number], rest = moved
            if rest is None:
                del alive[number]
                reachability.join(number, rows.number)
                redirect(alive, users, totals, alive[rows.number])
            else:
                alive[number] = rest
                reachability.add(number, (rows.number,))
                reachability.add(rows.number, alive[rows.number].needs)
                _enter(users, alive[rows.number])
                _enter(users, rest)
            break
    return list(alive.values())


def _enter(users: dict[int, set[int]], g: Group) -> None:
    for n in g.needs:
        users.setdefault(n, set()).add(g.number)


def _are_totals_of_columns(g: Group) -> bool:
    """Return whether a kernel reduces columns, whose results, not elements, are neighbours; it may hold points too."""
    reductions = [n for n in g.nodes if isinstance(n, Reduction)]
    others_are_points = all(isinstance(n, (Reduction, Pointwise)) for n in g.nodes)
    columns = all(n.dims and ordered_vars(n)[-1] not in n.rdims for n in reductions)
    return g.extern is None and g.matmul is None and bool(reductions) and others_are_points and columns


def _candidates(fusion: Fusion, totals: Group, alive: Mapping[int, Group]) -> Iterable[Group]:
    """Return kernels of several rows that read data of the totals, those with the most shared bytes first."""
    near = (alive[n] for n in range(totals.number - REACH, totals.number + REACH + 1) if n in alive)
    rows = [g for g in near if g.extern is None and g.number != totals.number and g.rows not in (1, totals.rows)]
    shared = {g.number: _bytes(fusion, totals.reads & (g.reads | g.writes)) for g in rows}
    # a kernel that shares only statistics of rows would save no pass: it must share half of the data
    enough = _bytes(fusion, totals.reads) // 2
    return sorted((g for g in rows if shared[g.number] > enough), key=lambda g: (-shared[g.number], g.number))


def _bytes(fusion: Fusion, names: Iterable[str]) -> int:
    buffers = fusion.program.buffers
    return sum(estimate(buffers[b].numel) * buffers[b].dtype.itemsize for b in names)


def _moved(
    fusion: Fusion, reachability: Reachability, rows: Group, totals: Group
) -> tuple[Group, Group | None] | Refusal:
    """Return the kernel `rows` with the totals behind its own nodes, and what remains of the kernel of the totals."""
    if totals.number in rows.needs:
        return Refusal("it reads one of the totals")
    pairs = ((rows.needs, totals), (totals.needs - {rows.number}, rows))
    for needs, other in pairs:
        if (via := reachability.path(needs, other.number)) is not None:
            return Refusal(f"kernel {via} lies between them")
    left = frozenset(b for n in totals.nodes if isinstance(n, Pointwise) for b in writes(n))
    if any(not left.isdisjoint(reads(n)) for n in totals.nodes if isinstance(n, Reduction)):
        return Refusal("its totals read what its other nodes compute, which stays behind")
    merged, rest = rows, list[tuple[int, Loop]]()
    for k, node in zip(totals.members, totals.nodes, strict=True):
        assert not isinstance(node, Extern)
        if isinstance(node, Pointwise):
            rest.append((k, node))
            continue
        joined = join(fusion, merged, k, node)
        if isinstance(joined, Refusal):
            return joined
        if joined.mapped[-1].kind is not Kind.CROSS_ROW or joined.rows != rows.rows:
            return Refusal("it would not total the rows of that kernel")
        merged = joined
    merged = merged.with_needs((rows.needs | totals.needs) - {totals.number})
    if not rest:
        return merged, None
    remaining = open_group(totals.number, *rest[0], fusion.device)
    for k, node in rest[1:]:
        joined = join(fusion, remaining, k, node)
        if isinstance(joined, Refusal):
            return joined
        remaining = joined
    return merged, remaining.with_needs(totals.needs | {rows.number})
