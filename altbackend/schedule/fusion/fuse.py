"""Fusion: decide which loop nodes share a kernel.

Fusion takes the nodes in program order. A node joins the kernel with which it shares the most bytes. Its loops must map
onto the rows of that kernel, and no rule (`rules/`) may refuse. Every refusal is recorded with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...config.options import Config
from ...debug.trace import DecisionKind
from ...ir.loops import Buffer, Extern, Loop, Pointwise, Program, Reduction, reads, writes
from ..deps import Deps
from ..device import Device
from ..loop_mapping import Refusal
from ..reachability import Reachability
from ..rows import estimate
from .group import Decision, Fusion, Group, open_group
from .join import join, redirect
from .late_totals import join_late_totals
from .order import order, verified

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
    if config.fuse:
        groups = merge(fusion, groups, reachability)
    if fusion.on_gpu and config.fuse:
        groups = join_late_totals(fusion, groups, reachability)
    return verified(order(groups), deps)


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


# --- kernels join ----------------------------------------------------------------------------------------------------


def merge(fusion: Fusion, groups: Sequence[Group], reachability: Reachability) -> list[Group]:
    """Join kernels with kernels that they read from, where a node between them prevented it at first.

    On a GPU a kernel less is a launch and a pass over memory less. On a CPU, pointwise values join the kernel of rows
    that alone reads them.
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
            redirect(alive, users, earlier, merged)
    return list(alive.values())


def _merge_into(
    fusion: Fusion, alive: dict[int, Group], reachability: Reachability, number: int
) -> tuple[Group, Group] | None:
    """Return the latest kernel that kernel `number` needs and can join, with both as one; None where none can."""
    later = alive[number]
    needed = [alive[n] for n in later.needs if fusion.on_gpu or _values_for_rows(fusion, alive[n], later)]
    for earlier in sorted(needed, key=lambda g: -g.number):
        merged = _merged(fusion, reachability, earlier, later)
        subject = f"kernel of {_opener(later)} with kernel of {_opener(earlier)}"
        if isinstance(merged, Group):
            fusion.decide(DecisionKind.FUSION, subject, "fused", "the one reads from the other")
            return earlier, merged
        fusion.decide(DecisionKind.FUSION, subject, "not fused", merged.reason)
    return None


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
    if not fusion.on_gpu and merged.rows != later.rows:
        return Refusal("the kernel would have other rows")
    return merged.with_needs((earlier.needs | others) - {earlier.number})


def _values_for_rows(fusion: Fusion, earlier: Group, later: Group) -> bool:
    """Return whether the earlier kernel is pointwise and nothing but the later one, which has rows, reads it."""
    pointwise = all(isinstance(n, Pointwise) for n in earlier.nodes)
    readers = {k for b in earlier.writes for k in fusion.deps.readers.get(b, ())}
    alone = readers <= {*earlier.members, *later.members} and earlier.writes.isdisjoint(fusion.deps.escaping)
    return later.rows != 1 and pointwise and alone
