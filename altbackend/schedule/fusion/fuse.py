"""Fusion: decide which loop nodes share a kernel.

Fusion takes the nodes in program order. A node joins the kernel with which it shares the most bytes. Its loops must map
onto the rows of that kernel, and no rule (`rules/`) may refuse. Every refusal is recorded with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...config.options import Config
from ...debug.trace import DecisionKind
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Buffer, Extern, Loop, Program, Reduction, reads, writes
from ..access import same_point
from ..deps import Deps, analyse
from ..device import Device, Gpu
from ..loop_mapping import Kind, MappedNode, Refusal, mappings, natural_rows, ordered_vars
from ..reachability import Reachability
from ..rows import estimate
from ..split import cuts_of
from .group import Decision, Fusion, Group, ignore, open_group
from .order import order
from .rules.rule import Proposal
from .rules.table import refuse_mapping, refuse_nodes

HORIZONTAL_REACH = 24  # how many kernels back a node looks for one that reads the same data


def fuse(p: Program, deps: Deps, config: Config, device: Device, decide: Decision) -> list[Group]:
    """Partition the nodes of `p` into kernels and library calls, in an order that respects `deps`."""
    fusion = Fusion(p, deps, config, device, decide)
    groups: list[Group] = []
    reachability = Reachability()
    number_of: dict[int, int] = {}
    for k, node in enumerate(p.nodes):
        needs = frozenset(number_of[d] for d in deps.before[k])
        group = None
        if not isinstance(node, Extern) and config.fuse:
            group = _join_best(fusion, groups, reachability, k, needs)
        if group is None:
            group = open_group(len(groups), k, node, device)
            groups.append(group)
        groups[group.number] = group.with_needs(group.needs | needs)
        reachability.add(group.number, needs)
        number_of[k] = group.number
    if fusion.on_gpu and config.fuse:
        groups = merge(fusion, groups, reachability)
    return order(groups)


def totals_over_rows(p: Program, config: Config, device: Device) -> frozenset[str]:
    """Return the buffers that a GPU kernel of whole rows totals beside its other work (a LayerNorm's weight gradients).

    Split reductions would leave that kernel and read all of their data once more. Which reductions these are is known
    only once the program is fused without splitting, so that such programs are fused twice.
    """
    if not isinstance(device, Gpu) or not any(_is_cut_column(n, device) for n in p.nodes):
        return frozenset()
    groups = fuse(p, analyse(p), config, device, ignore)
    return frozenset(q.node.out for g in groups for q in g.mapped if q.kind is Kind.CROSS_ROW)


def _is_cut_column(n: object, device: Gpu) -> bool:
    if not isinstance(n, Reduction) or not n.dims or ordered_vars(n)[-1] in n.rdims:
        return False
    return cuts_of(n, device) is not None


# --- a node joins a kernel -------------------------------------------------------------------------------------------


def _join_best(
    fusion: Fusion, groups: Sequence[Group], reachability: Reachability, k: int, needs: frozenset[int]
) -> Group | None:
    """Return the kernel with which node `k` shares the most bytes, with the node; None where all refuse."""
    node = fusion.program.nodes[k]
    assert not isinstance(node, Extern)
    read = frozenset(reads(node))
    candidates = {n: groups[n] for n in needs}
    for g in groups[-HORIZONTAL_REACH:]:
        if not g.reads.isdisjoint(read) or (fusion.on_gpu and _are_siblings(g, node, needs)):
            candidates[g.number] = g
    kernels = [g for g in candidates.values() if g.extern is None]
    for shared, number in sorted(((_shared_bytes(fusion.program, g, read), g.number) for g in kernels), reverse=True):
        group = groups[number]
        subject = f"{node.out} with kernel of {group.mapped[0].node.out}"
        if (via := reachability.path(needs, number)) is not None:
            joined: Group | Refusal = Refusal(f"it needs kernel {via}, which needs this kernel")
        else:
            joined = join(fusion, group, k, node)
        if isinstance(joined, Group):
            fusion.decide(DecisionKind.FUSION, subject, "fused", f"{shared} bytes shared")
            return joined
        fusion.decide(DecisionKind.FUSION, subject, "not fused", joined.reason)
    return None


def _are_siblings(g: Group, node: Loop, needs: frozenset[int]) -> bool:
    """Return whether both reduce what one kernel wrote (the two of a normalisation's backward) to equal shapes."""
    first = g.mapped[0].node if g.mapped else None
    alike = isinstance(node, Reduction) and isinstance(first, Reduction) and first.dims == node.dims
    return alike and bool(node.dims) and bool(g.needs & needs)


def _shared_bytes(p: Program, g: Group, read: frozenset[str]) -> int:
    return sum(_bytes(p.buffers[b]) for b in read & (g.writes | g.reads))


def _bytes(b: Buffer) -> int:
    return estimate(b.numel) * b.dtype.itemsize


def join(fusion: Fusion, group: Group, k: int, node: Loop) -> Group | Refusal:
    """Return `group` with node number `k`, mapped anew where the rows change, or the refusal of the last attempt."""
    joined = group.with_node(k, node)
    if (refusal := refuse_nodes(fusion, joined)) is not None:
        return refusal
    flexible = group.rows == 1 and all(q.kind is Kind.POINT or not q.node.dims for q in group.mapped)
    row_counts: list[Index] = [group.rows]
    if flexible:
        row_counts = [1 if r is None else r for r in natural_rows(node, row_per_result=fusion.on_gpu)] + [1]
    last = Refusal("no common rows")
    for rows in dict.fromkeys(row_counts):
        mapped = _join_on_rows(fusion, group, joined, rows)
        if isinstance(mapped, Group):
            return mapped
        last = mapped
    return last


def _join_on_rows(fusion: Fusion, group: Group, joined: Group, rows: Index) -> Group | Refusal:
    """Return `joined` mapped onto `rows` rows; `group` is mapped, and lacks the last node of `joined`."""
    node = joined.nodes[-1]
    assert not isinstance(node, Extern)
    candidates = mappings(node, rows, any_order=fusion.on_gpu)
    if isinstance(candidates, Refusal):
        return Refusal(f"{node.out} on {ex.show(rows)} rows: {candidates.reason}")
    new = tuple(range(len(group.mapped) + 1)) if rows != group.rows else (len(group.mapped),)
    first: Refusal | None = None
    for last in candidates:
        earlier = group.mapped if rows == group.rows else _mapped_anew(fusion, group.mapped, last, rows)
        if isinstance(earlier, Refusal):
            return earlier
        proposal = Proposal(replace(joined, rows=rows, mapped=(*earlier, last)), new)
        refusal = refuse_mapping(fusion, proposal)
        if refusal is None:
            return proposal.group
        first = first or refusal
    assert first is not None
    return first


def _mapped_anew(
    fusion: Fusion, mapped: Sequence[MappedNode], last: MappedNode, rows: Index
) -> tuple[MappedNode, ...] | Refusal:
    """Return the nodes of a kernel mapped onto other rows, if possible such that readers use the points of their row.

    `last` is the node that joins them, already mapped.
    """
    result = [last]
    for q in reversed(mapped):
        candidates = mappings(q.node, rows, any_order=fusion.on_gpu)
        if isinstance(candidates, Refusal):
            return Refusal(f"{q.node.out} on {ex.show(rows)} rows: {candidates.reason}")
        readers = [r for r in result if any(b == q.node.out for b, _ in va.loads(r.value))] if fusion.on_gpu else []
        aligned = (c for c in candidates if all(same_point(c, r) for r in readers))
        result.insert(0, next(aligned, candidates[0]))
    return tuple(result[:-1])


# --- kernels of a GPU join --------------------------------------------------------------------------------------------


def merge(fusion: Fusion, groups: Sequence[Group], reachability: Reachability) -> list[Group]:
    """Join kernels with kernels that they read from, where a node between them prevented it at first.

    On a GPU a kernel less is a launch and a pass over memory less.
    """
    alive = {g.number: g for g in groups}
    users: dict[int, set[int]] = {}
    for g in groups:
        for n in g.needs:
            users.setdefault(n, set()).add(g.number)
    for number in range(len(groups)):
        while number in alive and (pair := _merge_into(fusion, alive, reachability, number)) is not None:
            earlier, merged = pair
            alive[number] = merged
            del alive[earlier.number]
            reachability.join(earlier.number, number)
            _redirect(alive, users, earlier, merged)
    return list(alive.values())


def _merge_into(
    fusion: Fusion, alive: dict[int, Group], reachability: Reachability, number: int
) -> tuple[Group, Group] | None:
    """Return the latest kernel that kernel `number` needs and can join, with both as one; None where none can."""
    later = alive[number]
    for earlier in sorted((alive[n] for n in later.needs), key=lambda g: -g.number):
        merged = _merged(fusion, reachability, earlier, later)
        subject = f"kernel of {_opener(later)} with kernel of {_opener(earlier)}"
        if isinstance(merged, Group):
            fusion.decide(DecisionKind.FUSION, subject, "fused", "the one reads from the other")
            return earlier, merged
        fusion.decide(DecisionKind.FUSION, subject, "not fused", merged.reason)
    return None


def _redirect(alive: dict[int, Group], users: dict[int, set[int]], gone: Group, merged: Group) -> None:
    """Let kernels that needed kernel `gone` need `merged`; `users` has the numbers of the kernels that need each."""
    for n in gone.needs:
        users[n].discard(gone.number)
    for n in merged.needs:
        users.setdefault(n, set()).add(merged.number)
    for n in users.pop(gone.number, set()) - {merged.number}:
        alive[n] = alive[n].with_needs((alive[n].needs - {gone.number}) | {merged.number})
        users.setdefault(merged.number, set()).add(n)


def _opener(g: Group) -> str:
    return next(iter(writes(g.nodes[0])), "a library call")


def _merged(fusion: Fusion, reachability: Reachability, earlier: Group, later: Group) -> Group | Refusal:
    """Return one kernel of the nodes of both, mapped anew in program order."""
    if earlier.extern is not None or later.extern is not None:
        return Refusal("a library call")
    others = later.needs - {earlier.number}
    if (via := reachability.path(others, earlier.number)) is not None:
        return Refusal(f"it needs kernel {via}, which needs the other")
    first, *rest = sorted((*earlier.members, *later.members))
    merged = open_group(later.number, first, fusion.program.nodes[first], fusion.device)
    for k in rest:
        node = fusion.program.nodes[k]
        assert not isinstance(node, Extern)
        joined = join(fusion, merged, k, node)
        if isinstance(joined, Refusal):
            return joined
        merged = joined
    return merged.with_needs((earlier.needs | others) - {earlier.number})
