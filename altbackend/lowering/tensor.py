"""Unmaterialised tensors: a shape and the scalar value at each of its points."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import torch

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Expr, Index
from ..ir.loops import Buffer, View
from ..ir.ops import compute_dtype
from ..ir.value import Value

CACHED_SHAPES = 4096


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor that has no storage yet; `value` is a scalar tree over the variables `axes(sizes)`.

    `dtype` is the dtype that was traced. `value.dtype` may be the wider compute dtype of a chain of 16-bit operators.
    """

    sizes: tuple[Index, ...]
    dtype: torch.dtype
    value: Value

    def at(self, point: Sequence[Index]) -> Value:
        """Return the scalar at a point: one index per dimension."""
        env = {a: i for a, i in zip(axes(self.sizes), point, strict=True) if ex.ix(a) is not i}
        return self.value.substitute(env) if env else self.value

    def computed(self, dtype: torch.dtype | None = None) -> Value:
        """Return the scalar converted to `dtype`, or to its own compute dtype."""
        return va.cast(self.value, dtype or compute_dtype(self.dtype))

    def rounded(self) -> Tensor:
        """Return the tensor with its value as memory holds it: a float32 value of a 16-bit tensor is rounded."""
        return Tensor(self.sizes, self.dtype, va.cast(self.value, self.dtype))


Operand: TypeAlias = Tensor | Value | Index | float
"""An argument of an elementwise operator: a tensor, a scalar that the host program computes, or a Python number."""

Size: TypeAlias = int | torch.SymInt | Expr
"""A size, stride or position among the arguments of an operator."""

Dims: TypeAlias = int | Sequence[int] | None
"""Dimensions that an operator reduces; None or () means all."""


def axes(sizes: Sequence[Index]) -> tuple[Atom, ...]:
    """Return the canonical loop variables of a shape."""
    return _axes(tuple(sizes))


def points(sizes: Sequence[Index]) -> tuple[Index, ...]:
    """Return the canonical loop variables of a shape as index expressions; a dimension of size 1 gives 0."""
    return _points(tuple(sizes))


@functools.lru_cache(CACHED_SHAPES)
def _axes(sizes: tuple[Index, ...]) -> tuple[Atom, ...]:
    return tuple(ex.dim(k, n) for k, n in enumerate(sizes))


@functools.lru_cache(CACHED_SHAPES)
def _points(sizes: tuple[Index, ...]) -> tuple[Index, ...]:
    return tuple(ex.ix(a) for a in _axes(sizes))


def permuted(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return `x` with its dimensions in another order: dimension k of the result is `order[k]` of `x`."""
    sizes = tuple(x.sizes[k] for k in order)
    p = points(sizes)
    return Tensor(sizes, x.dtype, x.at([p[order.index(k)] for k in range(len(order))]))


def of_buffer(b: Buffer) -> Tensor:
    """Return the tensor that a buffer holds."""
    index = ex.add(0, *(ex.mul(s, i) for s, i in zip(b.strides, points(b.sizes), strict=True)))
    return Tensor(b.sizes, b.dtype, va.load(b.name, index, b.dtype))


def of_view(v: View, dtype: torch.dtype) -> Tensor:
    """Return the tensor that a view of a buffer holds."""
    index = ex.add(v.offset, *(ex.mul(s, i) for s, i in zip(v.strides, points(v.sizes), strict=True)))
    return Tensor(v.sizes, dtype, va.load(v.buffer, index, dtype))


def full(sizes: Sequence[Index], number: complex, dtype: torch.dtype) -> Tensor:
    """Return a tensor that has `number` at every point."""
    return Tensor(tuple(sizes), dtype, va.const(number, dtype))


def expand(t: Tensor, sizes: Sequence[Index]) -> Tensor:
    """Return `t` broadcast to `sizes` by torch's rules."""
    sizes = tuple(sizes)
    if t.sizes == sizes:
        return t
    lead = len(sizes) - len(t.sizes)
    at = [0 if n == 1 else i for n, i in zip(t.sizes, points(sizes)[lead:], strict=True)]
    return Tensor(sizes, t.dtype, t.at(at))


def with_dim(t: Tensor) -> Tensor:
    """Return a 0-d tensor as a tensor of one dimension of size 1; others unchanged."""
    return t if t.sizes else Tensor((1,), t.dtype, t.value)


def as_view(t: Tensor, strides: Sequence[Index] | None = None) -> View | None:
    """Return `t` as a strided view of a buffer, or None if it is computed or its index is not affine.

    `strides`: the strides of dimensions whose size is at most 1, which the index does not determine.
    """
    if t.value.op != "load" or t.value.dtype != t.dtype:
        return None
    name, index = t.value.attr
    steps: list[Index] = []
    rest = index
    for k, a in enumerate(axes(t.sizes)):
        c = ex.coefficient(index, a)
        if c is None or ex.vars_of(c) or ex.bounds(c)[1] < 0:  # torch has no tensor that runs backwards
            return None
        if strides is not None and ex.bounds(t.sizes[k])[1] <= 1:  # a size that data or symbols decide may be 0 or 1
            c = strides[k]
        steps.append(c)
        rest = ex.substitute(rest, {a: 0})
    if ex.lookups(rest):
        return None
    return View(name, t.sizes, tuple(steps), rest)


def same_strides(a: Sequence[Index], b: Sequence[Index], sizes: Sequence[Index]) -> bool:
    """Return whether two layouts of a tensor of `sizes` place its elements alike."""
    return all(x == y or n == 1 for x, y, n in zip(a, b, sizes, strict=True))
