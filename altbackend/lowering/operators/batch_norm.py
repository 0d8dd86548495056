"""Batch normalisation, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
from ..tensor import Tensor, axes, expand, points
from .normalization import combined_moments, inverse_std, moments_of_pieces, recomputed, statistics
from .pieces import FEWEST_ROWS, MOST_ROWS, Ends, ends_of, inside, piece_length
from .pointwise import finish
from .reduction import as_number, count, drop_dims, reduce, result_of, shared, shared_as_read

LONGEST_PLANE = 4096  # elements of one channel of an image that a program reads at once


def _reduced(x: Tensor) -> tuple[int, ...]:
    return tuple(k for k in range(len(x.sizes)) if k != 1)


def _of_channel(t: Tensor | None, x: Tensor, acc: torch.dtype) -> Value | None:
    """Return a tensor of one value per channel [C] at the points of `x` [N, C, ...], in dtype `acc`."""
    return None if t is None else va.cast(t.at([points(x.sizes)[1]]), acc)


def _affine(y: Value, weight: Value | None, bias: Value | None) -> Value:
    y = y if weight is None else s.mul(y, weight)
    return y if bias is None else s.add(y, bias)


@dataclass(frozen=True)
class FixedStatistics:
    """A batch normalisation by fixed statistics: mean, variance and affine parameters [C], weight and bias or None."""

    mean: Tensor
    var: Tensor
    eps: float
    weight: Tensor | None
    bias: Tensor | None


def _by_statistics(ctx: Ctx, x: Tensor, norm: FixedStatistics, dtype: torch.dtype) -> Tensor:
    # (x - mean) / sqrt(var + eps) * weight + bias
    acc = compute_dtype(dtype)
    mean_at, var_at = _of_channel(norm.mean, x, acc), _of_channel(norm.var, x, acc)
    assert mean_at is not None
    assert var_at is not None
    y = s.mul(s.sub(va.cast(x.value, acc), mean_at), s.unary("rsqrt", s.add(var_at, norm.eps)))
    return finish(ctx, x.sizes, dtype, _affine(y, _of_channel(norm.weight, x, acc), _of_channel(norm.bias, x, acc)))


@lowers("_native_batch_norm_legit_no_training.default")
def batch_norm_inference(
    ctx: Ctx,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    out = result_of(ctx, 0)
    none = Tensor((0,), result_of(ctx, 1).dtype, va.const(0, result_of(ctx, 1).dtype))
    return _by_statistics(ctx, x, FixedStatistics(mean, var, eps, weight, bias), out.dtype), none, none


def _pieces(ctx: Ctx, xs: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, ...], Ends | None] | None:
    """Return tensors [N, C, ...] as [C, pieces, points of a piece ...], the dimensions of the points and their ends.

    A GPU then reduces in two steps: a program loads a piece into registers once and makes several passes over it.
    """
    sizes = xs[0].sizes
    if not ctx.gpu or len(sizes) < 2 or not all(isinstance(n, int) for n in sizes):
        return None
    n, c, *space = (int(k) for k in sizes if isinstance(k, int))
    plane = ex.prod(space)
    rows = ex.mul(n, plane)
    assert isinstance(plane, int)
    assert isinstance(rows, int)
    channel = axes(sizes)[1]
    channels_last = any(ex.coefficient(i, channel) == 1 for x in xs for _, i in va.loads(x.value))
    if not channels_last and n > 1 and FEWEST_ROWS <= plane <= LONGEST_PLANE:
        cut: tuple[Index, ...] = (c, n, *space)
        d = points(cut)
        return [Tensor(cut, x.dtype, x.at([d[1], d[0], *d[2:]])) for x in xs], tuple(range(2, len(cut))), None
    if not channels_last or rows < 4 * FEWEST_ROWS:
        return None
    length = piece_length(rows, -(-c // 32), FEWEST_ROWS, MOST_ROWS)
    cut = (c, -(-rows // length), length)
    d = points(cut)
    ends = ends_of(d[1], d[2], length, rows)
    row = ex.add(ex.mul(d[1], length), d[2])
    point: list[Index] = []
    for size in reversed(space):
        point.insert(0, ex.mod(row, size))
        row = ex.floordiv(row, size)
    return [Tensor(cut, x.dtype, inside(x.at([row, d[0], *point]), ends)) for x in xs], (2,), ends


def _keepdim(t: Tensor, x: Tensor) -> Tensor:
    """Return [C, 1, ...] as [1, C, 1, ...], the shape of a reduction of `x` with keepdim."""
    sizes = tuple(n if k == 1 else 1 for k, n in enumerate(x.sizes))
    return Tensor(sizes, t.dtype, t.at([points(sizes)[1], *([0] * (len(t.sizes) - 1))]))


def _moments(ctx: Ctx, x: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (mean, sum of squared deviations) per channel, with keepdim.

    On a GPU each piece takes two passes in registers, so x is read once, and there is no cancellation.
    """
    cut = _pieces(ctx, [x])
    if cut is None:
        return statistics(ctx, x, _reduced(x), acc)
    (parts,), inner, ends = cut
    moments = moments_of_pieces(ctx, parts, inner, acc, ends)  # [C, pieces, 1, ...]
    mu, m2 = combined_moments(ctx, moments, tuple(range(1, len(parts.sizes))), count(x, _reduced(x)))
    return _keepdim(mu, x), _keepdim(m2, x)


def _totals(ctx: Ctx, x: Tensor, values: Sequence[Value], acc: torch.dtype) -> list[Tensor]:
    """Return the sums per channel of values at the points of `x`, with keepdim; on a GPU in two steps."""
    tensors = [Tensor(x.sizes, acc, v) for v in values]
    cut = _pieces(ctx, tensors)
    if cut is None:
        return [reduce(ctx, "sum", t, _reduced(x), acc, acc) for t in tensors]
    cut_tensors, inner, _ = cut
    parts = [reduce(ctx, "sum", t, inner, acc, acc) for t in cut_tensors]
    pieces_dims = tuple(range(1, len(parts[0].sizes)))
    return [_keepdim(reduce(ctx, "sum", t, pieces_dims, acc, acc), x) for t in parts]


class Running(NamedTuple):
    """The arguments after the bias: running statistics, whether this call updates them, and how far."""

    mean: Tensor
    var: Tensor
    training: bool
    momentum: float
    eps: float


@lowers("_native_batch_norm_legit_functional.default")
def batch_norm_training(
    ctx: Ctx, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    running_mean, running_var, training, momentum, eps = Running(*rest)
    out, mean_out = result_of(ctx, 0), result_of(ctx, 1)
    if not training:
        y = _by_statistics(ctx, x, FixedStatistics(running_mean, running_var, eps, weight, bias), out.dtype)
        empty = Tensor((0,), mean_out.dtype, va.const(0, mean_out.dtype))
        return y, empty, empty, running_mean, running_var
    acc = compute_dtype(out.dtype)
    dims, x = _reduced(x), x.rounded()
    x = (recomputed(x, acc) if ctx.gpu else None) or shared_as_read(ctx, x, acc)
    mu, m2 = _moments(ctx, x, acc)
    mu = ctx.realize(Tensor(mu.sizes, acc, va.cast(mu.value, acc)))
    n = as_number(count(x, dims), m2.value.dtype)
    rstd = ctx.realize(inverse_std(ctx, m2, count(x, dims), eps, acc))
    centred = s.sub(va.cast(x.value, acc), expand(mu, x.sizes).value)
    normalised = s.mul(centred, expand(rstd, x.sizes).value)
    scaled = _affine(normalised, _of_channel(weight, x, acc), _of_channel(bias, x, acc))
    mu1, m21, rstd1 = (drop_dims(t, dims, False) for t in (mu, m2, rstd))
    # running = (1 - momentum) * running + momentum * batch statistic; the variance is the unbiased one
    new_mean = s.add(s.mul(running_mean.computed(acc), 1 - momentum), s.mul(mu1.value, momentum))
    unbiased = va.cast(s.div(m21.value, s.binary("maximum", s.sub(n, 1.0), 0.0)), acc)
    new_var = s.add(s.mul(running_var.computed(acc), 1 - momentum), s.mul(unbiased, momentum))
    return (
        finish(ctx, x.sizes, out.dtype, scaled),
        finish(ctx, mu1.sizes, mean_out.dtype, mu1.value),
        finish(ctx, rstd1.sizes, mean_out.dtype, rstd1.value),
        finish(ctx, mu1.sizes, running_mean.dtype, new_mean),
        finish(ctx, mu1.sizes, running_var.dtype, new_var),
    )


INLINE = 24  # operations on a gradient that both passes of a backward may repeat instead of loading a stored gradient


def _read_twice(ctx: Ctx, t: Tensor, argument: int) -> Tensor:
    """Return an operand that two passes read: recomputed by each if that is cheap, as behind a ReLU, else stored."""
    limit = INLINE if ctx.gpu else 4
    if va.flops(t.value) <= limit and len(va.loads(t.value)) <= (8 if ctx.gpu else 2):
        return t
    return shared(ctx, t, t.dtype, ctx.traced(argument))


@lowers("native_batch_norm_backward.default")
def batch_norm_backward(
    ctx: Ctx,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_rstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias; None for those that `output_mask` leaves out.

    Method: S. Ioffe, C. Szegedy, "Batch Normalization", 2015, the gradients in section 3.
    """
    fakes = ctx.results
    acc = compute_dtype(x.dtype)
    dims = _reduced(x)
    # The forward's statistics are those of rounded numbers: where they differ little, `x - mean` is all rounding.
    grad, x = _read_twice(ctx, grad, 0), _read_twice(ctx, x.rounded(), 1)
    grad = expand(grad, x.sizes)  # a size may be written 2 * (s // 2) in one and s in the other
    if train:
        mean, rstd = _of_channel(save_mean, x, acc), _of_channel(save_rstd, x, acc)
    else:
        mean, var = _of_channel(running_mean, x, acc), _of_channel(running_var, x, acc)
        assert var is not None
        rstd = s.unary("rsqrt", s.add(var, eps))
    assert mean is not None
    assert rstd is not None
    dy, centred = va.cast(grad.value, acc), s.sub(va.cast(x.value, acc), mean)
    total, dot = _totals(ctx, x, [dy, s.mul(dy, centred)], acc)
    scale = _affine(rstd, _of_channel(weight, x, acc), None)
    if train:
        # (dy - mean of dy - (x - mean) * rstd^2 * mean of dy (x - mean)) * rstd * weight
        n = as_number(count(x, dims), acc)
        slope = s.mul(s.div(expand(dot, x.sizes).value, n), s.square(rstd))
        dy = s.sub(s.sub(dy, s.mul(centred, slope)), s.div(expand(total, x.sizes).value, n))
    results: list[Tensor | None] = [finish(ctx, x.sizes, x.dtype, s.mul(dy, scale)), None, None]
    total, dot = drop_dims(total, dims, False), drop_dims(dot, dims, False)
    at = {a: 0 for k, a in enumerate(axes(x.sizes)) if k != 1}
    per_channel = rstd.substitute(at | {axes(x.sizes)[1]: points(total.sizes)[0]})
    results[1] = finish(ctx, total.sizes, fakes[1].dtype, s.mul(dot.value, per_channel)) if output_mask[1] else None
    results[2] = finish(ctx, total.sizes, fakes[2].dtype, total.value) if output_mask[2] else None
    return (results[0] if output_mask[0] else None, results[1], results[2])
