"""Equations of two operands, as products of matrices with leading dimensions."""

from __future__ import annotations

import string
from collections.abc import Sequence

Order = tuple[int | None, ...]  # None is a dimension that an operand lacks: it is broadcast


def _letters(equation: object) -> tuple[str, str, str] | None:
    """Return the letters of two operands and the result; None for other equations and for repeated letters."""
    if not isinstance(equation, str) or "." in equation or equation.count("->") != 1:
        return None
    left, result = equation.replace(" ", "").split("->")
    operands = left.split(",")
    if len(operands) != 2 or any(len(set(text)) != len(text) for text in (*operands, result)):
        return None
    return operands[0], operands[1], result


def explicit(equation: object, first: int, second: int) -> object:
    """Return an equation with letters for "...", for operands of these numbers of dimensions; others unchanged."""
    if not isinstance(equation, str) or "..." not in equation:
        return equation
    left, _, result = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if len(operands) != 2 or not all(text.startswith("...") for text in (*operands, result)):
        return equation
    counts = {dims - len(text) + 3 for text, dims in zip(operands, (first, second), strict=True)}
    free = [letter for letter in string.ascii_uppercase if letter not in equation]
    if len(counts) != 1 or not 0 <= (count := counts.pop()) <= len(free):
        return equation  # operands that are broadcast
    return equation.replace(" ", "").replace("...", "".join(free[:count]))


def scores_order(equation: object) -> tuple[Order, Order] | None:
    """Return how the operands are permuted for a matrix product that gives the result as it is.

    The left one becomes (batch, rows, contracted), the right one (batch, contracted, columns). None if a letter is in
    neither group, or the result is not (batch, rows, columns). One of the operands may lack letters of the batch.
    """
    letters = _letters(equation)
    if letters is None or len(letters[2]) < 2:
        return None
    a, b, result = letters
    batch, row, column = result[:-2], result[-2], result[-1]
    contracted = [k for k in a if k in b and k not in result]
    if len(contracted) != 1 or row not in a or row in b or column not in b or column in a:
        return None
    if not set(a) <= {*batch, row, contracted[0]} or not set(b) <= {*batch, column, contracted[0]}:
        return None
    return _order(a, (*batch, row, contracted[0])), _order(b, (*batch, contracted[0], column))


def _order(letters: str, wanted: Sequence[str]) -> Order:
    return tuple(letters.index(k) if k in letters else None for k in wanted)


def output_order(equation: object) -> tuple[Order, tuple[int, ...] | None] | None:
    """Return (order of the values, order of the result) of a product of weights (batch, rows, columns) and values.

    The values become (batch, columns, features). The result (batch, rows, features) is permuted to the equation's; None
    for the order if it is that already. None if the weights are in another order.
    """
    letters = _letters(equation)
    if letters is None or len(letters[0]) < 2:
        return None
    weights, values, result = letters
    batch, row, column = weights[:-2], weights[-2], weights[-1]
    features = [k for k in values if k not in weights]
    if len(features) != 1 or column in result or row in values or set(result) != {*batch, row, features[0]}:
        return None
    if column not in values or not set(values) <= {*batch, column, features[0]}:
        return None
    natural = (*batch, row, features[0])
    order = tuple(natural.index(k) for k in result)
    in_order = order == tuple(range(len(order)))
    return _order(values, (*batch, column, features[0])), None if in_order else order
