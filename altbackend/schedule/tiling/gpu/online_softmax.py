"""Finds sums of exp(v - max v) over long rows, which one pass computes together with the maximum.

The running sum is rescaled whenever a block of the row raises the maximum (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018), so that the row is read once and not twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....ir import value as va
from ....ir.loops import Reduction
from ....ir.value import Value
from ...kernel import Stage
from ...loop_mapping import MappedNode


@dataclass(frozen=True)
class Online:
    """`top` is the maximum of its value, `sums` sums of exp(value - maximum). `passed`: points beside them."""

    top: MappedNode
    sums: tuple[MappedNode, ...]
    passed: tuple[MappedNode, ...]


def plan(stages: Sequence[Stage], long: Sequence[Stage], stored: frozenset[str]) -> list[Stage | Online]:
    """The stages, with neighbours of `long` as one where the second needs of the first only a running maximum."""
    out: list[Stage | Online] = []
    for s in stages:
        before = out[-1] if out else None
        pair = _pair(before, s, stored) if isinstance(before, Stage) and before in long and s in long else None
        if pair is None:
            out.append(s)
        else:
            out[-1] = pair
    return out


def _pair(a: Stage, b: Stage, stored: frozenset[str]) -> Online | None:
    points = [q for q in (*a.members, *b.members) if q.kind == "point"]
    tops, sums = ([q for q in s.members if q.kind != "point"] for s in (a, b))
    if a.inner != b.inner or len(tops) != 1 or not sums:
        return None
    (top,) = tops
    held = {q.node.out: q for q in points}
    if any(q.node.out in stored and _needs(q, top, held) for q in points):
        return None
    value = inlined(top.value, held)
    if not _is(top, "max") or not all(_is(q, "sum") and _scaled(q, top, value, held) for q in sums):
        return None
    return Online(top, tuple(sums), tuple(points))


def _needs(q: MappedNode, top: MappedNode, held: dict[str, MappedNode]) -> bool:
    """Whether a point is computed from the maximum, which a single pass knows only when it is over."""
    return any(b == top.node.out for b, _ in va.loads(inlined(q.value, held)))


def _is(q: MappedNode, op: str) -> bool:
    return isinstance(q.node, Reduction) and q.kind == "inner" and q.node.op == op and q.value.dtype.is_floating_point


def _scaled(q: MappedNode, top: MappedNode, value: Value, held: dict[str, MappedNode]) -> bool:
    """Whether `q` sums exp(value - maximum)."""
    v = inlined(q.value, held)
    if v.op != "exp" or v.args[0].op != "sub":
        return False
    left, right = v.args[0].args
    return left is value and right.op == "load" and right.attr == (top.node.out, top.index)


def inlined(v: Value, held: dict[str, MappedNode]) -> Value:
    """`v` with loads of what points of the same loops compute replaced by their values."""

    def on_load(x: Value) -> Value | None:
        name, index = x.attr
        return inlined(held[name].value, held) if name in held and held[name].index is index else None

    return va.rewrite(v, on_load=on_load)
