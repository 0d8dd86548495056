"""Depthwise convolutions of channels-last images on a GPU, forward and both gradients.

Each channel is filtered by itself, so that there is no matrix product: a kernel reads an image about once and computes
with what reads its result. The library would compile one kernel of its own for every shape it meets, 0.1 s each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Pointwise
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import FallBack, lowers
from ..tensor import Tensor, as_view, of_buffer, points
from .pointwise import finish
from .pooling import inside, stored, wide, window
from .reduction import reduce

_KINDS = (torch.float32, torch.bfloat16, torch.float16)
# Elements of a window up to which a kernel of ours is about as fast as the library's on an H200: with 49 the forward
# takes 1.4 to 1.8 times as long. The gradient of the image takes 0.75 times as long then, not yet measured in a model.
WIDEST = 36
PROGRAMS = 1024  # of the weight's gradient, that fill a GPU


def _check(ctx: Ctx, x: Tensor, w: Tensor, images: int, transposed: bool, groups: int) -> None:
    """Raises NotHere where the library computes the convolution. `images`: how many of the first arguments are."""
    if not ctx.gpu or transposed or len(x.sizes) != 4 or x.dtype not in _KINDS or ctx.cfg.numerics == "eager":
        raise FallBack("convolutions are the library's")
    sizes = (*x.sizes, *w.sizes)
    if not all(isinstance(n, int) for n in sizes) or not groups == x.sizes[1] == w.sizes[0] > 1:  # type: ignore[operator]
        raise FallBack("not depthwise, or of symbolic sizes")
    if 0 in x.sizes:
        raise FallBack("no image")
    if math.prod(_taps(w)) > WIDEST:
        raise FallBack(f"a window of {math.prod(_taps(w))} elements")
    if not all(isinstance(n, Node) and _last(n.meta["val"]) for n in ctx.graph_node.args[:images]):  # type: ignore[union-attr]
        raise FallBack("a depthwise convolution that does not lie channels-last")


def _last(image: torch.Tensor) -> bool:
    return image.is_contiguous(memory_format=torch.channels_last)


def _taps(w: Tensor) -> list[int]:
    return [int(n) for n in w.sizes[2:]]  # type: ignore[arg-type]


def _by_tap(ctx: Ctx, w: Tensor) -> Tensor:
    """Weights [C, 1, KH, KW] as [KH, KW, C], in memory so that neighbouring channels are neighbours."""
    at = points(sizes := (*w.sizes[2:], w.sizes[0]))
    turned = Tensor(sizes, w.dtype, w.at([at[2], 0, at[0], at[1]]))
    held = as_view(turned)
    return turned if held is not None and held.strides[2] == 1 else ctx.realize(turned, fresh=True)


def _padded(x: Tensor, where: Sequence[Index], valid: Value) -> Value:
    """An element in the dtype of sums, 0 where there is none."""
    return wide(va.masked(valid, x.at(where), va.const(0, x.dtype)))


def _sum(terms: Iterable[Value]) -> Value:
    return functools.reduce(s.add, terms)


def _sides(v: Sequence[int]) -> list[int]:
    return list(v) * (2 // len(v))


@lowers("convolution.default")
def convolution(
    ctx: Ctx,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """y[n, c, p] = bias[c] + sum over taps t of x[n, c, stride * p - padding + dilation * t] * w[c, t]."""
    _check(ctx, x, w, 1, transposed, groups)
    sizes = ctx.shape(ctx.graph_node.meta["val"].shape)  # type: ignore[union-attr]
    x, w = stored(ctx, x), _by_tap(ctx, w)
    channel, taps = points(sizes)[1], [int(n) for n in w.sizes[:2]]  # type: ignore[arg-type]
    elements = window(x, sizes, taps, _sides(stride), _sides(padding), _sides(dilation))
    total = _sum(
        s.mul(_padded(x, where, valid), wide(w.at([*divmod(k, taps[1]), channel])))
        for k, (where, valid) in enumerate(elements)
    )
    if bias is not None:
        total = s.add(total, wide(bias.at([channel])))
    return finish(ctx, sizes, x.dtype, total)


@lowers("convolution_backward.default")
def convolution_backward(
    ctx: Ctx,
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradient of x, or that of w; `fx_passes.depthwise` makes two calls of one for both."""
    if list(wanted) not in ([True, False, False], [False, True, False]):
        raise FallBack("several gradients of a convolution at once")
    _check(ctx, x, w, 2, transposed, groups)
    if any(d != 1 for d in dilation):
        raise FallBack("the gradient of a dilated convolution")
    grad = stored(ctx, grad)
    if wanted[0]:
        return _of_image(ctx, grad, x, _by_tap(ctx, w), _sides(stride), _sides(padding)), None, None
    return None, _of_weight(ctx, grad, stored(ctx, x, 1), _taps(w), _sides(stride), _sides(padding)), None


def _of_image(ctx: Ctx, grad: Tensor, x: Tensor, w: Tensor, stride: list[int], padding: list[int]) -> Tensor:
    """dx[n, c, q]: the sum over output points p with a tap t = q + padding - stride * p of grad[n, c, p] * w[c, t]."""
    p = points(x.sizes)
    taps = [int(n) for n in w.sizes[:2]]  # type: ignore[arg-type]
    reach = [-(-k // st) for k, st in zip(taps, stride, strict=True)]
    shifted = [ex.add(i, pad) for i, pad in zip(p[2:], padding, strict=True)]
    newest = [ex.floordiv(i, st) for i, st in zip(shifted, stride, strict=True)]
    terms = []
    for back in range(math.prod(reach)):
        at = [ex.sub(o, b) for o, b in zip(newest, divmod(back, reach[1]), strict=True)]
        tap = [ex.sub(i, ex.mul(o, st)) for i, o, st in zip(shifted, at, stride, strict=True)]
        bounds = [inside(i, n) for i, n in zip((*at, *tap), (*grad.sizes[2:], *taps), strict=True)]
        image, filtered = (va.conjunction(*(c for pair in part for c in pair)) for part in (bounds[:2], bounds[2:]))
        terms.append(s.mul(_padded(grad, [*p[:2], *at], image), _padded(w, [*tap, p[1]], filtered)))
    return finish(ctx, x.sizes, x.dtype, _sum(terms))


def _of_weight(ctx: Ctx, grad: Tensor, x: Tensor, taps: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """dw[c, 0, i, j]: the sum over images n and points p of grad[n, c, p] * x[n, c, stride * p - padding + (i, j)].

    A program sums over some rows of some images, one tap's row for a block of channels: its registers hold the totals
    of one row of taps and not of all. Divisions are of numbers that differ along one axis of a tile only.
    """
    n, c, *points_of = (int(k) for k in grad.sizes)  # type: ignore[arg-type]
    images, rows = _piece(n, points_of, c * taps[0])
    cut: tuple[Index, ...] = (n // images, points_of[0] // rows, taps[0], c, images, rows, points_of[1])
    d = points(cut)
    image = ex.add(ex.mul(d[0], images), d[4])
    row = ex.add(ex.mul(d[1], rows), d[5])
    g = wide(grad.at([image, d[3], row, d[6]]))
    high = ex.add(ex.mul(row, stride[0]), ex.sub(d[2], padding[0]))
    sums = []
    for j in range(taps[1]):
        wide_at = ex.add(ex.mul(d[6], stride[1]), j - padding[1])
        valid = va.conjunction(*inside(high, x.sizes[2]), *inside(wide_at, x.sizes[3]))
        term = s.mul(g, _padded(x, [image, d[3], high, wide_at], valid))
        sums.append(reduce(ctx, "sum", Tensor(cut, g.dtype, term), (4, 5, 6), g.dtype, g.dtype))
    totals = [reduce(ctx, "sum", t, (0, 1), g.dtype, g.dtype) for t in sums]
    return _side_by_side(ctx, totals, ctx.graph_node.meta["val"][1])  # type: ignore[union-attr]


def _side_by_side(ctx: Ctx, columns: Sequence[Tensor], like: torch.Tensor) -> Tensor:
    """[C, 1, KH, KW] of KW tensors of KH * C points, in loops that follow these, so that one kernel makes all."""
    sizes = ctx.shape(like.shape)
    held = ctx.new_buffer(like.dtype, sizes, ctx.strides_like(sizes, like))
    high, channel = ex.var("d0", sizes[2]), ex.var("d1", sizes[0])
    for j, t in enumerate(columns):
        index = ex.add(*(ex.mul(held.strides[k], i) for k, i in ((0, ex.ix(channel)), (2, ex.ix(high)), (3, j))))
        value = va.cast(t.at([0, 0, ex.ix(high), ex.ix(channel), 0, 0, 0]), like.dtype)
        loops = tuple(v for v in (high, channel) if v.args[1] != 1)
        ctx.emit(Pointwise(held.name, loops, index, value, ctx.origins()))
    return of_buffer(held)


def _piece(images: int, plane: Sequence[int], kept: int) -> tuple[int, int]:
    """(images, rows of an image) of a piece: the most that leave `PROGRAMS` pieces times blocks of 32 totals."""
    wanted = -(-PROGRAMS * 32 // kept)  # pieces
    if images >= wanted:
        return max(k for k in range(1, images + 1) if images % k == 0 and images // k >= wanted), plane[0]
    whole = [k for k in range(1, plane[0] + 1) if plane[0] % k == 0 and images * (plane[0] // k) >= wanted]
    return 1, max(whole, default=1)
