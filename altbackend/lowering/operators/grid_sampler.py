"""Sampling an image at the points of a grid, and its gradients (bilinear and nearest)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import compute_dtype
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import FallBack, lowers
from ..tensor import Tensor, points
from .pointwise import finish
from .pooling import stored, wide
from .reduction import as_number, drop_dims, reduce
from .scatter import Updates, scatter

BILINEAR, NEAREST = 0, 1
ZEROS, BORDER, REFLECTION = 0, 1, 2


@dataclass(frozen=True)
class Sampling:
    """The options of a sampling: interpolation mode, padding mode, and whether corners are aligned."""

    mode: int
    padding: int
    aligned: bool


@dataclass(frozen=True)
class Coordinate:
    """A position in pixels along a dimension of `size`, and its derivative by the value of the grid."""

    at: Value
    slope: Value
    size: Index

    def first(self) -> Value:
        """Return the position of the pixel at or before."""
        return s.unary("floor", self.at)

    def part(self) -> Value:
        """Return at - floor(at): the weight of the pixel after the first."""
        return s.sub(self.at, self.first())


def coordinate(g: Value, size: Index, padding: int, aligned: bool) -> Coordinate:
    """Return the pixel coordinate of the grid value `g`, which is in [-1, 1] inside the image."""
    n = as_number(size, g.dtype)
    last = s.sub(n, 1.0)
    slope = s.div(last if aligned else n, 2.0)
    at = s.mul(s.add(g, 1.0), slope)  # [-1, 1] -> [0, n - 1], or [-1/2, n - 1/2]
    if not aligned:
        at = s.sub(at, 0.5)
    if padding == REFLECTION:
        low = va.const(0.0 if aligned else -0.5, g.dtype)
        at, sign = _reflect(at, low, last if aligned else n)
        slope = s.mul(slope, sign)
    if padding != ZEROS:
        inner = va.apply("logical_and", s.binary("gt", at, 0.0), s.binary("lt", at, last))
        slope = s.where(inner, slope, 0.0)
        at = s.binary("fmin", s.binary("fmax", at, 0.0), last)
    return Coordinate(at, slope, size)


def _reflect(at: Value, low: Value, span: Value) -> tuple[Value, Value]:
    """Return `at` reflected into [low, low + span], and the sign of its derivative."""
    away = s.sub(at, low)
    far = s.unary("abs", away)
    extra = s.binary("fmod", far, span)
    even = s.binary("eq", s.binary("fmod", s.unary("floor", s.div(far, span)), 2.0), 0.0)
    sign = s.where(s.binary("lt", away, 0.0), va.const(-1.0, at.dtype), 1.0)
    sign = s.where(even, sign, s.neg(sign))
    inside = s.add(s.where(even, extra, s.sub(span, extra)), low)
    no_span = s.binary("eq", span, 0.0)
    return s.where(no_span, 0.0, inside), s.where(no_span, 0.0, sign)


def _pixel(v: Value, size: Index) -> tuple[Index, Value]:
    """Return (index clamped to the dimension, condition that `v`, an integer as a float, is inside)."""
    inside = va.apply("logical_and", s.binary("ge", v, 0.0), s.binary("lt", v, as_number(size, v.dtype)))
    i = va.apply("maximum", va.cast(v, torch.int64), va.const(0, torch.int64))
    i = va.apply("minimum", i, va.index(ex.sub(size, 1)))
    return ex.lookup(i, 0, max(ex.bounds(size)[1] - 1, 0)), inside


def _grid(x: Tensor, grid: Tensor, point: tuple[Index, ...], how: Sampling) -> list[Coordinate]:
    """Return (row, column) of the sample at a point of the grid."""
    acc = compute_dtype(x.dtype)
    gx, gy = (va.cast(grid.at([*point, k]), acc) for k in (0, 1))
    return [coordinate(g, n, how.padding, how.aligned) for g, n in ((gy, x.sizes[2]), (gx, x.sizes[3]))]


def _sample(x: Tensor, n: Index, c: Index, row: Value, column: Value) -> Value:
    """Return the value of a pixel, zero outside the image."""
    (i, above), (j, beside) = _pixel(row, x.sizes[2]), _pixel(column, x.sizes[3])
    v = x.at([n, c, i, j])
    return wide(va.masked(va.apply("logical_and", above, beside), v, va.const(0, v.dtype)))


@lowers("grid_sampler_2d.default")
def grid_sampler_2d(ctx: Ctx, x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool) -> Tensor:
    out = ctx.result
    if mode not in (BILINEAR, NEAREST):
        raise FallBack("bicubic sampling")
    x, grid = stored(ctx, x), stored(ctx, grid, 1)
    sizes = ctx.shape(out.shape)
    n, c, i, j = points(sizes)
    y, z = _grid(x, grid, (n, i, j), Sampling(mode, padding, aligned))
    if mode == NEAREST:
        value = _sample(x, n, c, s.unary("round", y.at), s.unary("round", z.at))
        return finish(ctx, sizes, out.dtype, value)
    total: Value | None = None
    for row, v in _ends(y):
        for column, w in _ends(z):
            term = s.mul(_sample(x, n, c, row, column), s.mul(v, w))
            total = term if total is None else s.add(total, term)
    assert total is not None
    return finish(ctx, sizes, out.dtype, total)


def _ends(a: Coordinate) -> list[tuple[Value, Value]]:
    """Return (pixel, weight) of the two pixels around a position."""
    return [(a.first(), s.sub(1.0, a.part())), (s.add(a.first(), 1.0), a.part())]


@lowers("grid_sampler_2d_backward.default")
def grid_sampler_2d_backward(
    ctx: Ctx, grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor]:
    if mode not in (BILINEAR, NEAREST) or 0 in grad.sizes:
        raise FallBack("bicubic sampling, or no samples")
    grad, x, grid = stored(ctx, grad), stored(ctx, x, 1), stored(ctx, grid, 2)
    how = Sampling(mode, padding, aligned)
    to_x = _to_image(ctx, grad, x, grid, how) if output_mask[0] else None
    if mode == NEAREST:
        return to_x, Tensor(grid.sizes, grid.dtype, va.const(0, grid.dtype))
    return to_x, _to_grid(ctx, grad, x, grid, how)


def _to_image(ctx: Ctx, grad: Tensor, x: Tensor, grid: Tensor, how: Sampling) -> Tensor:
    """Return the gradient of the image: every sample adds its gradient to the pixels that it read."""
    around = 1 if how.mode == NEAREST else 2
    sizes = (*grad.sizes, around, around)
    n, c, i, j, a, b = points(sizes)
    y, z = _grid(x, grid, (n, i, j), how)
    value = wide(grad.at([n, c, i, j]))
    if how.mode == NEAREST:
        rows, columns = s.unary("round", y.at), s.unary("round", z.at)
    else:
        value = s.mul(value, s.mul(_weight(y, a), _weight(z, b)))
        rows, columns = s.add(y.first(), as_number(a, value.dtype)), s.add(z.first(), as_number(b, value.dtype))
    (row, above), (column, beside) = _pixel(rows, x.sizes[2]), _pixel(columns, x.sizes[3])
    value = s.where(va.apply("logical_and", above, beside), value, 0.0)
    fake = ctx.results[0]
    zero = Tensor(x.sizes, x.dtype, va.const(0, x.dtype))
    updates = Updates(sizes, [n, c, row, column], value)
    return scatter(ctx, zero, "add", updates, strides=ctx.strides_like(x.sizes, fake))


def _weight(a: Coordinate, end: Index) -> Value:
    return s.where(s.binary("eq", va.index(end), 0), s.sub(1.0, a.part()), a.part())


def _to_grid(ctx: Ctx, grad: Tensor, x: Tensor, grid: Tensor, how: Sampling) -> Tensor:
    """Return the gradient of the grid: per axis the sum over channels of grad times the derivative of the sample."""
    batch, channels, height, width = grad.sizes
    sizes = (batch, height, width, channels)
    n, i, j, c = points(sizes)
    y, z = _grid(x, grid, (n, i, j), how)
    corner = [[_sample(x, n, c, row, column) for column, _ in _ends(z)] for row, _ in _ends(y)]
    g = wide(grad.at([n, c, i, j]))
    (_, v0), (_, v1) = _ends(y)
    (_, w0), (_, w1) = _ends(z)
    along_x = s.add(s.mul(s.sub(corner[0][1], corner[0][0]), v0), s.mul(s.sub(corner[1][1], corner[1][0]), v1))
    along_y = s.add(s.mul(s.sub(corner[1][0], corner[0][0]), w0), s.mul(s.sub(corner[1][1], corner[0][1]), w1))
    both = []
    for change, axis in ((along_x, z), (along_y, y)):
        term = Tensor(sizes, g.dtype, s.mul(s.mul(g, change), axis.slope))
        both.append(drop_dims(reduce(ctx, "sum", term, (3,), g.dtype, g.dtype), (3,), False))
    p = points(grid.sizes)
    first, second = (t.at(p[:3]) for t in both)
    return finish(ctx, grid.sizes, grid.dtype, s.where(s.binary("eq", va.index(p[3]), 0), first, second))
