"""Split small kernels into their single elements and their ranges, where many kernels are alike.

Fusion lets the step of an optimizer update its counter and its parameter in one kernel, which runs on one thread. Many
such kernels become two launches: one of all counters and one of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..ir import expr as ex
from ..ir.loops import Program
from .deps import Deps
from .fusion.group import Group
from .horizontal_fusion import Limits
from .horizontal_parts import Part, part_of
from .kernel import Kernel
from .loop_mapping import Kind, MappedNode

FEWEST = 4  # kernels that are alike before a launch more for their single elements pays off

Build = Callable[[Group], Kernel]


def split_mixed(p: Program, deps: Deps, groups: Sequence[Group], build: Build, limits: Limits) -> list[Group]:
    """Return the groups, those of single elements and a range in two where others are alike, in a valid order."""
    split_groups: dict[int, tuple[Group, Group]] = {}
    parts: dict[int, Part] = {}
    for g in groups:
        two = _halves(deps, g)
        part = None if two is None else part_of(p, build(two[1]), limits.points)
        if two is not None and part is not None:
            split_groups[g.number], parts[g.number] = two, part
    counts: dict[object, int] = {}
    for part in parts.values():
        counts[part.key] = counts.get(part.key, 0) + 1
    result: list[Group] = []
    for g in groups:
        is_split = g.number in parts and counts[parts[g.number].key] >= FEWEST
        result += split_groups[g.number] if is_split else (g,)
    return result


def _halves(deps: Deps, g: Group) -> tuple[Group, Group] | None:
    """Return the nodes of one point and those of a range as two groups, if the first need nothing of the second."""
    if g.extern is not None or g.matmul is not None or g.rows != 1 or any(q.kind is not Kind.POINT for q in g.mapped):
        return None
    points = [ex.prod(q.sizes) for q in g.mapped]
    lengths = {n for n in points if n != 1}
    if 1 not in points or len(lengths) != 1:
        return None
    single = [k for k, n in enumerate(points) if n == 1]
    ranged = [k for k, n in enumerate(points) if n != 1]
    later = {g.members[k] for k in ranged}
    if any(deps.before[g.members[k]] & later for k in single):
        return None
    return _part(g, single), _part(g, ranged)


def _part(g: Group, positions: Sequence[int]) -> Group:
    """Return the group of some nodes; the buffers that it reads and writes are not used any more."""
    mapped: tuple[MappedNode, ...] = tuple(g.mapped[k] for k in positions)
    members, nodes = tuple(g.members[k] for k in positions), tuple(g.nodes[k] for k in positions)
    return replace(g, members=members, nodes=nodes, mapped=mapped)
