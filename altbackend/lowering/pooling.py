"""Pooling over small windows, unrolled into one scalar tree per output point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Index
from ..ir.ops import compute_dtype
from ..ir.value import Value
from . import scalar as s
from .context import Ctx
from .pointwise import finish
from .reduction import as_number, count, reduce
from .registry import NotHere, lowers
from .tensor import Tensor, points

MAX_WINDOW = 36


def pair(v: Any, rank: int, default: Any = None) -> list[int]:
    if v is None or (isinstance(v, (list, tuple)) and not v):
        v = default
    if isinstance(v, int):
        return [v] * rank
    return list(v) * (rank // len(v)) if len(v) < rank else list(v)


def window(
    x: Tensor, sizes: tuple[Index, ...], kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> list[tuple[list[int], list[Index], Value]]:
    """(offset, input position, inside the input) for every element of the window at an output point."""
    rank = len(kernel)
    p = points(sizes)
    lead = list(p[: len(sizes) - rank])
    out = []
    for flat in range(math.prod(kernel)):
        at = [int(i) for i in ex.unflatten(flat, tuple(kernel))]  # type: ignore[arg-type]
        where: list[Index] = []
        conds = []
        for d in range(rank):
            i = ex.add(ex.mul(p[len(sizes) - rank + d], stride[d]), at[d] * dilation[d] - padding[d])
            conds += [va.compare_index("ge", i, 0), va.compare_index("lt", i, x.sizes[len(sizes) - rank + d])]
            where.append(i)
        out.append((at, lead + where, va.conjunction(*conds)))
    return out


@lowers("max_pool2d_with_indices.default")
def max_pool2d(
    ctx: Ctx, x: Tensor, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[Tensor, Tensor]:
    out, _ = ctx.graph_node.meta["val"]  # type: ignore[union-attr]
    k = pair(kernel, 2)
    if math.prod(k) > MAX_WINDOW or not x.dtype.is_floating_point:
        raise NotHere(f"a window of {math.prod(k)} elements")
    if x.value.op != "load":
        x = ctx.realize(x, ctx.graph_node.args[0].meta["val"])  # type: ignore[union-attr]
    sizes = ctx.shape(out.shape)
    points_ = window(x, sizes, k, pair(stride, 2, k), pair(padding, 2), pair(dilation, 2))
    best: Value | None = None
    at: Value | None = None
    for _, where, inside in points_:
        v = x.at(where)
        v = va.cast(va.masked(inside, v, va.const(-math.inf, v.dtype)), torch.float32 if v.dtype != torch.float64 else v.dtype)
        linear = va.index(ex.add(ex.mul(where[-2], x.sizes[-1]), where[-1]))
        if best is None or at is None:
            best, at = v, linear
            continue
        # a later element wins when greater or NaN; an earlier NaN stays
        wins = va.apply("logical_or", s.binary("gt", v, best), s.unary("isnan", v))
        at = va.where(wins, linear, at)
        best = va.apply("maximum", best, v)
    assert best is not None and at is not None
    return finish(ctx, sizes, x.dtype, best), Tensor(sizes, torch.int64, at)


@lowers("avg_pool2d.default")
def avg_pool2d(
    ctx: Ctx,
    x: Tensor,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: Any = None,
) -> Tensor:
    out = ctx.graph_node.meta["val"]  # type: ignore[union-attr]
    k, pad = pair(kernel, 2), pair(padding, 2)
    if math.prod(k) > MAX_WINDOW or ceil_mode or (any(pad) and not count_include_pad) or not x.dtype.is_floating_point:
        raise NotHere("this form of average pooling")
    if x.value.op != "load":
        x = ctx.realize(x, ctx.graph_node.args[0].meta["val"])  # type: ignore[union-attr]
    sizes = ctx.shape(out.shape)
    total: Value | None = None
    for _, where, inside in window(x, sizes, k, pair(stride, 2, k), pad, [1, 1]):
        v = x.at(where)
        v = va.cast(va.masked(inside, v, va.const(0, v.dtype)), torch.float32 if v.dtype != torch.float64 else v.dtype)
        total = v if total is None else s.add(total, v)
    assert total is not None
    return finish(ctx, sizes, x.dtype, s.div(total, float(divisor or math.prod(k))))


@lowers("_adaptive_avg_pool2d.default")
def adaptive_avg_pool2d(ctx: Ctx, x: Tensor, size: Sequence[Any]) -> Tensor:
    from_sizes, to = x.sizes[-2:], ctx.shape(size)
    if any(ex.mod(n, m) != 0 for n, m in zip(from_sizes, to, strict=True)):
        raise NotHere("windows of different sizes")
    k = [ex.floordiv(n, m) for n, m in zip(from_sizes, to, strict=True)]
    if to == (1, 1):
        return _global_mean(ctx, x)
    if not all(isinstance(n, int) for n in k):
        raise NotHere("a symbolic window")
    return avg_pool2d(ctx, x, k)


def _global_mean(ctx: Ctx, x: Tensor) -> Tensor:
    acc = compute_dtype(x.dtype)
    dims = (len(x.sizes) - 2, len(x.sizes) - 1)
    total = reduce(ctx, "sum", x, dims, acc, acc)
    return finish(ctx, total.sizes, x.dtype, s.div(total.value, as_number(count(x, dims), acc)))
