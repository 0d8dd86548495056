"""Join a node to a kernel under construction: find rows on which all nodes of the kernel fit, and ask the rules."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.loops import Extern, Loop, Pointwise, Scan
from ..access import same_point
from ..device import Cpu
from ..loop_mapping import ENOUGH_ROWS, Kind, MappedNode, Refusal, mappings, natural_rows, ordered_vars, rdims
from ..row_parts import on_rows_of_group
from .group import Fusion, Group
from .rules.rule import Proposal
from .rules.table import refuse_mapping, refuse_nodes


def join(fusion: Fusion, group: Group, k: int, node: Loop) -> Group | Refusal:
    """Return `group` with node number `k`, mapped anew where the rows change, or the refusal of the last attempt."""
    joined = group.with_node(k, node)
    if (refusal := refuse_nodes(fusion, joined)) is not None:
        return refusal
    flexible = group.rows == 1 and all(q.kind is Kind.POINT or not q.node.dims for q in group.mapped)
    row_counts: list[Index] = [group.rows]
    if flexible:
        row_counts = [1 if r is None else r for r in natural_rows(node, row_per_result=fusion.on_gpu)] + [1]
    elif (fewer := _whole_rows(fusion, group, node)) is not None:
        row_counts.insert(0, fewer)
    last = Refusal("no common rows")
    for rows in dict.fromkeys(row_counts):
        mapped = _join_on_rows(fusion, group, joined, rows)
        if isinstance(mapped, Group):
            return mapped
        last = mapped
    return last


def _whole_rows(fusion: Fusion, group: Group, node: Loop) -> int | None:
    """Return fewer rows for a CPU kernel that would read other parts of a buffer for `node` than for its other nodes.

    A mean over 576 points of each of 32x8 channels has 256 rows. A mean over the 8 channels would be cut into blocks of
    72 points to have as many; on 32 rows, both read the same image. None where rows agree or too few would remain.
    """
    if fusion.on_gpu or not isinstance(group.rows, int):
        return None
    candidates = mappings(node, group.rows)
    if isinstance(candidates, Refusal) or any(_reads_alike(q, group.mapped) for q in candidates):
        return None
    least = max(ENOUGH_ROWS, fusion.device.threads if isinstance(fusion.device, Cpu) else 1)
    whole: Index = 1
    rows: int | None = None
    for v in ordered_vars(node):
        whole = ex.mul(whole, ex.size_of(v))
        if v in rdims(node) or not isinstance(whole, int) or whole >= group.rows or group.rows % whole:
            break
        rows = whole if whole >= least else rows
    return rows


def _reads_alike(q: MappedNode, others: Sequence[MappedNode]) -> bool:
    """Return whether a node reads, of each buffer that others read, the range that one of them reads in a row."""
    ranges: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for r in others:
        for buffer, index in va.loads(r.value):
            ranges.setdefault(buffer, set()).add(_range(index, r.row))
    return all(_range(index, q.row) in ranges[b] for b, index in va.loads(q.value) if b in ranges)


@functools.lru_cache(maxsize=8192)  # each node that may join a kernel asks about all reads of the kernel
def _range(index: Index, row: Atom) -> tuple[tuple[int, int], ...]:
    """Return the first and last element that the first two rows read."""
    return tuple(ex.bounds(ex.substitute(index, {row: k})) for k in (0, 1))


def _join_on_rows(fusion: Fusion, group: Group, joined: Group, rows: Index) -> Group | Refusal:
    """Return `joined` with all nodes mapped onto `rows` rows. `group`: the same kernel without the last node."""
    node = joined.nodes[-1]
    assert not isinstance(node, Extern)
    candidates = mappings(node, rows, any_order=fusion.on_gpu)
    if isinstance(candidates, Refusal):
        return Refusal(f"{node.out} on {ex.show(rows)} rows: {candidates.reason}")
    if fusion.on_gpu and rows == group.rows and isinstance(node, (Pointwise, Scan)):
        aligned = on_rows_of_group(node, group.mapped)
        candidates = candidates if aligned is None or aligned in candidates else (*candidates, aligned)
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


def redirect(alive: dict[int, Group], users: dict[int, set[int]], gone: Group, merged: Group) -> None:
    """Let kernels that needed kernel `gone` need `merged`; `users` has the numbers of the kernels that need each."""
    for n in gone.needs:
        users[n].discard(gone.number)
    for n in merged.needs:
        users.setdefault(n, set()).add(merged.number)
    for n in users.pop(gone.number, set()) - {merged.number}:
        alive[n] = alive[n].with_needs((alive[n].needs - {gone.number}) | {merged.number})
        users.setdefault(merged.number, set()).add(n)
