"""Pooling: a small window is unrolled into one scalar tree per output point, a large one is a reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

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
from .reduction import as_number, count, drop_dims, reduce

MAX_WINDOW = 36

# One element of the window of an output point: its input position, and the condition that this is inside the input.
Element = tuple[list[Index], Value]
Span = tuple[Index, Index]  # first input and the one after the last


def pair(v: int | Sequence[int] | None, rank: int, default: Sequence[int] | None = None) -> list[int]:
    """Return a pooling argument as one int per pooled dimension."""
    if v is None or (isinstance(v, (list, tuple)) and not v):
        v = default
    if isinstance(v, int):
        return [v] * rank
    sizes = list(v or ())
    return sizes * (rank // len(sizes)) if len(sizes) < rank else sizes


def window(
    x: Tensor, sizes: tuple[Index, ...], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[Element]:
    """Return every element of the window of an output point, row-major: (input position, is inside the input)."""
    lead = len(sizes) - len(kernel)
    p = points(sizes)
    out = []
    for flat in range(math.prod(kernel)):
        at = ex.numbers(ex.unflatten(flat, tuple(kernel)))
        where = [ex.add(ex.mul(p[lead + d], stride[d]), at[d] * dilation[d] - padding[d]) for d in range(len(kernel))]
        conds = [va.conjunction(*inside(i, n)) for i, n in zip(where, x.sizes[lead:], strict=True)]
        out.append(([*p[:lead], *where], va.conjunction(*conds)))
    return out


def inside(i: Index, n: Index) -> tuple[Value, Value]:
    """Return the conditions 0 <= i and i < n."""
    return va.compare_index("ge", i, 0), va.compare_index("lt", i, n)


def wide(v: Value) -> Value:
    """Return a loaded element in its compute dtype."""
    return va.cast(v, compute_dtype(v.dtype))


def stored(ctx: Ctx, x: Tensor, argument: int = 0) -> Tensor:
    """Return `x` in memory, because several windows read each element. `argument`: its position among the arguments."""
    return x if x.value.op == "load" else ctx.realize(x, ctx.traced(argument))


def _max_pool(rank: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(
        ctx: Ctx,
        x: Tensor,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
    ) -> tuple[Tensor, Tensor]:
        out, _ = ctx.results
        k = pair(kernel, rank)
        if math.prod(k) > MAX_WINDOW or not x.dtype.is_floating_point:
            raise FallBack(f"a window of {math.prod(k)} elements")
        x = stored(ctx, x)
        sizes = ctx.shape(out.shape)
        elements = window(x, sizes, k, pair(stride, rank, k), pair(padding, rank), pair(dilation, rank))
        best, at = _first_greatest(x, elements, rank)
        return finish(ctx, sizes, x.dtype, best), Tensor(sizes, torch.int64, at)

    return lower


def _first_greatest(x: Tensor, elements: list[Element], rank: int) -> tuple[Value, Value]:
    """Return (maximum of a window, linear position of its first occurrence); a NaN counts as the maximum."""
    best: Value | None = None
    at: Value | None = None
    for where, valid in elements:
        v = x.at(where)
        v = wide(va.masked(valid, v, va.const(-math.inf, v.dtype)))
        linear = va.index(ex.flatten(x.sizes[-rank:], where[-rank:]))
        if best is None or at is None:
            # the position of a window of padding and -inf only is its first element inside the input
            best, at = v, linear
            unset: Value = va.apply("logical_not", valid)
            continue
        # a later element wins when greater or NaN; an earlier NaN stays
        wins = va.apply("logical_or", s.binary("gt", v, best), s.unary("isnan", v))
        first = va.conjunction(unset, valid)
        at = va.where(first if first.op == "const" and first.attr else va.apply("logical_or", wins, first), linear, at)
        best = va.apply("maximum", best, v)
        unset = va.conjunction(unset, va.apply("logical_not", valid))
    assert best is not None
    assert at is not None
    return best, at


lowers("max_pool2d_with_indices.default")(_max_pool(2))
lowers("max_pool3d_with_indices.default")(_max_pool(3))


def divisor(
    sizes: Sequence[Index], o: Sequence[Index], k: list[int], stride: list[int], pad: list[int], include_pad: bool
) -> Index:
    """Return the divisor of the average at output point `o`. `sizes`: the pooled input dimensions.

    With `include_pad` the elements of the padding count, but elements beyond the padding never do.
    """
    lengths = []
    for d, n in enumerate(sizes):
        start = ex.sub(ex.mul(o[d], stride[d]), pad[d])
        end = ex.add(start, k[d])
        if include_pad:
            lengths.append(ex.sub(ex.minimum(end, ex.add(n, pad[d])), start))
        else:
            lengths.append(ex.sub(ex.minimum(end, n), ex.maximum(start, 0)))
    return ex.prod(lengths)


def _avg_pool(rank: int) -> Callable[..., Tensor]:
    def lower(
        ctx: Ctx,
        x: Tensor,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if not x.dtype.is_floating_point:
            raise FallBack("averages of integers")
        sizes = ctx.result_sizes
        k, pad = pair(kernel, rank), pair(padding, rank)
        step = pair(stride, rank, k)
        if math.prod(k) > MAX_WINDOW and any(pad) and not ctx.gpu:
            raise FallBack("averages of large padded windows")  # the library takes half the time
        total = _window_sum(ctx, stored(ctx, x), sizes, k, step, pad)
        n = divisor_override or divisor(x.sizes[-rank:], points(sizes)[-rank:], k, step, pad, count_include_pad)
        return finish(ctx, sizes, x.dtype, s.div(total, as_number(n, total.dtype)))

    return lower


def _window_sum(
    ctx: Ctx, x: Tensor, sizes: tuple[Index, ...], k: list[int], stride: list[int], pad: list[int]
) -> Value:
    if math.prod(k) <= MAX_WINDOW:
        elements = window(x, sizes, k, stride, pad, [1] * len(k))
        return sum_of([(va.const(True, torch.bool) if c is None else c, wide(x.at(w))) for w, c in elements])
    lead = len(sizes) - len(k)
    both = (*sizes, *k)
    p = points(both)
    where = [ex.add(ex.mul(p[lead + d], stride[d]), p[len(sizes) + d], -pad[d]) for d in range(len(k))]
    conds = [c for i, n in zip(where, x.sizes[lead:], strict=True) for c in inside(i, n)]
    return reduced_window(ctx, sizes, both, va.conjunction(*conds), x.at([*p[:lead], *where]))


def sum_of(terms: Sequence[tuple[Value, Value]]) -> Value:
    """Return the sum, from left to right, of the values whose condition holds."""
    total: Value | None = None
    for cond, v in terms:
        v = va.masked(cond, v, va.const(0, v.dtype))
        total = v if total is None else s.add(total, v)
    assert total is not None
    return total


def reduced_window(ctx: Ctx, sizes: tuple[Index, ...], both: tuple[Index, ...], cond: Value, v: Value) -> Value:
    """Return the sum of `v`, where `cond` holds, over the dimensions of `both` that follow those of `sizes`."""
    v = va.masked(cond, wide(v), va.const(0, compute_dtype(v.dtype)))
    dims = tuple(range(len(sizes), len(both)))
    return drop_dims(reduce(ctx, "sum", Tensor(both, v.dtype, v), dims, v.dtype, v.dtype), dims, False).value


lowers("avg_pool2d.default")(_avg_pool(2))
lowers("avg_pool3d.default")(_avg_pool(3))


def adaptive_start(o: Index, n: Index, m: Index) -> Index:
    """Return the first input of output `o` if `n` inputs are averaged to `m` outputs."""
    return ex.floordiv(ex.mul(o, n), m)


def adaptive_end(o: Index, n: Index, m: Index) -> Index:
    """Return the position after the last input of output `o` if `n` inputs are averaged to `m` outputs."""
    return ex.floordiv(ex.add(ex.mul(ex.add(o, 1), n), ex.sub(m, 1)), m)


def _adaptive_avg_pool(rank: int) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, size: Sequence[object]) -> Tensor:
        n, m = x.sizes[-rank:], ctx.shape(size)
        if all(k == 1 for k in m):
            return _global_mean(ctx, x, rank)
        if not x.dtype.is_floating_point:
            raise FallBack("averages of integers")
        sizes = ctx.result_sizes
        x = stored(ctx, x)
        longest = [_longest(a, b) for a, b in zip(n, m, strict=True)]
        spans = _spans(sizes, n, m)
        total = _adaptive_sum(ctx, x, sizes, spans, longest)
        for start, end in spans:
            total = s.div(total, as_number(ex.sub(end, start), total.dtype))
        return finish(ctx, sizes, x.dtype, total)

    return lower


def _adaptive_max_pool(rank: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(ctx: Ctx, x: Tensor, size: Sequence[object]) -> tuple[Tensor, Tensor]:
        n, m = x.sizes[-rank:], ctx.shape(size)
        longest = [k for a, b in zip(n, m, strict=True) if isinstance(k := _longest(a, b), int)]
        if len(longest) < rank or math.prod(longest) > MAX_WINDOW or not x.dtype.is_floating_point:
            raise FallBack("a window of many elements, or of symbolic size")
        sizes = ctx.shape(ctx.results[0].shape)
        x = stored(ctx, x)
        best, at = _first_greatest(x, _adaptive_window(sizes, _spans(sizes, n, m), longest), rank)
        return finish(ctx, sizes, x.dtype, best), Tensor(sizes, torch.int64, at)

    return lower


lowers("adaptive_max_pool2d.default")(_adaptive_max_pool(2))
lowers("adaptive_max_pool3d.default")(_adaptive_max_pool(3))


def _spans(sizes: tuple[Index, ...], n: Sequence[Index], m: Sequence[Index]) -> list[Span]:
    o = points(sizes)[len(sizes) - len(n) :]
    return [(adaptive_start(i, a, b), adaptive_end(i, a, b)) for i, a, b in zip(o, n, m, strict=True)]


def _longest(n: Index, m: Index) -> Index:
    """Return the number of elements of the longest window; for symbolic sizes it may be one too many."""
    if not (isinstance(n, int) and isinstance(m, int)):
        return ex.add(ex.floordiv(ex.add(n, ex.sub(m, 1)), m), 1)
    return max(-(-(o + 1) * n // m) - o * n // m for o in range(m))


def _adaptive_window(sizes: tuple[Index, ...], spans: list[Span], longest: list[int]) -> list[Element]:
    """Return every element of the longest window of an output point, row-major: (input position, is in the span)."""
    lead = points(sizes)[: len(sizes) - len(spans)]
    out = []
    for flat in range(math.prod(longest)):
        where = [ex.add(b, i) for (b, _), i in zip(spans, ex.unflatten(flat, tuple(longest)), strict=True)]
        conds = [va.compare_index("lt", i, end) for i, (_, end) in zip(where, spans, strict=True)]
        out.append(([*lead, *where], va.conjunction(*conds)))
    return out


def _adaptive_sum(ctx: Ctx, x: Tensor, sizes: tuple[Index, ...], spans: list[Span], longest: Sequence[Index]) -> Value:
    lead = points(sizes)[: len(sizes) - len(spans)]
    static = [n for n in longest if isinstance(n, int)]
    if len(static) == len(longest) and math.prod(static) <= MAX_WINDOW:
        return sum_of([(c, wide(x.at(w))) for w, c in _adaptive_window(sizes, spans, static)])
    both = (*sizes, *longest)
    offsets = points(both)[len(sizes) :]
    where = [ex.add(b, i) for (b, _), i in zip(spans, offsets, strict=True)]
    conds = [va.compare_index("lt", i, end) for i, (_, end) in zip(where, spans, strict=True)]
    return reduced_window(ctx, sizes, both, va.conjunction(*conds), x.at([*lead, *where]))


lowers("_adaptive_avg_pool2d.default")(_adaptive_avg_pool(2))
lowers("_adaptive_avg_pool3d.default")(_adaptive_avg_pool(3))


def _global_mean(ctx: Ctx, x: Tensor, rank: int) -> Tensor:
    acc = compute_dtype(x.dtype)
    dims = tuple(range(len(x.sizes) - rank, len(x.sizes)))
    total = reduce(ctx, "sum", x, dims, acc, acc)
    return finish(ctx, total.sizes, x.dtype, s.div(total.value, as_number(count(x, dims), acc)))
