"""Convolutions in narrow groups on a GPU: each result reads few channels, as a depthwise one reads one.

The library has few kernels for such groups. Others it runs as an implicit product of the smallest tile, or converts the
images to a layout of its own and back. Here one kernel sums the products of each result, in the layout that the image
has, and fuses with the readers of the result.
"""

from __future__ import annotations

import functools

from ...aten.narrow_groups import in_generated_kernel
from ...ir import expr as ex
from ...ir import value as va
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..tensor import Tensor, as_view, points
from .convolution_geometry import Geometry
from .pointwise import finish
from .pooling import stored, wide, window


def suits(ctx: Ctx, x: Tensor, w: Tensor, geometry: Geometry) -> bool:
    """Return whether `convolution` computes a call: one of static sizes on a GPU, in groups that suit it."""
    if not ctx.gpu or geometry.transposed or ctx.cfg.numerics == "eager":
        return False
    sizes = (*x.sizes, *w.sizes)
    if not all(isinstance(n, int) for n in sizes) or 0 in sizes:
        return False
    channels, *weight = ex.numbers((x.sizes[1], *w.sizes))
    return in_generated_kernel(channels, geometry.groups, weight, x.dtype)


def convolution(ctx: Ctx, x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return y[n, o, p] = bias[o] + the sum of x[n, c + i, stride * p - padding + dilation * t] * w[o, i, t].

    The sum is over the channels i of the group of o, which begins at channel c, and over the taps t. Images x are
    [N, C, points], weights w [O, C / groups, taps] and results [N, O, points] in the dtype of x; sums are float32.
    """
    sizes = ctx.result_sizes
    out_channels, width, *taps = ex.numbers(w.sizes)
    x, w = stored(ctx, x), _channel_fastest(ctx, w) if _has_channels_fastest(x) else stored(ctx, w, 1)
    o = points(sizes)[1]
    first = ex.mul(ex.floordiv(o, out_channels // geometry.groups), width)
    terms: list[Value] = []
    for k, (where, valid) in enumerate(window(x, sizes, taps, *geometry.steps(len(taps)))):
        tap = ex.unflatten(k, tuple(taps))
        for i in range(width):
            at = [where[0], ex.add(first, i), *where[2:]]
            element = wide(va.masked(valid, x.at(at), va.const(0, x.dtype)))
            terms.append(s.mul(element, wide(w.at([o, i, *tap]))))
    total = functools.reduce(s.add, terms)
    if bias is not None:
        total = s.add(total, wide(bias.at([o])))
    return finish(ctx, sizes, x.dtype, total)


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
