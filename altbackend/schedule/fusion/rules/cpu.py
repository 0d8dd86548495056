"""Fusion rules of a CPU, whose threads keep a row in their cache: a node may read any point of its row again."""

from __future__ import annotations

from ....ir import expr as ex
from ...device import Cpu
from ...loop_mapping import Kind, Refusal
from ...rows import total_points
from ...tiling.cpu.transpose import runs_in_parallel
from ..group import Fusion
from .rule import Edge, Proposal, Rule, Table


def _scratch_fits(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse rows whose values between the loops exceed the cache."""
    assert isinstance(fusion.device, Cpu)
    if proposal.group.rows == 1:
        return None
    total = 0
    for q in proposal.mapped:
        itemsize = fusion.program.buffers[q.node.out].dtype.itemsize
        total += ex.bounds(q.results)[1] * itemsize if not ex.syms_of(q.results) else 0
    return Refusal(f"a row would store {total} bytes in scratch") if total > fusion.device.scratch_bytes else None


def _equal_loops(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse pointwise loops of other lengths or orders beside a large one, which no threads could share."""
    mapped = proposal.mapped
    if proposal.group.rows != 1 or any(q.kind is not Kind.POINT for q in mapped):
        return None
    if max(map(total_points, mapped)) < fusion.single_row_limit:
        return None
    lengths = len({q.points for q in mapped})
    if lengths > 1 or not runs_in_parallel(mapped):
        loops = "loops of several lengths" if lengths > 1 else "loops in several orders"
        return Refusal(f"{loops}: the fused kernel would run on one {fusion.worker}")
    return None


def _errors_first(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse a kernel that writes an input and reports errors of an earlier node: eager raises, and writes nothing."""
    members = proposal.group.members
    first = min((k for k in members if k in fusion.deps.raising), default=members[-1])
    for k, q in zip(members, proposal.mapped, strict=True):
        if k > first and fusion.program.buffers[q.node.out].kind == "input":
            return Refusal(f"{q.node.out} would be written although an earlier node raises an error")
    return None


def _parallel_reads(fusion: Fusion, edge: Edge) -> Refusal | None:
    """Refuse reads at other points, or by a scan, in a large kernel without rows: no loop could run in parallel."""
    scanned = edge.reader.kind is Kind.SCAN
    if edge.rows != 1 or edge.writer.kind is Kind.IN_ROW or (edge.at_same_point and not scanned):
        return None
    if max(total_points(edge.writer), total_points(edge.reader)) >= fusion.single_row_limit:
        where = f"{edge.buffer} is read {'by a scan' if scanned else 'at other points than it is written'}"
        return Refusal(f"{where}: the fused kernel would run on one {fusion.worker}")
    return None


CPU = Table(
    mapping=(
        Rule("scratch fits in the cache", _scratch_fits),
        Rule("a large pointwise kernel without rows is one loop", _equal_loops),
        Rule("errors are raised before an input is written", _errors_first),
    ),
    edges=(Rule("large kernels without rows read at the same point, and scan nothing of theirs", _parallel_reads),),
)
