"""Estimate how many registers the pointwise work of a kernel needs at once."""

from __future__ import annotations

from collections.abc import Iterable

from ....ir import value as va
from ....ir.value import Value
from ...loop_mapping import Kind, MappedNode


def alive_at_once(mapped: Iterable[MappedNode], tile: Value | None = None) -> float:
    """Return the most 32-bit registers per tile element that the nodes need at once, in order of computation.

    `tile`: a value without variables that is a tile itself, such as the sums of a product. Numbers of a row or of a
    column, which take little, and constants do not count. Results that later nodes read stay in registers.
    """
    operands, last_use = _tiles(mapped, tile)
    alive = most = 0.0
    for k, (v, args) in enumerate(operands.items()):
        alive += _registers(v)
        most = max(most, alive)
        alive -= sum(_registers(x) for x in (*args, v) if last_use[x] == k)
    return most


def _tiles(mapped: Iterable[MappedNode], tile: Value | None) -> tuple[dict[Value, list[Value]], dict[Value, int]]:
    """Return the tiles in order of computation, each with its operand tiles; and the position of their last use."""
    operands: dict[Value, list[Value]] = {}
    stored: dict[str, Value] = {}
    last_use: dict[Value, int] = {}

    def computed(x: Value) -> Value:
        return stored.get(x.attr[0], x) if x.op == "load" else x

    for q in mapped:
        axes = {q.row, *q.inner}
        for v in va.walk(q.value):
            args = list(dict.fromkeys(x for a in v.args if (x := computed(a)) in operands))
            if v in operands or computed(v) is not v or not (v is tile or args or len(v.vars & axes) > 1):
                continue
            for x in (*args, v):
                last_use[x] = len(operands)
            operands[v] = args
        if q.kind is Kind.POINT:  # a total is a number of a row or of a column
            stored[q.node.out] = computed(q.value)
    return operands, last_use


def _registers(v: Value) -> float:
    return v.dtype.itemsize / 4
