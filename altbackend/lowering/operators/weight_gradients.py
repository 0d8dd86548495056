"""Gradients of the weights of convolutions of images on a GPU, for which generated kernels sum over all points.

dw[o, i, s, t] = sum over images n and points p of grad[n, o, p] * x[n, i, stride * p - padding + (s, t)]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Pointwise
from .. import scalar as s
from ..context import Ctx
from ..tensor import Tensor, of_buffer, points
from .convolution_geometry import Geometry
from .pooling import inside, wide
from .reduction import reduce

PROGRAMS = 1024  # programs that fill a GPU
TILE = 32  # totals of a program where channels are neighbours in memory
OF_PAIRS = 4  # times the programs that fill a GPU, of one total each: the last ones then end at about the same time


@dataclass(frozen=True)
class Pairs:
    """The loops over pairs of a written and a read channel of which there is a weight, slow ones first.

    `written`, `read`: the numbers of the loops over the channels of the result and of the image. `weight_dims`: the
    dimension of the weight that each loop runs along. `totals`: those of all pieces, at least.
    """

    sizes: tuple[int, ...]
    written: int
    read: int
    weight_dims: tuple[int, ...]
    totals: int


def depthwise(channels: int, channels_last: bool) -> Pairs:
    """Return the pairs of a depthwise convolution: each channel with itself. `channels_last`: both images lie so."""
    return Pairs((channels,), 0, 0, (0,), (TILE if channels_last else OF_PAIRS) * PROGRAMS)


def all_pairs(written: int, read: int) -> Pairs:
    """Return the pairs of a convolution without groups."""
    return Pairs((written, read), 0, 1, (0, 1), OF_PAIRS * PROGRAMS)


def of_weight(ctx: Ctx, grad: Tensor, x: Tensor, pairs: Pairs, taps: list[int], geometry: Geometry) -> Tensor:
    """Return the gradient of the weight in the layout that eager gives it; sums are float32.

    A program sums over some rows of some images, for one row s of taps and a block of pairs. So its registers hold
    the totals of one row of taps instead of all. The loops are shaped so that index divisions have operands that
    vary along one axis of a tile only.
    """
    stride, padding, _ = geometry.steps(2)
    n, _, *points_of = ex.numbers(grad.sizes)
    images, rows = piece(n, points_of, -(-pairs.totals // math.prod((*pairs.sizes, taps[0]))))
    outer = (n // images, points_of[0] // rows, taps[0], *pairs.sizes)
    cut: tuple[Index, ...] = (*outer, images, rows, points_of[1])
    first_piece, first_row, tap, *channels, of_image, of_row, column = points(cut)
    image = ex.add(ex.mul(first_piece, images), of_image)
    row = ex.add(ex.mul(first_row, rows), of_row)
    g = wide(grad.at([image, channels[pairs.written], row, column]))
    high = ex.add(ex.mul(row, stride[0]), ex.sub(tap, padding[0]))
    inner = tuple(range(len(outer), len(cut)))
    totals = []
    for t in range(taps[1]):
        along = ex.add(ex.mul(column, stride[1]), t - padding[1])
        valid = va.conjunction(*inside(high, x.sizes[2]), *inside(along, x.sizes[3]))
        element = va.masked(valid, x.at([image, channels[pairs.read], high, along]), va.const(0, x.dtype))
        sums = reduce(ctx, "sum", Tensor(cut, g.dtype, s.mul(g, wide(element))), inner, g.dtype, g.dtype)
        totals.append(reduce(ctx, "sum", sums, (0, 1), g.dtype, g.dtype))
    return _store_columns(ctx, totals, pairs, ctx.results[1])


def _store_columns(ctx: Ctx, columns: Sequence[Tensor], pairs: Pairs, like: torch.Tensor) -> Tensor:
    """Store KW columns of KH * pairs points as weights [O, I, KH, KW].

    The loops iterate as the reductions that compute the columns, so that one kernel computes all.
    """
    sizes = ctx.shape(like.shape)
    buffer = ctx.new_buffer(like.dtype, sizes, ctx.strides_like(sizes, like))
    every = tuple(ex.dim(k, n) for k, n in enumerate((sizes[2], *pairs.sizes)))
    at = [ex.ix(v) for v in every]
    terms = [ex.mul(buffer.strides[d], i) for d, i in zip((2, *pairs.weight_dims), at, strict=True)]
    for t, total in enumerate(columns):
        value = va.cast(total.at([0, 0, *at, 0, 0, 0]), like.dtype)
        index = ex.add(*terms, ex.mul(buffer.strides[3], t))
        loops = tuple(v for v in every if ex.size_of(v) != 1)
        ctx.emit(Pointwise(buffer.name, loops, index, value, ctx.origins()))
    return of_buffer(buffer)


def piece(images: int, plane: Sequence[int], least: int) -> tuple[int, int]:
    """Return (images, rows of an image) of a piece: the largest of which there are at least so many."""
    if images >= least:
        return max(k for k in range(1, images + 1) if images % k == 0 and images // k >= least), plane[0]
    rows = [k for k in range(1, plane[0] + 1) if plane[0] % k == 0 and images * (plane[0] // k) >= least]
    return 1, max(rows, default=1)
