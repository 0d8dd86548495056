"""Find positions of extrema in long rows, which one pass computes together with the extremum.

`argmax` is a maximum and then the least position that holds it. In one pass every element of a tile keeps the best
value that it has seen and its position. The row is then read once and not twice.
"""

from __future__ import annotations

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir import value as va
from ....ir.loops import Reduction
from ....ir.value import Value
from ...kernel import Stage
from ...loop_mapping import Kind, MappedNode
from ...one_pass_forms import position
from .inlining import inlined, reads_result


@dataclass(frozen=True)
class OnlinePosition:
    """One pass for an extremum, and for the least `position` of an element that equals it or is NaN.

    `position`: an integer at every point. `least`: the reduction of positions. `points`: pointwise nodes beside both.
    """

    extremum: MappedNode
    least: MappedNode
    position: Value
    points: tuple[MappedNode, ...]

    @property
    def members(self) -> tuple[MappedNode, ...]:
        """Return all nodes of the pass."""
        return (*self.points, self.extremum, self.least)


def online_position(first: Stage, second: Stage, stored: frozenset[str]) -> OnlinePosition | None:
    """Return two neighbouring stages as one pass; None where they compute something else."""
    points = [q for q in (*first.members, *second.members) if q.kind is Kind.POINT]
    extrema, positions = ([q for q in s.members if q.kind is not Kind.POINT] for s in (first, second))
    if first.inner != second.inner or len(extrema) != 1 or len(positions) != 1:
        return None
    (extremum,), (least,) = extrema, positions
    point_of = {q.node.out: q for q in points}
    if any(q.node.out in stored and reads_result(q, extremum, point_of) for q in points):
        return None
    if not _reduces(extremum, "max", "min") or not _reduces(least, "min"):
        return None
    operand, at = inlined(extremum.value, point_of), (extremum.node.out, extremum.index)
    row_position = position(inlined(least.value, point_of), operand, at)
    return None if row_position is None else OnlinePosition(extremum, least, row_position, tuple(points))


def first_position(one_pass: OnlinePosition) -> Value | None:
    """Return the position of a row's first point where positions grow along the row; None for other positions."""
    position, q = one_pass.position, one_pass.least
    while position.op == "cast":
        position = position.args[0]
    if position.op != "index":
        return None
    steps = [ex.coefficient(position.attr, v) for v in q.inner]
    last = steps[-1]
    if not isinstance(last, int) or last < 1:
        return None
    if any(c != ex.mul(n, last) for c, n in zip(steps, ex.strides_for(q.sizes), strict=True)):
        return None
    return va.index(ex.substitute(position.attr, dict.fromkeys(q.inner, 0)))


def _reduces(q: MappedNode, *ops: str) -> bool:
    return isinstance(q.node, Reduction) and q.kind is Kind.IN_ROW and q.node.op in ops
