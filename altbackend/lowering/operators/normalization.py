"""Moments, and the normalisations that use them: variance, layer norm and group norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import compute_dtype
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import lowers
from ..tensor import Dims, Size, Tensor, axes, expand, points
from .pieces import Cut, Ends, cut_of, inside, split_of
from .pointwise import finish
from .reduction import (
    Groups,
    as_number,
    count,
    drop_dims,
    norm_dims,
    reduce,
    result_of,
    shared_as_read,
    shared_of_groups,
)

MOST_FLOPS = 64  # float additions that two kernels both compute; of more, one kernel stores the result for the other


def moments(ctx: Ctx, x: Tensor, dims: tuple[int, ...], acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (mean, sum of squared deviations), with keepdim, in two passes, because E[x^2] - mean^2 cancels.

    On a CPU the sum for the mean is in float64 for float32 numbers; the mean is rounded to `acc`. On a GPU long rows
    are cut into pieces.
    """
    return _of_pieces(ctx, x, dims, acc, corrected=False) or _moments_of_rows(ctx, x, dims, acc)


def _of_pieces(
    ctx: Ctx, x: Tensor, dims: tuple[int, ...], acc: torch.dtype, corrected: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the moments by way of pieces; None where rows are not cut. `corrected`: see `moments_of_pieces`."""
    if not ctx.gpu:
        return None
    split = split_of(x)
    cut = cut_of(split.tensor, split.dims(dims))
    if cut is None:
        return None
    last = (len(cut.tensor.sizes) - 1,)
    moments = moments_of_pieces(ctx, cut.tensor, last, acc, cut.ends, corrected)
    mu, m2 = combined_moments(ctx, moments, cut.inner, cut.rows)
    sizes = tuple(1 if k in dims else n for k, n in enumerate(x.sizes))
    one, two = (split.joined(_keepdim(t, split.tensor, cut), sizes) for t in (mu, m2))
    return one, two


def is_cut(ctx: Ctx, x: Tensor, dims: tuple[int, ...]) -> bool:
    """Return whether `moments` cuts rows into pieces."""
    if not ctx.gpu:
        return False
    split = split_of(x)
    return cut_of(split.tensor, split.dims(dims)) is not None


def _moments_of_rows(
    ctx: Ctx, x: Tensor, dims: tuple[int, ...], acc: torch.dtype, ends: Ends | None = None
) -> tuple[Tensor, Tensor]:
    """Return (mean, sum of squared deviations) over `dims`, which `ends` may end early.

    Sums of 16-bit numbers need no float64: of up to 2^16 equal ones, float32 holds each partial sum exactly.
    """
    wide = acc if ctx.gpu or x.dtype.itemsize == 2 else torch.float64
    total = reduce(ctx, "sum", x, dims, wide, wide)
    n = as_number(count(x, dims) if ends is None else ends.count, wide)
    mu = Tensor(total.sizes, acc, va.cast(s.div(total.value, n), acc))
    centred = Tensor(x.sizes, acc, inside(s.square(deviation(x, mu, acc)), ends))
    return mu, reduce(ctx, "sum", centred, dims, acc, acc)


@dataclass(frozen=True)
class Moments:
    """Moments of pieces of a row.

    `points`: the number of points of each piece, or None where pieces are equal. `left`: the sum of the deviations from
    the mean, which its rounding leaves, or None where it is neglected.
    """

    mean: Tensor
    m2: Tensor
    points: Value | None
    left: Tensor | None


def moments_of_pieces(
    ctx: Ctx, x: Tensor, dims: tuple[int, ...], acc: torch.dtype, ends: Ends | None, corrected: bool = False
) -> Moments:
    """Return the moments of pieces whose points lie along `dims`; `corrected` as in `statistics`."""
    mean, m2 = _moments_of_rows(ctx, x, dims, acc, ends)
    own = None if ends is None else as_number(ends.count, acc)
    if not corrected:
        return Moments(mean, m2, own, None)
    apart = Tensor(x.sizes, acc, inside(deviation(x, mean, acc), ends))
    return Moments(mean, m2, own, reduce(ctx, "sum", apart, dims, acc, acc))


def combined_moments(ctx: Ctx, moments: Moments, dims: tuple[int, ...], rows: Index) -> tuple[Tensor, Tensor]:
    """Return the moments of rows of `rows` points from those of their pieces, which lie along `dims`.

    The sum of squared deviations is the sum of m2 + n (mean - mu)^2 over pieces of n points. Method: T. Chan, G. Golub,
    R. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """
    mean, acc, own = moments.mean, moments.m2.dtype, moments.points
    number = count(mean, dims)
    if own is None:
        total, n = reduce(ctx, "sum", mean, dims, acc, acc), as_number(number, acc)
        own = as_number(ex.floordiv(rows, number), acc)
    else:
        weighted = Tensor(mean.sizes, acc, s.mul(mean.value, own))
        total, n = reduce(ctx, "sum", weighted, dims, acc, acc), as_number(rows, acc)
    mu = Tensor(total.sizes, acc, s.div(total.value, n))
    apart = s.sub(mean.value, expand(mu, mean.sizes).value)
    if moments.left is None:
        spread = Tensor(mean.sizes, acc, s.add(moments.m2.value, s.mul(s.square(apart), own)))
        return mu, reduce(ctx, "sum", spread, dims, acc, acc)
    off = s.div(moments.left.value, own)
    apart = s.add(apart, off)
    own_m2 = s.sub(moments.m2.value, s.mul(moments.left.value, off))
    spread = Tensor(mean.sizes, acc, s.add(own_m2, s.mul(s.square(apart), own)))
    left = reduce(ctx, "sum", Tensor(mean.sizes, acc, s.mul(apart, own)), dims, acc, acc)
    return _corrected(mu, reduce(ctx, "sum", spread, dims, acc, acc), left, as_number(rows, acc))


def _corrected(mu: Tensor, m2: Tensor, left: Tensor, n: Value) -> tuple[Tensor, Tensor]:
    """Return moments about the mean, from those about `mu`, of `n` points whose deviations from it sum to `left`.

    Where the mean is below the deviation, `mu` stays: all x - mu of one exponent are then off by the same rounding.
    """
    exact = s.binary("ge", s.mul(n, s.square(mu.value)), m2.value)
    off = s.where(exact, s.div(left.value, n), 0.0)
    m2_left = s.binary("maximum", s.sub(m2.value, s.mul(left.value, off)), 0.0)
    return Tensor(mu.sizes, mu.dtype, s.add(mu.value, off)), Tensor(m2.sizes, m2.dtype, m2_left)


def _keepdim(t: Tensor, x: Tensor, cut: Cut) -> Tensor:
    """Return results of pieces in the shape of `x` with its reduced dimensions 1."""
    sizes = tuple(n if k in cut.outer else 1 for k, n in enumerate(x.sizes))
    own = iter(cut.outer)
    p = points(sizes)
    remaining = [k for k in range(len(t.sizes) - 1) if k not in cut.inner]
    place = {k: p[next(own)] for k in remaining}
    return Tensor(sizes, t.dtype, t.at([place.get(k, 0) for k in range(len(t.sizes))]))


def recomputed(x: Tensor, acc: torch.dtype) -> Tensor | None:
    """Return `x`, for two kernels that both compute it from its one operand of this size; None where that costs more.

    The value is rounded to the dtype of `x`, as in memory, and converted to `acc`.
    """
    every = {a for a in axes(x.sizes) if ex.size_of(a) != 1}
    full_reads = sum(every <= ex.vars_of(index) for _, index in va.loads(x.value))
    if full_reads != 1 or va.flops(x.value) > MOST_FLOPS:
        return None
    return Tensor(x.sizes, acc, va.cast(va.cast(x.value, x.dtype), acc))


def deviation(x: Tensor, mu: Tensor, acc: torch.dtype) -> Value:
    """Return x - mu in dtype `acc`."""
    return s.sub(va.cast(x.value, acc), expand(mu, x.sizes).value)


def statistics(ctx: Ctx, x: Tensor, dims: tuple[int, ...], acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `moments` with the accuracy of a result; a normalisation only needs that of `moments`.

    On a CPU they are computed in float64, as in eager, but for numbers of 16 bits. On a GPU the rounding error of the
    mean is corrected: with d = x - mean, m2 = sum d^2 - (sum d)^2 / n. Method: T. Chan, G. Golub, R. LeVeque,
    "Algorithms for Computing the Sample Variance", 1983, the corrected two-pass algorithm.
    """
    if not ctx.gpu:
        return moments(ctx, x, dims, acc if x.dtype.itemsize == 2 else torch.float64)
    if (of_pieces := _of_pieces(ctx, x, dims, acc, corrected=True)) is not None:
        return of_pieces
    mu, m2 = moments(ctx, x, dims, acc)
    left = reduce(ctx, "sum", Tensor(x.sizes, acc, deviation(x, mu, acc)), dims, acc, acc)
    return _corrected(mu, m2, left, as_number(count(x, dims), acc))


def centre(mu: Tensor, m2: Tensor, acc: torch.dtype) -> Tensor:
    """Return a mean as a result: NaN if the deviations are NaN, as eager's recurrences give."""
    return Tensor(mu.sizes, acc, va.cast(s.where(s.unary("isnan", m2.value), m2.value, mu.value), acc))


def _variance(
    ctx: Ctx, x: Tensor, dims: Dims, correction: float | None, acc: torch.dtype
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    reduced_dims = norm_dims(dims, len(x.sizes))
    own = recomputed(x, acc) if is_cut(ctx, x, reduced_dims) else None
    x = own or shared_as_read(ctx, x, acc)
    mu, m2 = statistics(ctx, x, reduced_dims, acc)
    n = as_number(count(x, reduced_dims), m2.dtype)
    free = n if not correction else s.binary("maximum", s.sub(n, float(correction)), 0.0)
    return Tensor(m2.sizes, acc, va.cast(s.div(m2.value, free), acc)), centre(mu, m2, acc), reduced_dims


@lowers("var.correction")
def var(ctx: Ctx, x: Tensor, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    acc = compute_dtype(x.dtype)
    v, _, reduced_dims = _variance(ctx, x, dims, 1 if correction is None else correction, acc)
    v = drop_dims(v, reduced_dims, keepdim)
    return finish(ctx, v.sizes, x.dtype, v.value)


@lowers("var_mean.correction")
def var_mean(
    ctx: Ctx, x: Tensor, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    acc = compute_dtype(x.dtype)
    v, mu, reduced_dims = _variance(ctx, x, dims, 1 if correction is None else correction, acc)
    v, mu = drop_dims(v, reduced_dims, keepdim), drop_dims(mu, reduced_dims, keepdim)
    return finish(ctx, v.sizes, x.dtype, v.value), finish(ctx, mu.sizes, x.dtype, mu.value)


@lowers("native_layer_norm.default")
def native_layer_norm(
    ctx: Ctx, x: Tensor, shape: Sequence[object], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    out, mean_out, _ = result_of(ctx)
    acc = compute_dtype(mean_out.dtype)
    rank = len(x.sizes)
    reduced_dims = tuple(range(rank - len(shape), rank))
    own = recomputed(x, acc) if is_cut(ctx, x, reduced_dims) else None
    x = own or shared_of_groups(ctx, x, Groups(ex.prod(x.sizes[: rank - len(shape)]), x.sizes[rank - len(shape)]), acc)
    mu, m2 = moments(ctx, x, reduced_dims, acc)
    rstd = ctx.realize(inverse_std(ctx, m2, count(x, reduced_dims), eps, acc))
    y = s.mul(s.sub(va.cast(x.value, acc), expand(mu, x.sizes).value), expand(rstd, x.sizes).value)
    if weight is not None:
        y = s.mul(y, expand(weight, x.sizes).computed(acc))
    if bias is not None:
        y = s.add(y, expand(bias, x.sizes).computed(acc))
    stats = [finish(ctx, t.sizes, mean_out.dtype, t.value) for t in (centre(mu, m2, acc), rstd)]
    return finish(ctx, x.sizes, out.dtype, y), *stats


def inverse_std(ctx: Ctx, m2: Tensor, n: Index, eps: float, acc: torch.dtype) -> Tensor:
    """Return 1 / sqrt(m2 / n + eps); on a CPU it is computed in float64 and rounded to `acc` once."""
    wide = m2.value.dtype if ctx.gpu else torch.float64
    variance = s.div(va.cast(m2.value, wide), as_number(n, wide))
    return Tensor(m2.sizes, acc, va.cast(s.unary("rsqrt", s.add(variance, eps)), acc))


@lowers("native_group_norm.default")
def native_group_norm(
    ctx: Ctx,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: Size,
    c: object,
    hw: Size,
    groups: int,
    eps: float,
) -> tuple[Tensor, ...]:
    out, mean_out, _ = result_of(ctx)
    acc = compute_dtype(mean_out.dtype)
    batch, channels = x.sizes[0], x.sizes[1]
    per_group = ex.floordiv(channels, groups)
    split = (batch, groups, per_group, *x.sizes[2:])
    reduced_dims = tuple(range(2, len(split)))
    if is_cut(ctx, _grouped(x, split, acc), reduced_dims):
        x = recomputed(x, acc) or shared_as_read(ctx, x, acc)
    else:
        x = shared_of_groups(ctx, x, Groups(ex.mul(batch, groups), per_group), acc)
    g = _grouped(x, split, acc)
    mu, m2 = moments(ctx, g, reduced_dims, acc)
    mu = ctx.realize(mu) if ctx.gpu else mu  # other kernels would compute the quotient for each element
    rstd = ctx.realize(inverse_std(ctx, m2, count(g, reduced_dims), eps, acc))
    q = points(x.sizes)
    group = [q[0], ex.floordiv(q[1], per_group), *([0] * (len(split) - 2))]
    y = s.mul(s.sub(va.cast(x.value, acc), mu.at(group)), rstd.at(group))
    for param, op in ((weight, s.mul), (bias, s.add)):
        if param is not None:
            y = op(y, va.cast(param.at([q[1]]), acc))
    stats = []
    for t in (centre(mu, m2, acc), rstd):
        r = points((batch, groups))
        stats.append(finish(ctx, (batch, groups), mean_out.dtype, t.at([*r, *([0] * (len(split) - 2))])))
    return finish(ctx, x.sizes, out.dtype, y), *stats


def _grouped(x: Tensor, split: tuple[Index, ...], acc: torch.dtype) -> Tensor:
    """Return `x` [N, C, ...] as [N, groups, channels of a group, ...] in dtype `acc`."""
    p = points(split)
    channel = ex.add(ex.mul(p[1], split[2]), p[2])
    return Tensor(split, acc, va.cast(x.at([p[0], channel, *p[3:]]), acc))
