"""Values of nodes with those of the pointwise nodes beside them in place of loads."""

from __future__ import annotations

from ....ir import value as va
from ....ir.value import Value
from ...loop_mapping import MappedNode


def inlined(v: Value, point_of: dict[str, MappedNode]) -> Value:
    """Return `v` with the values of pointwise nodes of the same loops in place of loads of their results."""

    def on_load(x: Value) -> Value | None:
        name, index = x.attr
        point = point_of.get(name)
        return inlined(point.value, point_of) if point is not None and point.index is index else None

    return va.rewrite(v, on_load=on_load)


def reads_result(q: MappedNode, reduction: MappedNode, point_of: dict[str, MappedNode]) -> bool:
    """Return whether a point depends on a reduction, which a single pass knows only at its end."""
    return any(b == reduction.node.out for b, _ in va.loads(inlined(q.value, point_of)))
