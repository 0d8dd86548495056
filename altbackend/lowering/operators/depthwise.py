"""Depthwise convolutions of channels-last images on a GPU, forward and both gradients.

Each channel has its own filter, so there is no matrix product: a kernel reads an image about once and fuses with the
readers of its result. The library compiles one kernel for every new shape, which takes 0.1 s each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...aten.depthwise import WIDEST, WIDEST_GRADIENT, sums_weight
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import FallBack, lowers
from ..tensor import Tensor, as_view, points
from . import narrow_groups, weight_gradients
from .convolution_geometry import Geometry
from .pointwise import finish
from .pooling import inside, stored, wide, window

_KINDS = (torch.float32, torch.bfloat16, torch.float16)


def _check(ctx: Ctx, x: Tensor, w: Tensor, geometry: Geometry, widest: int) -> None:
    """Raise FallBack for a convolution that is not depthwise, or has windows of more than `widest` elements."""
    if not ctx.gpu or geometry.transposed or len(x.sizes) != 4 or x.dtype not in _KINDS or ctx.cfg.numerics == "eager":
        raise FallBack("the library computes convolutions")
    sizes = (*x.sizes, *w.sizes)
    if (
        not all(isinstance(n, int) for n in sizes)
        or geometry.groups == 1
        or not geometry.groups == x.sizes[1] == w.sizes[0]
    ):
        raise FallBack("not depthwise, or symbolic sizes")
    if 0 in x.sizes:
        raise FallBack("an empty image")
    if math.prod(_taps(w)) > widest:
        raise FallBack(f"a window of {math.prod(_taps(w))} elements")


def _are_channels_last(ctx: Ctx, images: int) -> bool:
    """Return whether so many leading arguments are channels-last images."""
    return all(ctx.traced(k).is_contiguous(memory_format=torch.channels_last) for k in range(images))


def _taps(w: Tensor) -> list[int]:
    return ex.numbers(w.sizes[2:])


def _by_tap(ctx: Ctx, w: Tensor) -> Tensor:
    """Return weights [C, 1, KH, KW] as [KH, KW, C], stored with the channel as the fastest dimension."""
    at = points(sizes := (*w.sizes[2:], w.sizes[0]))
    turned = Tensor(sizes, w.dtype, w.at([at[2], 0, at[0], at[1]]))
    stored_view = as_view(turned)
    return turned if stored_view is not None and stored_view.strides[2] == 1 else ctx.realize(turned, fresh=True)


def _padded(x: Tensor, point: Sequence[Index], valid: Value) -> Value:
    """Return an element of `x` in the dtype of sums, 0 outside the image."""
    return wide(va.masked(valid, x.at(point), va.const(0, x.dtype)))


def _sum(terms: Iterable[Value]) -> Value:
    return functools.reduce(s.add, terms)


@lowers("convolution.default")
def convolution(ctx: Ctx, x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Return y[n, c, p] = bias[c] + sum over taps t of x[n, c, stride * p - padding + dilation * t] * w[c, t]."""
    geometry = Geometry(*rest)
    if narrow_groups.suits(ctx, x, w, geometry):
        return narrow_groups.convolution(ctx, x, w, bias, geometry)
    _check(ctx, x, w, geometry, WIDEST)
    if not _are_channels_last(ctx, 1):
        raise FallBack("a depthwise convolution of an image that is not channels-last")
    sizes = ctx.result_sizes
    x, w = stored(ctx, x), _by_tap(ctx, w)
    channel, taps = points(sizes)[1], ex.numbers(w.sizes[:2])
    elements = window(x, sizes, taps, *geometry.steps(2))
    total = _sum(
        s.mul(_padded(x, where, valid), wide(w.at([*divmod(k, taps[1]), channel])))
        for k, (where, valid) in enumerate(elements)
    )
    if bias is not None:
        total = s.add(total, wide(bias.at([channel])))
    return finish(ctx, sizes, x.dtype, total)


@lowers("convolution_backward.default")
def convolution_backward(
    ctx: Ctx, grad: Tensor, x: Tensor, w: Tensor, bias_sizes: object, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradient of x or that of w; `fx_passes.depthwise` splits a call for both into two, and
    `fx_passes.group_gradients` one of few filters."""
    geometry, output_mask = Geometry(*rest[:-1]), rest[-1]
    if list(output_mask) == [False, True, False] and narrow_groups.sums_weight(ctx, grad, w, geometry):
        pairs = weight_gradients.all_pairs(*ex.numbers(w.sizes[:2]))
        grad, x = stored(ctx, grad), stored(ctx, x, 1)
        return None, weight_gradients.of_weight(ctx, grad, x, pairs, _taps(w), geometry), None
    if list(output_mask) not in ([True, False, False], [False, True, False]):
        raise FallBack("several gradients of a convolution at once")
    _check(ctx, x, w, geometry, WIDEST_GRADIENT)
    if any(d != 1 for d in geometry.dilation):
        raise FallBack("the gradient of a dilated convolution")
    grad = stored(ctx, grad)
    stride, padding, _ = geometry.steps(2)
    if output_mask[0]:
        return _of_image(ctx, grad, x, _by_tap(ctx, w), stride, padding), None, None
    if not sums_weight(ex.numbers(x.sizes), _taps(w), x.dtype):
        raise FallBack("the gradient of a wide window of 16 bits")
    pairs = weight_gradients.depthwise(ex.numbers(x.sizes)[1], _are_channels_last(ctx, 2))
    return None, weight_gradients.of_weight(ctx, grad, stored(ctx, x, 1), pairs, _taps(w), geometry), None


def _of_image(ctx: Ctx, grad: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """Return dx[n, c, q], the sum of grad[n, c, p] * w[c, t] over outputs p with a tap t = q + padding - stride * p."""
    p = points(x.sizes)
    taps = ex.numbers(w.sizes[:2])
    reach = [-(-k // st) for k, st in zip(taps, stride, strict=True)]
    shifted = [ex.add(i, pad) for i, pad in zip(p[2:], padding, strict=True)]
    newest = [ex.floordiv(i, st) for i, st in zip(shifted, stride, strict=True)]
    terms = []
    for back in range(math.prod(reach)):
        at = [ex.sub(o, b) for o, b in zip(newest, divmod(back, reach[1]), strict=True)]
        tap = [ex.sub(i, ex.mul(o, st)) for i, o, st in zip(shifted, at, stride, strict=True)]
        bounds = [inside(i, n) for i, n in zip((*at, *tap), (*grad.sizes[2:], *taps), strict=True)]
        image, in_window = (va.conjunction(*(c for pair in part for c in pair)) for part in (bounds[:2], bounds[2:]))
        terms.append(s.mul(_padded(grad, [*p[:2], *at], image), _padded(w, [*tap, p[1]], in_window)))
    return finish(ctx, x.sizes, x.dtype, _sum(terms))
