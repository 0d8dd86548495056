"""Find sums of exp(v - max v) over long rows, which one pass computes together with the maximum.

The pass reads the row once and not twice: it rescales the running sum whenever a block of the row raises the maximum
(`schedule/one_pass_forms.py`).
"""

from __future__ import annotations

from altbackend.lazy_dataclass import dataclass

from ....ir.loops import Reduction
from ...kernel import Stage
from ...loop_mapping import Kind, MappedNode
from ...one_pass_forms import is_exp_below
from .inlining import inlined, reads_result


@dataclass(frozen=True)
class OnlineSoftmax:
    """One pass for a maximum and the `sums` of exp(value - maximum); `points` are the pointwise nodes beside them."""

    maximum: MappedNode
    sums: tuple[MappedNode, ...]
    points: tuple[MappedNode, ...]

    @property
    def members(self) -> tuple[MappedNode, ...]:
        """Return all nodes of the pass."""
        return (*self.points, self.maximum, *self.sums)


def online_softmax(first: Stage, second: Stage, stored: frozenset[str]) -> OnlineSoftmax | None:
    """Return two neighbouring stages as one pass; None where they compute something else."""
    points = [q for q in (*first.members, *second.members) if q.kind is Kind.POINT]
    maxima, sums = ([q for q in s.members if q.kind is not Kind.POINT] for s in (first, second))
    if first.inner != second.inner or len(maxima) != 1 or not sums:
        return None
    (maximum,) = maxima
    point_of = {q.node.out: q for q in points}
    if any(q.node.out in stored and reads_result(q, maximum, point_of) for q in points):
        return None
    value, at = inlined(maximum.value, point_of), (maximum.node.out, maximum.index)
    if not _reduces(maximum, "max"):
        return None
    if not all(_reduces(q, "sum") and is_exp_below(inlined(q.value, point_of), value, at) for q in sums):
        return None
    return OnlineSoftmax(maximum, tuple(sums), tuple(points))


def _reduces(q: MappedNode, op: str) -> bool:
    in_row = isinstance(q.node, Reduction) and q.kind is Kind.IN_ROW and q.node.op == op
    return in_row and q.value.dtype.is_floating_point
