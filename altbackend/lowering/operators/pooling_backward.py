"""Gradients of pooling.

The gradient of an average is a gather: each input element sums over the few windows that contain it. No element is
written twice, so all points run in parallel and fuse with other loops; sums are in the order of the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import lowers
from ..tensor import Tensor, points
from .indexing import position
from .pointwise import finish
from .pooling import (
    MAX_WINDOW,
    adaptive_end,
    adaptive_start,
    divisor,
    inside,
    pair,
    reduced_window,
    stored,
    sum_of,
    wide,
)
from .reduction import as_number
from .scatter import Updates, scatter

MOST_TESTED = 25  # windows of which each element tests whether it is their maximum


def _windows(reach: Sequence[Index], offset: Sequence[Index], newest: Sequence[Index]) -> list[Index]:
    """Return newest - reach + 1 + offset: the output `offset` steps after the first that may read the input."""
    return [ex.add(ex.sub(w, ex.sub(n, 1)), i) for w, n, i in zip(newest, reach, offset, strict=True)]


def _gather(
    ctx: Ctx,
    sizes: tuple[Index, ...],
    reach: Sequence[Index],
    newest: list[Index],
    term: Callable[[list[Index]], tuple[Value, Value]],
) -> Value:
    """Return the sum of `term` (condition, value) over the output points whose windows may contain the input point."""
    static = [n for n in reach if isinstance(n, int)]
    if len(static) == len(reach) and math.prod(static) <= MAX_WINDOW:
        offsets = [ex.unflatten(flat, tuple(static)) for flat in range(math.prod(static))]
        return sum_of([term(_windows(reach, o, newest)) for o in offsets])
    both = (*sizes, *reach)
    cond, v = term(_windows(reach, points(both)[len(sizes) :], newest))
    return reduced_window(ctx, sizes, both, cond, v)


def _max_pool_backward(rank: int) -> Callable[..., Tensor]:
    """Return a lowering that scatters over the outputs, each of which has the position of its one input.

    On a GPU, an element that few windows contain tests each of them: so nothing is filled and added to in memory.
    """

    def lower(
        ctx: Ctx,
        grad: Tensor,
        x: Tensor,
        kernel: int | Sequence[int],
        stride: Sequence[int] | None,
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        ceil_mode: bool,
        at: Tensor,
    ) -> Tensor:
        k, pad, spread = pair(kernel, rank), pair(padding, rank), pair(dilation, rank)
        step = pair(stride, rank, k)
        reach = [spread[d] * (k[d] - 1) // step[d] + 1 for d in range(rank)]
        if not ctx.gpu or math.prod(reach) > MOST_TESTED:
            return _to_positions(ctx, grad, x, at, rank)
        lead, p = len(x.sizes) - rank, points(x.sizes)
        newest = [ex.floordiv(ex.add(p[lead + d], pad[d]), step[d]) for d in range(rank)]
        own = va.index(ex.flatten(x.sizes[lead:], p[lead:]))
        grad = stored(ctx, grad)
        at = at if at.value.op == "cast" and at.value.args[0].op == "load" else stored(ctx, at, 7)  # narrow, if saved

        def term(o: list[Index]) -> tuple[Value, Value]:
            inner = [c for i, n in zip(o, grad.sizes[lead:], strict=True) for c in inside(i, n)]
            place = [*p[:lead], *o]
            hit = va.apply("eq", va.cast(at.at(place), torch.int64), own)
            g = wide(grad.at(place))
            return va.conjunction(*inner), s.where(hit, g, 0.0)

        return finish(ctx, x.sizes, grad.dtype, _gather(ctx, x.sizes, reach, newest, term))

    return lower


def _adaptive_max_pool_backward(rank: int) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, grad: Tensor, x: Tensor, at: Tensor) -> Tensor:
        return _to_positions(ctx, grad, x, at, rank)

    return lower


def _to_positions(ctx: Ctx, grad: Tensor, x: Tensor, at: Tensor, rank: int) -> Tensor:
    """Return zeros of the shape of `x` with `grad` added at the linear positions `at` in each plane."""
    if 0 in grad.sizes:
        return Tensor(x.sizes, grad.dtype, va.const(0, grad.dtype))
    lead, p = len(x.sizes) - rank, points(grad.sizes)
    plane = (*x.sizes[:lead], ex.prod(x.sizes[lead:]))
    zero = Tensor(plane, grad.dtype, va.const(0, grad.dtype))
    where = [*p[:lead], position(ctx, at, p, plane[-1])]
    strides = _flat_strides(ctx, x, lead)
    scattered = scatter(ctx, zero, "add", Updates(grad.sizes, where, grad.computed()), strides=strides)
    q = points(x.sizes)
    return Tensor(x.sizes, scattered.dtype, scattered.at([*q[:lead], ex.flatten(x.sizes[lead:], q[lead:])]))


def _flat_strides(ctx: Ctx, x: Tensor, lead: int) -> tuple[Index, ...] | None:
    """Return the strides of the result with the pooled dimensions merged, or None if they are not contiguous."""
    strides = ctx.strides_like(x.sizes, ctx.result)
    for d in range(lead, len(strides) - 1):
        if strides[d] != ex.mul(strides[d + 1], x.sizes[d + 1]):
            return None
    return (*strides[:lead], strides[-1])


lowers("max_pool2d_with_indices_backward.default")(_max_pool_backward(2))
lowers("max_pool3d_with_indices_backward.default")(_max_pool_backward(3))
lowers("adaptive_max_pool2d_backward.default")(_adaptive_max_pool_backward(2))
lowers("adaptive_max_pool3d_backward.default")(_adaptive_max_pool_backward(3))


def _avg_pool_backward(rank: int) -> Callable[..., Tensor]:
    def lower(
        ctx: Ctx,
        grad: Tensor,
        x: Tensor,
        kernel: int | Sequence[int],
        stride: Sequence[int] | None,
        padding: int | Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Tensor:
        k, pad = pair(kernel, rank), pair(padding, rank)
        step = pair(stride, rank, k)
        reach = [(k[d] - 1) // step[d] + 1 for d in range(rank)]
        grad = stored(ctx, grad)
        lead, p = len(x.sizes) - rank, points(x.sizes)
        newest = [ex.floordiv(ex.add(p[lead + d], pad[d]), step[d]) for d in range(rank)]
        dims = x.sizes[lead:]

        def term(o: list[Index]) -> tuple[Value, Value]:
            conds = [c for i, n in zip(o, grad.sizes[lead:], strict=True) for c in inside(i, n)]
            for d in range(rank):  # the window contains this element
                end = ex.add(ex.mul(o[d], step[d]), k[d] - pad[d])
                conds.append(va.compare_index("lt", p[lead + d], end))
            n = divisor_override or divisor(dims, o, k, step, pad, count_include_pad)
            g = wide(grad.at([*p[:lead], *o]))
            return va.conjunction(*conds), s.div(g, as_number(n, g.dtype))

        return finish(ctx, x.sizes, grad.dtype, _gather(ctx, x.sizes, reach, newest, term))

    return lower


lowers("avg_pool2d_backward.default")(_avg_pool_backward(2))
lowers("avg_pool3d_backward.default")(_avg_pool_backward(3))


def _adaptive_avg_pool_backward(rank: int) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, grad: Tensor, x: Tensor) -> Tensor:
        n, m = x.sizes[-rank:], grad.sizes[-rank:]
        lead, p = len(x.sizes) - rank, points(x.sizes)
        reach = [_most_windows(a, b) for a, b in zip(n, m, strict=True)]
        # the last window with start = floor(o n / m) <= i is o = ceil((i + 1) m / n) - 1
        newest = [ex.floordiv(ex.sub(ex.mul(ex.add(p[lead + d], 1), m[d]), 1), n[d]) for d in range(rank)]
        share = _shares(ctx, grad, n)

        def term(o: list[Index]) -> tuple[Value, Value]:
            conds = []
            for d in range(rank):
                end = adaptive_end(o[d], n[d], m[d])
                conds += [va.compare_index("ge", o[d], 0), va.compare_index("lt", p[lead + d], end)]
            return va.conjunction(*conds), share.at([*p[:lead], *o])

        return finish(ctx, x.sizes, grad.dtype, _gather(ctx, x.sizes, reach, newest, term))

    return lower


def _shares(ctx: Ctx, grad: Tensor, n: Sequence[Index]) -> Tensor:
    """Return the gradient of each element of a window, grad / elements of the window, for windows over `n` inputs.

    Shares of fewer windows than inputs are stored. Otherwise each input divides the gradients of all its windows, one
    dimension after the other: 24 divisions for eight windows of volumes.
    """
    m = grad.sizes[-len(n) :]
    few = ex.bounds(ex.sub(ex.prod(n), ex.mul(2, ex.prod(m))))[0] >= 0
    grad = grad.rounded() if few else stored(ctx, grad)
    share = wide(grad.value)
    for o, a, b in zip(points(grad.sizes)[-len(n) :], n, m, strict=True):
        elements = ex.sub(adaptive_end(o, a, b), adaptive_start(o, a, b))
        share = s.div(share, as_number(elements, share.dtype))
    shares = Tensor(grad.sizes, share.dtype, share)
    return ctx.realize(shares) if few else shares


def _most_windows(n: Index, m: Index) -> Index:
    """Return the most of `m` adaptive windows over `n` inputs that contain one input.

    For symbolic sizes the number may be one too large.
    """
    if not (isinstance(n, int) and isinstance(m, int)):
        return ex.add(ex.floordiv(ex.add(m, ex.sub(n, 1)), n), 1)
    spans = [(o * n // m, -(-(o + 1) * n // m)) for o in range(m)]
    return max(sum(b <= i < e for b, e in spans) for i in range(n))


lowers("_adaptive_avg_pool2d_backward.default")(_adaptive_avg_pool_backward(2))
lowers("_adaptive_avg_pool3d_backward.default")(_adaptive_avg_pool_backward(3))
