"""How many values of a tile are alive at once while a kernel computes pointwise work on it."""

from __future__ import annotations

from collections.abc import Iterable

from ....ir import value as va
from ....ir.value import Value
from ...loop_mapping import MappedNode


def alive_at_once(mapped: Iterable[MappedNode], whole: Value | None = None) -> float:
    """The most 32-bit registers per element of a tile that `placed` needs at once, values computed in their order.

    `whole`: a value without variables that is a tile itself, such as the sums of a product. Left out are numbers
    of a row or of a column, which take little, and constants. Results that later members read stay in registers.
    """
    parts, last = _tiles(mapped, whole)
    alive = most = 0.0
    for k, (v, below) in enumerate(parts.items()):
        alive += _registers(v)
        most = max(most, alive)
        alive -= sum(_registers(x) for x in (*below, v) if last[x] == k)
    return most


def _tiles(mapped: Iterable[MappedNode], whole: Value | None) -> tuple[dict[Value, list[Value]], dict[Value, int]]:
    """Tiles in the order of their computation, each with those it is made of; and when each is last read."""
    parts: dict[Value, list[Value]] = {}
    stored: dict[str, Value] = {}
    last: dict[Value, int] = {}

    def held(x: Value) -> Value:
        return stored.get(x.attr[0], x) if x.op == "load" else x

    for q in mapped:
        axes = {q.row, *q.inner}
        for v in va.walk(q.value):
            below = list(dict.fromkeys(x for a in v.args if (x := held(a)) in parts))
            if v in parts or held(v) is not v or not (v is whole or below or len(v.vars & axes) > 1):
                continue
            for x in (*below, v):
                last[x] = len(parts)
            parts[v] = below
        if q.kind == "point":  # a total is a number of a row or of a column
            stored[q.node.out] = held(q.value)
    return parts, last


def _registers(v: Value) -> float:
    return v.dtype.itemsize / 4
