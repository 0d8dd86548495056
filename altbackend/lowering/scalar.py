"""Short functions that build scalar trees; a Python number takes the dtype of the other argument."""

from __future__ import annotations

import torch

from ..ir import value as va
from ..ir.expr import Expr
from ..ir.value import Value

Num = Value | Expr | int | float | bool


def _pair(a: Num, b: Num) -> tuple[Value, Value]:
    if isinstance(a, Value):
        return a, _number(b, a.dtype)
    assert isinstance(b, Value)
    return _number(a, b.dtype), b


def _number(a: Num, dtype: torch.dtype) -> Value:
    if isinstance(a, Value):
        return a
    return va.cast(va.index(a), dtype) if isinstance(a, Expr) else va.const(a, dtype)


def binary(op: str, a: Num, b: Num) -> Value:
    """Return a row of `ir.ops` with two arguments."""
    return va.apply(op, *_pair(a, b))


def add(a: Num, b: Num) -> Value:
    """Return a + b; the `1 + erf(x)` of GELU, also as a user writes it, becomes one operator."""
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Value) and x.op == "erf" and (y is va.const(1.0, x.dtype) or (type(y) is float and y == 1.0)):
            return unary("one_plus_erf", x.args[0])
    return binary("add", a, b)


def sub(a: Num, b: Num) -> Value:
    if isinstance(a, Value) and a is b and a.dtype.is_floating_point:
        # fma(u, v, -(u * v)), into which compilers contract x - x for x = u * v, is the rounding error of x, not 0
        return mul(va.apply("abs", a), 0.0)
    return binary("sub", a, b)


def mul(a: Num, b: Num) -> Value:
    return binary("mul", a, b)


def div(a: Num, b: Num) -> Value:
    return binary("truediv", a, b)


def neg(a: Value) -> Value:
    return va.apply("neg", a)


def where(cond: Value, a: Num, b: Num) -> Value:
    x, y = _pair(a, b)
    return va.where(cond, x, y)


def both(a: Value, b: Value) -> Value:
    return va.conjunction(a, b)


def square(a: Value) -> Value:
    return mul(a, a)


def unary(op: str, a: Value) -> Value:
    """Return a row of `ir.ops` with one argument."""
    return va.apply(op, a)


def round_to(a: Value, dtype: torch.dtype) -> Value:
    """Return the value rounded to `dtype`, in its own dtype."""
    return va.cast(va.cast(a, dtype), a.dtype)
