"""Patterns of `fx_passes/traced/gelu.py`. `python -m altbackend patterns --write` writes this file."""

# fmt: off
from __future__ import annotations

from collections.abc import Callable

import torch

from ..pattern.terms import Arg, Like, call
from ..pattern.trace import Traced

aten = torch.ops.aten


def by_error_function() -> Traced:
    """Return the pattern by_error_function."""
    n0 = call(aten.mul.Tensor, Arg('x'), 0.5)
    n1 = call(aten.div.Tensor, Arg('x'), 1.4142135623730951)
    n2 = call(aten.erf.default, n1)
    n3 = call(aten.add.Tensor, n2, 1.0, Like('int'))
    n4 = call(aten.mul.Tensor, n0, n3)
    names = ('x',)
    outputs = (n4,)
    return Traced(names, outputs, (0,), ())


def by_power() -> Traced:
    """Return the pattern by_power."""
    n0 = call(aten.mul.Tensor, Arg('x'), 0.5)
    n1 = call(aten.pow.Tensor_Scalar, Arg('x'), 3.0)
    n2 = call(aten.mul.Tensor, n1, 0.044715)
    n3 = call(aten.add.Tensor, Arg('x'), n2, Like('int'))
    n4 = call(aten.mul.Tensor, n3, 0.7978845608028654)
    n5 = call(aten.tanh.default, n4)
    n6 = call(aten.add.Tensor, n5, 1.0, Like('int'))
    n7 = call(aten.mul.Tensor, n0, n6)
    names = ('x',)
    outputs = (n7,)
    return Traced(names, outputs, (0,), ())


def by_products() -> Traced:
    """Return the pattern by_products."""
    n0 = call(aten.mul.Tensor, Arg('x'), 0.5)
    n1 = call(aten.mul.Tensor, Arg('x'), 0.7978845608)
    n2 = call(aten.mul.Tensor, Arg('x'), 0.044715)
    n3 = call(aten.mul.Tensor, n2, Arg('x'))
    n4 = call(aten.add.Tensor, n3, 1.0, Like('int'))
    n5 = call(aten.mul.Tensor, n1, n4)
    n6 = call(aten.tanh.default, n5)
    n7 = call(aten.add.Tensor, n6, 1.0, Like('int'))
    n8 = call(aten.mul.Tensor, n0, n7)
    names = ('x',)
    outputs = (n8,)
    return Traced(names, outputs, (0,), ())


PATTERNS: dict[str, Callable[[], Traced]] = {
    "by_error_function": by_error_function,
    "by_power": by_power,
    "by_products": by_products,
}
