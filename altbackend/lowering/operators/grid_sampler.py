"""Sampling an image at the points of a grid, and its gradients (bilinear and nearest)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from altbackend.lazy_dataclass import dataclass

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
FEW_CHANNELS = 3  # so many share too little for positions to be stored


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


@dataclass(frozen=True)
class Pixel:
    """A pixel along one dimension of `size` that a sample reads: its position, or -1 outside, and its weight."""

    position: Value
    weight: Value
    size: Index

    def index(self) -> Index:
        """Return the position clamped to the dimension."""
        i = va.apply("maximum", self.position, va.const(0, torch.int64))
        i = va.apply("minimum", i, va.index(ex.sub(self.size, 1)))
        return ex.lookup(i, 0, max(ex.bounds(self.size)[1] - 1, 0))

    def inside(self) -> Value:
        """Return whether the pixel is inside the image."""
        return s.binary("ge", self.position, 0)


@dataclass(frozen=True)
class Axis:
    """The pixels that a sample reads along one dimension, and the derivative of its position by the grid's value."""

    pixels: tuple[Pixel, ...]
    slope: Value


Axes = Callable[[tuple[Index, ...]], tuple[Axis, Axis]]


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


def _pixel(v: Value, weight: Value, size: Index) -> Pixel:
    """Return the pixel at `v`, an integer as a float."""
    inside = va.apply("logical_and", s.binary("ge", v, 0.0), s.binary("lt", v, as_number(size, v.dtype)))
    return Pixel(s.where(inside, va.cast(v, torch.int64), -1), weight, size)


def _axis(a: Coordinate, mode: int) -> Axis:
    """Return the pixel nearest to a position, or the two around it."""
    if mode == NEAREST:
        return Axis((_pixel(s.unary("round", a.at), va.const(1.0, a.at.dtype), a.size),), a.slope)
    first = s.unary("floor", a.at)
    part = s.sub(a.at, first)
    around = ((first, s.sub(1.0, part)), (s.add(first, 1.0), part))
    return Axis(tuple(_pixel(v, weight, a.size) for v, weight in around), a.slope)


def _axes(ctx: Ctx, x: Tensor, grid: Tensor, how: Sampling) -> Axes:
    """Return the function (image, row, column of the grid) -> its axes (rows, columns of the image).

    The channels of an image share their axes. A CPU computes them once and stores them; a GPU computes them anew.
    """
    acc = compute_dtype(x.dtype)

    def computed(point: tuple[Index, ...]) -> tuple[Axis, Axis]:
        gx, gy = (va.cast(grid.at([*point, k]), acc) for k in (0, 1))
        y, z = (coordinate(g, n, how.padding, how.aligned) for g, n in ((gy, x.sizes[2]), (gx, x.sizes[3])))
        return _axis(y, how.mode), _axis(z, how.mode)

    few = isinstance(x.sizes[1], int) and x.sizes[1] < FEW_CHANNELS
    return computed if ctx.gpu or few else _stored(ctx, grid.sizes[:3], computed)


def _stored(ctx: Ctx, sizes: Sequence[Index], computed: Axes) -> Axes:
    """Return axes that are read from memory."""

    def store(v: Value) -> Tensor:
        return ctx.realize(Tensor(tuple(sizes), v.dtype, v))

    axes = [
        ([(store(p.position), store(p.weight), p.size) for p in axis.pixels], store(axis.slope))
        for axis in computed(points(sizes))
    ]

    def read(point: tuple[Index, ...]) -> tuple[Axis, Axis]:
        y, z = (
            Axis(tuple(Pixel(i.at(point), w.at(point), n) for i, w, n in pixels), slope.at(point))
            for pixels, slope in axes
        )
        return y, z

    return read


def _sample(x: Tensor, n: Index, c: Index, row: Pixel, column: Pixel) -> Value:
    """Return the value of a pixel, zero outside the image."""
    v = x.at([n, c, row.index(), column.index()])
    return wide(va.masked(va.apply("logical_and", row.inside(), column.inside()), v, va.const(0, v.dtype)))


@lowers("grid_sampler_2d.default")
def grid_sampler_2d(ctx: Ctx, x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool) -> Tensor:
    out = ctx.result
    if mode not in (BILINEAR, NEAREST):
        raise FallBack("bicubic sampling")
    x, grid = stored(ctx, x), stored(ctx, grid, 1)
    sizes = ctx.shape(out.shape)
    n, c, i, j = points(sizes)
    y, z = _axes(ctx, x, grid, Sampling(mode, padding, aligned))((n, i, j))
    if mode == NEAREST:
        return finish(ctx, sizes, out.dtype, _sample(x, n, c, y.pixels[0], z.pixels[0]))
    total: Value | None = None
    for row in y.pixels:
        for column in z.pixels:
            term = s.mul(_sample(x, n, c, row, column), s.mul(row.weight, column.weight))
            total = term if total is None else s.add(total, term)
    assert total is not None
    return finish(ctx, sizes, out.dtype, total)


@lowers("grid_sampler_2d_backward.default")
def grid_sampler_2d_backward(
    ctx: Ctx, grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor]:
    if mode not in (BILINEAR, NEAREST) or 0 in grad.sizes:
        raise FallBack("bicubic sampling, or no samples")
    grad, x, grid = stored(ctx, grad), stored(ctx, x, 1), stored(ctx, grid, 2)
    how = Sampling(mode, padding, aligned)
    axes = _axes(ctx, x, grid, how)
    to_x = _to_image(ctx, grad, x, axes) if output_mask[0] else None
    if mode == NEAREST:
        return to_x, Tensor(grid.sizes, grid.dtype, va.const(0, grid.dtype))
    return to_x, _to_grid(ctx, grad, x, grid, axes)


def _to_image(ctx: Ctx, grad: Tensor, x: Tensor, axes: Axes) -> Tensor:
    """Return the gradient of the image: every sample adds its gradient to the pixels that it read."""
    n, c, i, j = points(grad.sizes)
    around = len(axes((n, i, j))[0].pixels)
    sizes = (*grad.sizes, around, around)
    n, c, i, j, a, b = points(sizes)
    y, z = axes((n, i, j))
    row, column = _choose(y.pixels, a), _choose(z.pixels, b)
    inside = va.apply("logical_and", row.inside(), column.inside())
    value = s.mul(wide(grad.at([n, c, i, j])), s.mul(row.weight, column.weight))
    fake = ctx.results[0]
    zero = Tensor(x.sizes, x.dtype, va.const(0, x.dtype))
    updates = Updates(sizes, [n, c, row.index(), column.index()], s.where(inside, value, 0.0))
    return scatter(ctx, zero, "add", updates, strides=ctx.strides_like(x.sizes, fake))


def _choose(pixels: tuple[Pixel, ...], k: Index) -> Pixel:
    """Return pixel number `k` of one or two."""
    a, b = pixels[0], pixels[-1]
    first = s.binary("eq", va.index(k), 0)
    return Pixel(s.where(first, a.position, b.position), s.where(first, a.weight, b.weight), a.size)


def _to_grid(ctx: Ctx, grad: Tensor, x: Tensor, grid: Tensor, axes: Axes) -> Tensor:
    """Return the gradient of the grid: per axis the sum over channels of grad times the derivative of the sample."""
    batch, channels, height, width = grad.sizes
    sizes = (batch, height, width, channels)
    n, i, j, c = points(sizes)
    y, z = axes((n, i, j))
    corner = [[_sample(x, n, c, row, column) for column in z.pixels] for row in y.pixels]
    g = wide(grad.at([n, c, i, j]))
    v0, v1 = (p.weight for p in y.pixels)
    w0, w1 = (p.weight for p in z.pixels)
    along_x = s.add(s.mul(s.sub(corner[0][1], corner[0][0]), v0), s.mul(s.sub(corner[1][1], corner[1][0]), v1))
    along_y = s.add(s.mul(s.sub(corner[1][0], corner[0][0]), w0), s.mul(s.sub(corner[1][1], corner[0][1]), w1))
    both = []
    for change, axis in ((along_x, z), (along_y, y)):
        term = Tensor(sizes, g.dtype, s.mul(s.mul(g, change), axis.slope))
        both.append(drop_dims(reduce(ctx, "sum", term, (3,), g.dtype, g.dtype), (3,), False))
    p = points(grid.sizes)
    first, second = (t.at(p[:3]) for t in both)
    return finish(ctx, grid.sizes, grid.dtype, s.where(s.binary("eq", va.index(p[3]), 0), first, second))
