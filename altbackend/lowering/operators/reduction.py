"""Reductions, normalisations and scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Reduction, Scan
from ...ir.ops import compute_dtype
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx, memory_order
from ..registry import FallBack, lowers
from ..tensor import Tensor, axes, expand, full, of_buffer, points
from .one_hot import total
from .pointwise import finish


def norm_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dimension numbers as non-negative ints; None or () means all."""
    if dims is None or rank == 0 or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    return tuple(sorted({d % rank for d in dims}))


def reduce(ctx: Ctx, op: str, x: Tensor, dims: tuple[int, ...], acc: torch.dtype, out: torch.dtype) -> Tensor:
    """Reduce with keepdim: the result has size 1 in `dims`. `acc`: dtype of accumulation, `out`: of the buffer."""
    kept_sizes = tuple(1 if k in dims else n for k, n in enumerate(x.sizes))
    if all(k >= len(x.sizes) or x.sizes[k] == 1 for k in dims):  # nothing to combine: every point is its own result
        value = va.cast(x.value, acc)
        return Tensor(kept_sizes, out, va.cast(value, out))
    if acc == torch.bool:
        op = {"max": "any", "min": "all", "sum": "any", "prod": "all"}.get(op, op)
    value = va.cast(x.value, acc)
    varying = [k for k in dims if x.sizes[k] != 1]
    if op == "sum" and len(varying) == 1 and (single := total(value, axes(x.sizes)[varying[0]])) is not None:
        return Tensor(kept_sizes, out, va.cast(single, out))
    order = _loop_order(x, value)
    fresh = {k: ex.var(f"d{j}", x.sizes[k]) for j, k in enumerate(order)}
    env = {a: ex.ix(fresh[k]) for k, a in enumerate(axes(x.sizes))}
    value = value.substitute({a: e for a, e in env.items() if e is not ex.ix(a)})
    kept = tuple(fresh[k] for k in order if k not in dims and x.sizes[k] != 1)
    reduced = tuple(fresh[k] for k in order if k in dims and x.sizes[k] != 1)
    buffer = ctx.new_buffer(out, kept_sizes, ctx.strides_like(kept_sizes, None))
    index = ex.add(
        0,
        *(
            ex.mul(st, env[a])
            for k, (st, a) in enumerate(zip(buffer.strides, axes(x.sizes), strict=True))
            if k not in dims
        ),
    )
    ctx.emit(Reduction(buffer.name, kept, reduced, index, op, value, ctx.origins()))
    return of_buffer(buffer)


_FAR = 1 << 40  # elements


def _loop_order(x: Tensor, value: Value) -> list[int]:
    """Dimensions from slowest to fastest in the largest operand's memory."""
    best: list[Index] | None = None
    best_terms = -1
    for _, index in va.loads(value):
        # a dimension that enters through data or a division jumps: slower than any step
        steps = [_FAR if (c := ex.coefficient(index, a)) is None else c for a in axes(x.sizes)]
        used = sum(c != 0 for c in steps)
        if used > best_terms:
            best, best_terms = steps, used
    if best is None:
        return list(range(len(x.sizes)))
    return memory_order([c if c != 0 else 1 << 50 for c in best], x.sizes)


def drop_dims(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    if keepdim:
        return x
    sizes = tuple(n for k, n in enumerate(x.sizes) if k not in dims)
    it = iter(points(sizes))
    return Tensor(sizes, x.dtype, x.at([0 if k in dims else next(it) for k in range(len(x.sizes))]))


def count(x: Tensor, dims: tuple[int, ...]) -> Index:
    return ex.prod(x.sizes[k] for k in dims if k < len(x.sizes))  # a tensor without dimensions has a dimension 0


def as_number(e: Index, dtype: torch.dtype) -> Value:
    return va.cast(va.index(e), dtype)


def materialised(ctx: Ctx, x: Tensor) -> Tensor:
    """`x` as something cheap to read several times."""
    return x if x.value.op == "load" else ctx.realize(x)


def shared(ctx: Ctx, x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` for several readers: storage of its own unless recomputing costs no more than a load and a cast."""
    if va.flops(x.value) == 0 and len(va.loads(x.value)) <= 1:
        return x
    return ctx.realize(Tensor(x.sizes, dtype, va.cast(va.cast(x.value, x.dtype), dtype)))


def _result(ctx: Ctx, k: int | None = None) -> Any:
    val = ctx.graph_node.meta["val"]  # type: ignore[union-attr]
    return val if k is None else val[k]


@lowers("sum.dim_IntList", "sum.default")
def sum_(ctx: Ctx, x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    out = _result(ctx)
    where = norm_dims(dims, len(x.sizes))
    total = reduce(ctx, "sum", x, where, compute_dtype(out.dtype), compute_dtype(out.dtype))
    return finish(ctx, *_shape(total, where, keepdim), out.dtype, drop_dims(total, where, keepdim).value)


def _shape(t: Tensor, dims: tuple[int, ...], keepdim: bool) -> tuple[tuple[Index, ...]]:
    return (drop_dims(t, dims, keepdim).sizes,)


@lowers("mean.dim", "mean.default")
def mean(ctx: Ctx, x: Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    out = _result(ctx)
    where = norm_dims(dims, len(x.sizes))
    acc = compute_dtype(out.dtype)
    total = drop_dims(reduce(ctx, "sum", x, where, acc, acc), where, keepdim)
    return finish(ctx, total.sizes, out.dtype, s.div(total.value, as_number(count(x, where), acc)))


@lowers("prod.default", "prod.dim_int")
def prod(ctx: Ctx, x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    out = _result(ctx)
    where = norm_dims(dim, len(x.sizes))
    acc = compute_dtype(out.dtype)
    got = drop_dims(reduce(ctx, "prod", x, where, acc, acc), where, keepdim)
    return finish(ctx, got.sizes, out.dtype, got.value)


def _extremum(op: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
        where = norm_dims(dims, len(x.sizes))
        _require_elements(ctx, x, where, bool(dims))
        acc = compute_dtype(x.dtype)
        got = drop_dims(reduce(ctx, op, x, where, acc, acc), where, keepdim)
        return finish(ctx, got.sizes, x.dtype, got.value)

    return lower


def _require_elements(ctx: Ctx, x: Tensor, dims: Sequence[int], named: bool, as_index_error: bool = False) -> None:
    """The extremum of nothing is an error: RuntimeError or IndexError over all of `x`, IndexError over dims `named`.

    Raises NotHere where it is certain that there is nothing: the library says so.
    """
    wanted = [x.sizes[k] for k in dims] if named else list(x.sizes)
    if 0 in wanted:
        raise FallBack("the extremum of nothing")
    open_ = [ex.show(n) for n in wanted if ex.bounds(n)[0] < 1]
    if not open_:
        return
    text = " and ".join(f"{n} > 0" for n in open_)
    message = f"Expected reduction dims {tuple(dims)} to have non-zero size." if named else _NO_ELEMENTS
    ctx.require(text, message, named or as_index_error)


_NO_ELEMENTS = "Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim."


lowers("amax.default", "max.default")(_extremum("max"))
lowers("amin.default", "min.default")(_extremum("min"))


def _logical(op: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
        where = norm_dims(dims, len(x.sizes))
        truth = x if x.dtype == torch.bool else Tensor(x.sizes, torch.bool, s.binary("ne", x.computed(), 0))
        got = drop_dims(reduce(ctx, op, truth, where, torch.bool, torch.bool), where, keepdim)
        return Tensor(got.sizes, _result(ctx).dtype, va.cast(got.value, _result(ctx).dtype))

    return lower


lowers("any.default", "any.dim", "any.dims")(_logical("any"))
lowers("all.default", "all.dim", "all.dims")(_logical("all"))


def extremum_position(ctx: Ctx, op: str, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(extremum, row-major position of its first occurrence in `dims`), keepdim; a NaN counts as the extremum.

    The position is a second reduction, the least position that holds the extremum: both run as vectors, in any layout.
    """
    dims = tuple(k for k in dims if k < len(x.sizes))  # torch lets a 0-d tensor have a dimension 0
    acc = compute_dtype(x.dtype)
    best = reduce(ctx, op, x, dims, acc, acc)
    if not x.sizes:
        return best, full((), 0, torch.int64)
    n = count(x, dims)
    small = torch.int32 if ex.bounds(n)[1] < 2**31 else torch.int64
    v, top = va.cast(x.value, acc), expand(best, x.sizes).value
    hit = s.binary("eq", v, top)
    if acc.is_floating_point:
        hit = va.apply("logical_or", hit, s.unary("isnan", v))
    place = va.cast(va.index(ex.flatten([x.sizes[k] for k in dims], [points(x.sizes)[k] for k in dims])), small)
    at = s.where(hit, place, torch.iinfo(small).max)
    return best, reduce(ctx, "min", Tensor(x.sizes, small, at), dims, small, small)


def _position(op: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        where = norm_dims(dim, len(x.sizes))
        _require_elements(ctx, x, where, dim is not None, as_index_error=True)
        _, at = extremum_position(ctx, op, shared(ctx, x, x.dtype), where)
        at = drop_dims(at, where, keepdim)
        return Tensor(at.sizes, torch.int64, va.cast(at.value, torch.int64))

    return lower


lowers("argmax.default")(_position("max"))
lowers("argmin.default")(_position("min"))


def _with_position(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(ctx: Ctx, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        where = norm_dims(dim, len(x.sizes))
        _require_elements(ctx, x, where, True)
        best, at = (drop_dims(t, where, keepdim) for t in extremum_position(ctx, op, shared(ctx, x, x.dtype), where))
        return finish(ctx, best.sizes, x.dtype, best.value), Tensor(
            at.sizes, torch.int64, va.cast(at.value, torch.int64)
        )

    return lower


lowers("max.dim")(_with_position("max"))
lowers("min.dim")(_with_position("min"))


def moments(ctx: Ctx, x: Tensor, dims: tuple[int, ...], acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """(mean, sum of squared deviations) with keepdim, two passes: exact where E[x^2] - mean^2 cancels.

    The mean is a sum in float64 on a CPU, rounded to `acc`.
    """
    wide = acc if ctx.gpu else torch.float64
    total = reduce(ctx, "sum", x, dims, wide, wide)
    mu = Tensor(total.sizes, acc, va.cast(s.div(total.value, as_number(count(x, dims), wide)), acc))
    centred = Tensor(x.sizes, acc, s.square(deviation(x, mu, acc)))
    return mu, reduce(ctx, "sum", centred, dims, acc, acc)


def deviation(x: Tensor, mu: Tensor, acc: torch.dtype) -> Value:
    return s.sub(va.cast(x.value, acc), expand(mu, x.sizes).value)


def statistics(ctx: Ctx, x: Tensor, dims: tuple[int, ...], acc: torch.dtype) -> tuple[Tensor, Tensor]:
    """`moments` that are results themselves, not what a normalisation rounds anyway.

    On a CPU in float64, as eager takes them. On a GPU what rounded the mean is taken off: with d = x - mean,
    m2 = sum d^2 - (sum d)^2 / n. Method: T. Chan, G. Golub, R. LeVeque, "Algorithms for Computing the Sample
    Variance", 1983, the corrected two-pass algorithm.
    """
    if not ctx.gpu:
        return moments(ctx, x, dims, torch.float64)
    mu, m2 = moments(ctx, x, dims, acc)
    left = reduce(ctx, "sum", Tensor(x.sizes, acc, deviation(x, mu, acc)), dims, acc, acc)
    off = s.div(left.value, as_number(count(x, dims), acc))
    m2_left = s.binary("maximum", s.sub(m2.value, s.mul(left.value, off)), 0.0)
    return Tensor(mu.sizes, acc, s.add(mu.value, off)), Tensor(m2.sizes, acc, m2_left)


def centre(mu: Tensor, m2: Tensor, acc: torch.dtype) -> Tensor:
    """A mean as a result: eager's recurrences give NaN where deviations from it are none."""
    return Tensor(mu.sizes, acc, va.cast(s.where(s.unary("isnan", m2.value), m2.value, mu.value), acc))


def _variance(
    ctx: Ctx, x: Tensor, dims: Any, correction: Any, acc: torch.dtype
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    where = norm_dims(dims, len(x.sizes))
    x = shared(ctx, x, acc)
    mu, m2 = statistics(ctx, x, where, acc)
    n = as_number(count(x, where), m2.dtype)
    free = n if not correction else s.binary("maximum", s.sub(n, float(correction)), 0.0)
    return Tensor(m2.sizes, acc, va.cast(s.div(m2.value, free), acc)), centre(mu, m2, acc), where


@lowers("var.correction")
def var(ctx: Ctx, x: Tensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    acc = compute_dtype(x.dtype)
    v, _, where = _variance(ctx, x, dims, 1 if correction is None else correction, acc)
    v = drop_dims(v, where, keepdim)
    return finish(ctx, v.sizes, x.dtype, v.value)


@lowers("var_mean.correction")
def var_mean(
    ctx: Ctx, x: Tensor, dims: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    acc = compute_dtype(x.dtype)
    v, mu, where = _variance(ctx, x, dims, 1 if correction is None else correction, acc)
    v, mu = drop_dims(v, where, keepdim), drop_dims(mu, where, keepdim)
    return finish(ctx, v.sizes, x.dtype, v.value), finish(ctx, mu.sizes, x.dtype, mu.value)


@lowers("_softmax.default")
def softmax(ctx: Ctx, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    # exp(x - max) / sum(exp(x - max))
    out = _result(ctx)
    acc = compute_dtype(out.dtype)
    where = norm_dims(dim, len(x.sizes))
    x = shared(ctx, x, acc)
    top = reduce(ctx, "max", x, where, acc, acc)
    e = Tensor(x.sizes, acc, s.unary("exp", s.sub(va.cast(x.value, acc), expand(top, x.sizes).value)))
    e = ctx.realize(e, out)
    total = reduce(ctx, "sum", e, where, acc, acc)
    return finish(ctx, x.sizes, out.dtype, s.div(e.value, expand(total, x.sizes).value))


@lowers("_log_softmax.default")
def log_softmax(ctx: Ctx, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    # x - max - log sum exp(x - max)
    out = _result(ctx)
    acc = compute_dtype(out.dtype)
    where = norm_dims(dim, len(x.sizes))
    x = shared(ctx, x, acc)
    top = reduce(ctx, "max", x, where, acc, acc)
    shifted = s.sub(va.cast(x.value, acc), expand(top, x.sizes).value)
    total = reduce(ctx, "sum", Tensor(x.sizes, acc, s.unary("exp", shifted)), where, acc, acc)
    log = Tensor(total.sizes, acc, s.unary("log", total.value))
    return finish(ctx, x.sizes, out.dtype, s.sub(shifted, expand(log, x.sizes).value))


@lowers("native_layer_norm.default")
def native_layer_norm(
    ctx: Ctx, x: Tensor, shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, ...]:
    out, mean_out, _ = _result(ctx)
    acc = compute_dtype(mean_out.dtype)
    rank = len(x.sizes)
    where = tuple(range(rank - len(shape), rank))
    x = shared(ctx, x, acc)
    mu, m2 = moments(ctx, x, where, acc)
    rstd = ctx.realize(inverse_std(ctx, m2, count(x, where), eps, acc))
    y = s.mul(s.sub(va.cast(x.value, acc), expand(mu, x.sizes).value), expand(rstd, x.sizes).value)
    if weight is not None:
        y = s.mul(y, expand(weight, x.sizes).computed(acc))
    if bias is not None:
        y = s.add(y, expand(bias, x.sizes).computed(acc))
    stats = [finish(ctx, t.sizes, mean_out.dtype, t.value) for t in (centre(mu, m2, acc), rstd)]
    return finish(ctx, x.sizes, out.dtype, y), *stats


def inverse_std(ctx: Ctx, m2: Tensor, n: Index, eps: float, acc: torch.dtype) -> Tensor:
    """1 / sqrt(m2 / n + eps), rounded to `acc` once on a CPU."""
    wide = m2.value.dtype if ctx.gpu else torch.float64
    variance = s.div(va.cast(m2.value, wide), as_number(n, wide))
    return Tensor(m2.sizes, acc, va.cast(s.unary("rsqrt", s.add(variance, eps)), acc))


@lowers("native_group_norm.default")
def native_group_norm(
    ctx: Ctx, x: Tensor, weight: Any, bias: Any, n: Any, c: Any, hw: Any, groups: int, eps: float
) -> tuple[Tensor, ...]:
    out, mean_out, _ = _result(ctx)
    acc = compute_dtype(mean_out.dtype)
    batch, channels = x.sizes[0], x.sizes[1]
    per_group = ex.floordiv(channels, groups)
    split = (batch, groups, per_group, *x.sizes[2:])
    x = shared(ctx, x, acc)
    p = points(split)
    g = Tensor(split, acc, va.cast(x.at([p[0], ex.add(ex.mul(p[1], per_group), p[2]), *p[3:]]), acc))
    where = tuple(range(2, len(split)))
    mu, m2 = moments(ctx, g, where, acc)
    rstd = ctx.realize(inverse_std(ctx, m2, count(g, where), eps, acc))
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


def running(ctx: Ctx, op: str, x: Tensor, dim: int, acc: torch.dtype) -> Tensor:
    """The inclusive scan of `x` along `dim`, in a buffer of dtype `acc`."""
    value = va.cast(va.cast(x.value, x.dtype), acc)
    if not x.sizes or x.sizes[dim] == 1:
        return Tensor(x.sizes, acc, value)
    buffer = ctx.new_buffer(acc, x.sizes, ctx.strides_like(x.sizes, None))
    ax = axes(x.sizes)
    index = ex.add(0, *(ex.mul(st, ex.ix(a)) for st, a in zip(buffer.strides, ax, strict=True)))
    kept = tuple(a for k, a in enumerate(ax) if k != dim and x.sizes[k] != 1)
    ctx.emit(Scan(buffer.name, kept, (ax[dim],), index, op, value, ctx.origins()))
    return of_buffer(buffer)


def _scan(op: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
        out = _result(ctx)
        # the input is converted to the result's dtype before it is scanned
        x = Tensor(x.sizes, out.dtype, va.cast(va.cast(x.value, x.dtype), out.dtype)) if x.dtype != out.dtype else x
        got = running(ctx, op, x, dim % max(len(x.sizes), 1), compute_dtype(out.dtype))
        return finish(ctx, x.sizes, out.dtype, got.value)

    return lower


lowers("cumsum.default")(_scan("sum"))
lowers("cumprod.default")(_scan("prod"))
lowers("logcumsumexp.default")(_scan("logaddexp"))


def _running_extremum(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(ctx: Ctx, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        dim %= max(len(x.sizes), 1)
        x = shared(ctx, x, x.dtype)
        best = running(ctx, op, x, dim, x.dtype if x.dtype == torch.bool else compute_dtype(x.dtype))
        # each element that equals the extremum so far, or is NaN, is its newest position
        v = x.computed()
        hit = s.binary("eq", v, best.value)
        if v.dtype.is_floating_point:
            hit = va.apply("logical_or", hit, s.unary("isnan", v))
        here = va.index(points(x.sizes)[dim] if x.sizes else 0)
        at = running(ctx, "max", Tensor(x.sizes, torch.int64, s.where(hit, here, 0)), dim, torch.int64)
        return finish(ctx, x.sizes, x.dtype, best.value), at

    return lower


lowers("cummax.default")(_running_extremum("max"))
lowers("cummin.default")(_running_extremum("min"))


@lowers("logsumexp.default")
def logsumexp(ctx: Ctx, x: Tensor, dims: Any, keepdim: bool = False) -> Tensor:
    # max + log sum exp(x - max), or max itself where it is infinite
    out = _result(ctx)
    if not x.dtype.is_floating_point:
        raise FallBack("logsumexp of integers")
    acc = compute_dtype(out.dtype)
    where = norm_dims(dims, len(x.sizes))
    x = shared(ctx, x, acc)
    top = reduce(ctx, "max", x, where, acc, acc)
    e = Tensor(x.sizes, acc, s.unary("exp", s.sub(va.cast(x.value, acc), expand(top, x.sizes).value)))
    total = reduce(ctx, "sum", e, where, acc, acc)
    infinite = s.binary("eq", s.unary("abs", top.value), math.inf)
    value = s.where(infinite, top.value, s.add(s.unary("log", total.value), top.value))
    got = drop_dims(Tensor(total.sizes, acc, value), where, keepdim)
    return finish(ctx, got.sizes, out.dtype, got.value)
