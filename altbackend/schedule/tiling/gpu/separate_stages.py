"""Split a kernel of points whose stages run through memory in different orders into one kernel a stage.

Nodes that read one tensor share a kernel. Where they store in different orders, one axis over all elements fits none
of them. A copy of an image into channels-last beside a pool of it took 5.3 ms in one kernel, and about 1 ms in three.
Alone, a stage takes tiles over both orders (`choose.py`).
"""

from __future__ import annotations

from dataclasses import replace

from ....debug.trace import DecisionKind
from ....ir import value as va
from ....ir.loops import Extern, Program, writes
from ...deps import Deps
from ...device import Device
from ...fusion.group import Decision, Group, open_group
from ...kernel import Kernel, Stage, build
from ...loop_mapping import Kind
from ...rows import total_points
from .choose import transposed_sides

LARGE = 1 << 20  # elements from which another launch costs less than another pass in the wrong order


def separate_stages(p: Program, deps: Deps, k: Kernel, device: Device, decide: Decision) -> list[Kernel]:
    """Return the kernel, or a kernel for each of its stages if they share no values and a large one takes tiles."""
    if k.rows != 1 or k.matmul is not None or len(k.stages) < 2 or not _are_independent(k):
        return [k]
    if any(q.kind is not Kind.POINT for q in k.nodes) or all(total_points(q) < LARGE for q in k.nodes):
        return [k]
    alone = [build(p, deps, _group(p, k, s, device), device) for s in k.stages]
    if all(transposed_sides(stage) is None or total_points(stage.nodes[0]) < LARGE for stage in alone):
        return [k]
    outs = ", ".join(q.node.out for q in k.nodes)
    decide(DecisionKind.KERNEL, outs, "one kernel per stage", "they run through memory in different orders")
    return alone


def _are_independent(k: Kernel) -> bool:
    """Return whether each buffer is written by one stage alone, and no other stage of the kernel reads it.

    A stage may write a buffer by several nodes, as the parts of a concatenation.
    """
    stage_of = {q.node.out: s for s in k.stages for q in s.members}
    touched = ((s, b) for s in k.stages for q in s.members for b in (q.node.out, *(b for b, _ in va.loads(q.value))))
    return all(stage_of.get(b, s) is s for s, b in touched)


def _group(p: Program, k: Kernel, stage: Stage, device: Device) -> Group:
    """Return the group of the nodes of a stage, on one row."""
    outs = {q.node.out for q in stage.members}
    first, *rest = (n for n in k.members if not outs.isdisjoint(writes(p.nodes[n])))
    group = open_group(first, first, p.nodes[first], device)
    for n in rest:
        node = p.nodes[n]
        assert not isinstance(node, Extern)
        alone = open_group(n, n, node, device)
        group = replace(group.with_node(n, node), mapped=(*group.mapped, *alone.mapped))
    return group
