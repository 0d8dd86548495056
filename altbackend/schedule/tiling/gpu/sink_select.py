"""Move selections between two numbers of a row towards the root: f(where(c, a, b)) -> where(c, f(a), f(b)).

Where `c` differs from element to element and `a` and `b` do not, `f` is then computed twice a row. It is not computed
for every element, and the bits are the same. The gradient of a cross-entropy is such a tree: -1 at one class and 0 at
all others, times a number of the row, rounded.
"""

from __future__ import annotations

from collections.abc import Callable

from ....ir import value as va
from ....ir.ops import OPS
from ....ir.value import Value

Axes = Callable[[Value], frozenset[str]]


def sink_selects(root: Value, axes: Axes) -> Value:
    """Return the same scalar with selections as late as they pay. `axes`: the tile axes along which a value differs."""
    if not any(v.op == "where" for v in va.walk(root)):
        return root
    memo: dict[Value, Value] = {}
    for v in va.walk(root):
        args = tuple(memo.get(a, a) for a in v.args)
        memo[v] = _distributed(v, args, axes) or (v if args == v.args else va.make(v.op, args, v.dtype, v.attr))
    return memo[root]


def _distributed(v: Value, args: tuple[Value, ...], axes: Axes) -> Value | None:
    """Return `v` of `args` as a selection between two results; None where its arguments are no such selection."""
    if v.op not in OPS and v.op != "cast":
        return None
    for cond in dict.fromkeys(a.args[0] for a in args if a.op == "where"):
        first, second = (tuple(_selected(a, cond, k) for a in args) for k in (1, 2))
        if not axes(cond) <= frozenset[str]().union(*(axes(x) for x in (*first, *second))):
            return va.where(cond, *(va.make(v.op, side, v.dtype, v.attr) for side in (first, second)))
    return None


def _selected(a: Value, cond: Value, side: int) -> Value:
    return a.args[side] if a.op == "where" and a.args[0] is cond else a
