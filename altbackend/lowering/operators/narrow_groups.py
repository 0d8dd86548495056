"""Convolutions in narrow groups or of few filters on a GPU: each result reads few channels, as a depthwise one does.

The library has few kernels for them. Others it runs as an implicit product of the smallest tile, or converts the
images to a layout of its own and back. Here one kernel sums the products of each result, in the layout that the image
has, and fuses with the readers of the result.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from altbackend.lazy_dataclass import dataclass

from ...aten.narrow_groups import (
    MOST_TERMS,
    in_generated_kernel,
    in_plain_kernel,
    is_depthwise_image,
    sums_weight_gradient,
)
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Reduction
from ...ir.ops import LOW_PRECISION
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx, memory_order
from ..tensor import Tensor, as_view, axes, of_buffer, points
from .convolution_geometry import Geometry
from .pointwise import finish
from .pooling import inside, stored, wide
from .reduction import result_of

_MOST_WRITTEN_OUT = 27  # products in the body of a loop: a window of 5x5 or 3x3x3


def suits(ctx: Ctx, x: Tensor, w: Tensor, geometry: Geometry) -> bool:
    """Return whether `convolution` computes a call: one of static sizes on a GPU, in groups that suit it."""
    if not ctx.gpu or geometry.transposed or ctx.cfg.numerics == "eager":
        return False
    sizes = (*x.sizes, *w.sizes)
    if not all(isinstance(n, int) for n in sizes) or 0 in sizes:
        return False
    channels, *weight = ex.numbers((x.sizes[1], *w.sizes))
    if is_depthwise_image(channels, geometry.groups, weight):
        return in_plain_kernel(weight, x.dtype) and not ctx.traced(0).is_contiguous(memory_format=torch.channels_last)
    return in_generated_kernel(channels, geometry.groups, weight, x.dtype)


def sums_weight(ctx: Ctx, grad: Tensor, w: Tensor, geometry: Geometry) -> bool:
    """Return whether a generated kernel computes the gradient of the weight of a convolution of static sizes."""
    if not ctx.gpu or geometry.transposed or ctx.cfg.numerics == "eager" or {*geometry.dilation} != {1}:
        return False
    sizes = (*grad.sizes, *w.sizes)
    if not all(isinstance(n, int) for n in sizes) or 0 in sizes:
        return False
    return sums_weight_gradient(geometry.groups, ex.numbers(w.sizes), grad.dtype)


def convolution(ctx: Ctx, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return y[n, o, p] = bias[o] + the sum of x[n, c + i, stride * p - padding + dilation * t] * w[o, i, t].

    The sum is over the channels i of the group of o, which begins at channel c, and over the taps t. Images x are
    [N, C, points], weights w [O, C / groups, taps] and results [N, O, points] in the dtype of x; sums are float32.
    """
    x = stored(ctx, x)
    w = _channel_fastest(ctx, w) if _has_channels_fastest(x) else stored(ctx, w, 1)
    loops, written_out = _split(*ex.numbers(w.sizes[1:]))
    sums = _Sums(x, w, geometry, ctx.result_sizes, loops)
    terms = [sums.term(tap) for tap in itertools.product(*map(range, written_out))]
    total = functools.reduce(s.add, terms)
    is_looped = any(n > 1 for n in loops)
    if is_looped:
        total = _looped(ctx, total, sums)
    if bias is not None:
        total = s.add(total, wide(bias.at([points(sums.sizes)[1]])))
    result = finish(ctx, sums.sizes, x.dtype, total)
    # readers of another kernel take half the bytes of the sums, which then stay in registers
    return ctx.realize(result, result_of(ctx)) if is_looped and x.dtype in LOW_PRECISION else result


def _split(width: int, *taps: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the loops over the products of a result, slow ones first, and those whose products are written out.

    The loops are over the channels of a group and the leading dimensions of a window. Triton takes long for many
    products: 86 s for a program with 150.
    """
    sizes = (width, *taps)
    first = 0
    while math.prod(sizes[first:]) > (MOST_TERMS if first == 0 else _MOST_WRITTEN_OUT):
        first += 1
    return sizes[:first], sizes[first:]


@dataclass(frozen=True)
class _Sums:
    """The products of every result: operands, arguments, sizes of the result, and sizes of `loops` over products."""

    x: Tensor
    w: Tensor
    geometry: Geometry
    sizes: tuple[Index, ...]
    loops: tuple[int, ...]

    def term(self, tap: tuple[int, ...]) -> Value:
        """Return the product of an element and a weight in float32; `tap`: what follows the loops' positions."""
        rank = len(self.sizes)
        at = points((*self.sizes, *self.loops))
        products: list[Index] = [*at[rank:], *tap]
        i, *taps = products
        n, o, *point = at[:rank]
        written, width, *_ = ex.numbers(self.w.sizes)
        channel = ex.add(ex.mul(ex.floordiv(o, written // self.geometry.groups), width), i)
        stride, padding, dilation = self.geometry.steps(rank - 2)
        where = [
            ex.add(ex.mul(p, stride[d]), ex.sub(ex.mul(t, dilation[d]), padding[d]))
            for d, (p, t) in enumerate(zip(point, taps, strict=True))
        ]
        valid = va.conjunction(*(c for e, size in zip(where, self.x.sizes[2:], strict=True) for c in inside(e, size)))
        element = wide(va.masked(valid, self.x.at([n, channel, *where]), va.const(0, self.x.dtype)))
        return s.mul(element, wide(self.w.at([o, i, *taps])))


def _looped(ctx: Ctx, value: Value, sums: _Sums) -> Value:
    """Return the sum of `value` over the loops of `sums`, in a buffer that lies as the result does."""
    sizes, rank = sums.sizes, len(sums.sizes)
    every = axes((*sizes, *sums.loops))
    strides = ctx.strides_like(sizes, result_of(ctx))
    buffer = ctx.new_buffer(torch.float32, sizes, strides)
    index = ex.add(0, *(ex.mul(st, ex.ix(a)) for st, a in zip(buffer.strides, every[:rank], strict=True)))
    dims = tuple(every[k] for k in memory_order(strides, sizes) if sizes[k] != 1)
    rdims = tuple(a for a in every[rank:] if ex.size_of(a) != 1)
    ctx.emit(Reduction(buffer.name, dims, rdims, index, "sum", value, ctx.origins()))
    return of_buffer(buffer).value


def _has_channels_fastest(x: Tensor) -> bool:
    view = as_view(x)
    return view is not None and view.strides[1] == 1


def _channel_fastest(ctx: Ctx, w: Tensor) -> Tensor:
    """Return weights [O, I, taps] stored with the written channel as the fastest dimension, as threads read them."""
    view = as_view(w)
    if view is not None and view.strides[0] == 1:
        return w
    at = points((*w.sizes[1:], w.sizes[0]))
    turned = ctx.realize(Tensor((*w.sizes[1:], w.sizes[0]), w.dtype, w.at([at[-1], *at[:-1]])), fresh=True)
    back = points(w.sizes)
    return Tensor(w.sizes, w.dtype, turned.at([*back[1:], back[0]]))
