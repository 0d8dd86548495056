"""Fusion rules of all devices."""

from __future__ import annotations

from ....ir import value as va
from ....ir.loops import Scatter
from ...access import outside_row, reads_same_point
from ...loop_mapping import Kind, MappedNode, Refusal
from ...rows import total_points
from ..group import Fusion, Group
from .rule import Edge, Proposal, Rule, Table

# --- groups before mapping -------------------------------------------------------------------------------------------


def _max_nodes(fusion: Fusion, group: Group) -> Refusal | None:
    limit = fusion.config.max_fused_nodes
    if len(group.members) > limit:
        return Refusal(f"the kernel already holds max_fused_nodes={limit} nodes")
    return None


def _lone_scatter(fusion: Fusion, group: Group) -> Refusal | None:
    if any(isinstance(node, Scatter) for node in group.nodes):
        return Refusal("a scatter runs alone")
    return None


# --- mapped groups ---------------------------------------------------------------------------------------------------


def _single_row(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse large reductions of several results in a kernel without parallel rows."""
    if proposal.group.rows != 1:
        return None
    reductions = (q for q in proposal.mapped if q.kind is Kind.IN_ROW and q.node.dims)
    if any(total_points(q) >= fusion.single_row_limit for q in reductions):
        return Refusal(f"with a single row it would run on one {fusion.worker}")
    return None


def _overwrites(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse a kernel that overwrites an input in place and reads it afterwards, or at other points."""
    for n in proposal.new:
        for k, other in enumerate(proposal.mapped):
            if k != n and (refusal := _overwrite(fusion, proposal.mapped[n], other)) is not None:
                return refusal
    return None


def _parts(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse a kernel that writes a part of a buffer after it reads another part, since values go by their buffer.

    The part that it reads comes from another kernel: `_one_writer` refuses reads of parts that the kernel wrote.
    """
    shared = {q.node.out for q in proposal.mapped if len(fusion.deps.writers[q.node.out]) > 1}
    for reader in proposal.mapped:
        for b in shared.intersection(b for b, _ in va.loads(reader.value)):
            if any(q.node.out == b for q in proposal.mapped if q is not reader):
                return Refusal(f"the kernel reads other parts of {b} than it writes")
    return None


def _overwrite(fusion: Fusion, node: MappedNode, other: MappedNode) -> Refusal | None:
    buffers, out, other_out = fusion.program.buffers, node.node.out, other.node.out
    in_place = buffers[out].kind != "temp"
    if in_place and any(b == out for b, _ in va.loads(other.value)):
        points = node.kind is other.kind is Kind.POINT
        if not (points and reads_same_point(node, other, out)):
            return Refusal(f"{out} would be overwritten while the kernel still reads it")
    if buffers[other_out].kind != "temp" and any(b == other_out for b, _ in va.loads(node.value)):
        return Refusal(f"{other_out} is overwritten earlier in the kernel")
    return Refusal(f"{out} is written twice") if in_place and other_out == out else None


# --- reads -----------------------------------------------------------------------------------------------------------


def _complete(fusion: Fusion, edge: Edge) -> Refusal | None:
    if edge.writer.kind is Kind.CROSS_ROW:
        return Refusal(f"{edge.buffer} is complete only after the last row")
    return None


def _one_writer(fusion: Fusion, edge: Edge) -> Refusal | None:
    if len(fusion.deps.writers[edge.buffer]) > 1:
        return Refusal(f"several nodes write parts of {edge.buffer}")
    return None


def _full_reduction(fusion: Fusion, edge: Edge) -> Refusal | None:
    single = edge.rows == 1 and edge.writer.kind is Kind.IN_ROW
    if single and total_points(edge.writer) >= fusion.single_row_limit:
        return Refusal(f"{edge.buffer} reduces everything: the fused kernel would run on one {fusion.worker}")
    return None


def _within_row(fusion: Fusion, edge: Edge) -> Refusal | None:
    if fusion.on_gpu and edge.at_scanned_point:
        return None
    return None if edge.at_same_point else outside_row(edge.writer, edge.reader, edge.buffer, edge.index)


COMMON = Table(
    nodes=(
        Rule("at most max_fused_nodes", _max_nodes),
        Rule("a scatter runs alone", _lone_scatter),
    ),
    mapping=(
        Rule("large reductions need rows", _single_row),
        Rule("no read of an overwritten input", _overwrites),
        Rule("no part is read where another is written", _parts),
    ),
    edges=(
        Rule("values are complete when read", _complete),
        Rule("values have one writer", _one_writer),
        Rule("large full reductions end a kernel", _full_reduction),
        Rule("reads stay within the row", _within_row),
    ),
)
