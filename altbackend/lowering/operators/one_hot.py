"""Tensors that differ from a constant at one position of every row: never stored, and summed without a loop.

The gradient of a cross-entropy is zero except for -1 at the target, so its sum over the classes is one element.
"""

from __future__ import annotations

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.value import Value
from ..tensor import Tensor, axes


def one_hot(x: Tensor, dim: int, position: Index, number: Value) -> Tensor | None:
    """Return the constant tensor `x` with `number` at `position` of dimension `dim`, as a comparison per element.

    Returns None if `x` is not a constant or `position` varies along the dimension.
    """
    along = axes(x.sizes)[dim]
    if x.value.op != "const" or along in ex.vars_of(position):
        return None
    hit = va.apply("eq", va.index(ex.ix(along)), va.index(position))
    return Tensor(x.sizes, x.dtype, va.where(hit, number, va.cast(x.value, x.dtype)))


def total(value: Value, along: Atom) -> Value | None:
    """Return the sum over `along` of a value that is `a` at one position and `b` at all others: a + (n - 1) b.

    Returns None for other values.
    """
    n = ex.size_of(along)
    choices = [v for v in va.walk(value) if along in v.vars and v.op == "eq" and _is_position_test(v, along)]
    if len(choices) != 1:
        return None
    a, b = (_assuming(value, choices[0], hit) for hit in (True, False))
    if along in a.vars | b.vars or not value.dtype.is_floating_point:
        return None
    if b.op == "const" and b.attr == 0:
        return a
    others = va.cast(va.index(ex.sub(n, 1)), value.dtype)
    return va.apply("add", a, va.apply("mul", b, others))


def _is_position_test(v: Value, along: Atom) -> bool:
    """Return whether `v` compares `along` with a position that is in its range and does not depend on it."""
    variable, position = v.args
    if variable.op != "index" or variable.attr is not ex.ix(along) or along in position.vars or position.op != "index":
        return False
    return ex.known_nonnegative(position.attr) and ex.known_less(position.attr, ex.size_of(along))


def _assuming(value: Value, choice: Value, hit: bool) -> Value:
    """Return `value` under the assumption that the condition `choice` has the value `hit`."""
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
