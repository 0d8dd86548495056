"""Tensors that hold one number in one place of every row: never stored, and summed without a loop.

The gradient of a cross-entropy starts as zeros with -1 at the target; its sum over the classes is that of one element.
"""

from __future__ import annotations

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.value import Value
from ..tensor import Tensor, axes


def one_hot(x: Tensor, dim: int, place: Index, number: Value) -> Tensor | None:
    """`x`, a constant, with `number` at `place` of dimension `dim`, as a comparison per element; None for others.

    `place` does not depend on the dimension.
    """
    along = axes(x.sizes)[dim]
    if x.value.op != "const" or along in ex.vars_of(place):
        return None
    here = va.apply("eq", va.index(ex.ix(along)), va.index(place))
    return Tensor(x.sizes, x.dtype, va.where(here, number, va.cast(x.value, x.dtype)))


def total(value: Value, along: Atom) -> Value | None:
    """The sum of `value` over `along`, if it varies only by whether that is at one place: a + (n - 1) b."""
    n = along.args[1]
    choices = [v for v in va.walk(value) if along in v.vars and v.op == "eq" and _is_place(v, along)]
    if len(choices) != 1:
        return None
    a, b = (_decided(value, choices[0], hit) for hit in (True, False))
    if along in a.vars | b.vars or not value.dtype.is_floating_point:
        return None
    if b.op == "const" and b.attr == 0:
        return a
    others = va.cast(va.index(ex.sub(n, 1)), value.dtype)
    return va.apply("add", a, va.apply("mul", b, others))


def _is_place(v: Value, along: Atom) -> bool:
    """Whether `v` compares `along` itself with a position in its range that does not depend on it."""
    here, place = v.args
    if here.op != "index" or here.attr is not ex.ix(along) or along in place.vars or place.op != "index":
        return False
    return ex.known_nonnegative(place.attr) and ex.known_less(place.attr, along.args[1])


def _decided(value: Value, choice: Value, hit: bool) -> Value:
    """`value` where `choice` is known."""
    memo: dict[Value, Value] = {choice: va.const(hit, choice.dtype)}
    for v in va.walk(value):
        if v in memo:
            continue
        if choice.vars.isdisjoint(v.vars):
            memo[v] = v
            continue
        args = tuple(memo[a] for a in v.args)
        folded = v.op == "where" and args[0].op == "const"
        memo[v] = va.where(*args) if folded else va.make(v.op, args, v.dtype, v.attr)
    return memo[value]
