"""Reductions that read another reduction of the same operand, and that one pass over the operand computes with it.

    sum(exp(v - max v))                 a softmax; the method is from Milakov and Gimelshein, "Online normalizer
                                        calculation for softmax", 2018
    min(where(v is the extremum, i))    the position of an extremum

Results of the parts of a row are combined by `combined_sum` and `combined_position`.
"""

from __future__ import annotations

import math

from ..ir import value as va
from ..ir.expr import Index
from ..ir.value import Value

Result = tuple[str, Index]
"""The buffer that holds an extremum, and the index at which it is read."""


def is_exp_below(v: Value, operand: Value, extremum: Result) -> bool:
    """Return whether `v` is exp(operand - extremum)."""
    if v.op != "exp" or v.args[0].op != "sub":
        return False
    left, right = v.args[0].args
    return left is operand and right.op == "load" and right.attr == extremum


def position(v: Value, operand: Value, extremum: Result) -> Value | None:
    """Return the position of `where(operand is the extremum, position, largest integer)`; None for another form.

    A NaN counts as the extremum.
    """
    if v.op != "where" or v.dtype.is_floating_point or v.args[2].op != "const":
        return None
    hit, at, _ = v.args
    if hit.op == "logical_or" and hit.args[1].op == "isnan" and hit.args[1].args[0] is operand:
        hit = hit.args[0]
    elif operand.dtype.is_floating_point:
        return None
    if hit.op != "eq" or hit.args[0] is not operand:
        return None
    result = hit.args[1]
    is_result = result.op == "load" and result.attr == extremum
    return at if is_result and not va.loads(at) else None


def combined_sum(part: Value, extremum: Value, whole: Value) -> Value:
    """Return what a part adds to the sum of exp(v - whole), from its own sum of exp(v - extremum).

        part * exp(extremum - whole)

    A part of -inf alone has a NaN as its sum, and adds 0 to a row with larger elements.
    """
    empty = va.apply("eq", extremum, va.const(-math.inf, extremum.dtype))
    scaled = va.apply("mul", part, va.apply("exp", va.apply("sub", extremum, whole)))
    rest = va.where(empty, va.const(0, part.dtype), scaled)
    return va.where(va.apply("eq", extremum, whole), part, rest)


def combined_position(part: Value, extremum: Value, whole: Value) -> Value:
    """Return the position of a part's extremum if it is the extremum of the row, else the largest integer."""
    hit = va.apply("eq", extremum, whole)
    if extremum.dtype.is_floating_point:
        hit = va.apply("logical_or", hit, va.apply("isnan", extremum))
    return va.where(hit, part, va.identity("min", part.dtype))
