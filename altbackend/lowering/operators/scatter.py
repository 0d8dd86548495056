"""Operators that write at data-dependent positions: a copy of the base, then stores in loop order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Buffer, Scatter, View
from ...ir.ops import compute_dtype
from ...ir.value import Value
from .. import in_place
from .. import scalar as s
from ..context import Ctx
from ..gpu import scatter_refusal
from ..registry import FallBack, lowers
from ..tensor import Size, Tensor, as_view, axes, expand, of_view, points, with_dim
from .indexing import IndexRule, advanced, position
from .one_hot import one_hot
from .pointwise import finish

MODES = {"sum": "add", "prod": "prod", "amax": "max", "amin": "min"}


@dataclass(frozen=True)
class Updates:
    """The stores of a scatter: for every point of `sizes`, `value` at the position `at`, one index per dimension."""

    sizes: Sequence[Index]
    at: Sequence[Index]
    value: Value


def scatter(
    ctx: Ctx,
    base: Tensor,
    mode: str,
    updates: Updates,
    *,
    strides: tuple[Index, ...] | None = None,
) -> Tensor:
    """Return a new buffer: `base` with the updates combined into it.

    `mode`: see `ir.loops.Scatter`; 16-bit floats are accumulated in float32. `strides`: dense strides of the buffer, by
    default in the order of those of the traced result. Raises FallBack if a GPU has no atomic operation for `mode`.
    """
    val = ctx.node.meta["val"]
    fake = val[0] if isinstance(val, (tuple, list)) else val  # of several gradients the scattered one is first
    acc = base.dtype if mode == "set" else compute_dtype(base.dtype)
    if refusal := scatter_refusal(ctx, mode, acc):
        raise FallBack(refusal)
    b, first = _target(ctx, base, acc, updates, strides or ctx.strides_like(base.sizes, fake))
    index = ex.add(first, *(ex.mul(step, i) for step, i in zip(b.strides, updates.at, strict=True)))
    dims = tuple(a for a in axes(updates.sizes) if ex.size_of(a) != 1)
    if 0 not in updates.sizes:
        ctx.emit(Scatter(b.name, dims, index, va.cast(updates.value, acc), mode, ctx.origins()))
    # a 0-d base was given one dimension; the result is 0-d again
    written = of_view(View(b.name, b.sizes, b.strides, first), b.dtype)
    return finish(ctx, base.sizes if fake.shape else (), base.dtype, written.value)


def _target(
    ctx: Ctx, base: Tensor, dtype: torch.dtype, updates: Updates, strides: tuple[Index, ...]
) -> tuple[Buffer, Index]:
    """Return the buffer that holds `base` for the updates to write, and the position of its first element.

    It is the memory of `base` if the call being lowered updates that memory, or if nothing else reads it any more.
    """
    v = as_view(base, strides)
    if v is not None and base.dtype == dtype and _is_destination(ctx, v):
        kind = ctx.buffers[v.buffer]
        return replace(kind, sizes=v.sizes, strides=v.strides), v.offset
    reads = [b for b, _ in va.loads(updates.value)]
    reads += [b for i in updates.at for x in ex.lookups(i) for b, _ in va.loads(x)]
    if (name := in_place.reusable(ctx, base, dtype, reads)) is not None and ctx.buffers[name].strides == strides:
        ctx.before_write(name)
        return ctx.buffers[name], 0
    b = ctx.new_buffer(dtype, base.sizes, strides)
    ctx.store(b, Tensor(base.sizes, dtype, va.cast(va.cast(base.value, base.dtype), dtype)))
    return b, 0


def _is_destination(ctx: Ctx, v: View) -> bool:
    """Return whether a view is the memory that the call being lowered writes; dimensions of size 1 have any stride."""
    d = ctx.destination
    if d is None or (v.buffer, v.offset) != (d.buffer, d.offset):
        return False
    sizes = v.sizes if d.sizes else ()  # a tensor without dimensions has become one of size 1
    return sizes == d.sizes and all(a == b or n == 1 for a, b, n in zip(v.strides, d.strides, sizes, strict=False))


def _along(ctx: Ctx, dim: int, indices: Tensor, x: Tensor) -> list[Index]:
    """Return the position of a scatter along `dim`; all other coordinates are those of the loop point."""
    p = list(points(indices.sizes))
    p[dim] = position(ctx, indices, points(indices.sizes), x.sizes[dim], IndexRule(code=va.RUNTIME_ERROR))
    return p


def _source(src: Tensor | float, indices: Tensor, x: Tensor) -> Value:
    if isinstance(src, Tensor):
        return va.cast(with_dim(src).at(points(indices.sizes)), x.dtype)
    return va.const(src, x.dtype)


def _scatter_along(mode: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dim: int, indices: Tensor, src: Tensor | float) -> Tensor:
        if 0 in indices.sizes:
            return x
        x, indices = with_dim(x), with_dim(indices)
        dim %= len(x.sizes)
        where = _along(ctx, dim, indices, x)
        if mode == "set" and indices.sizes == tuple(1 if k == dim else n for k, n in enumerate(x.sizes)):
            filled = one_hot(x, dim, where[dim], _source(src, indices, x))
            if filled is not None:
                return finish(ctx, filled.sizes if _result_has_dims(ctx) else (), filled.dtype, filled.value)
        return scatter(ctx, x, mode, Updates(indices.sizes, where, _source(src, indices, x)))

    return lower


def _result_has_dims(ctx: Ctx) -> bool:
    return bool(ctx.result.shape)


lowers("scatter.src", "scatter.value")(_scatter_along("set"))
lowers("scatter_add.default")(_scatter_along("add"))


@lowers("scatter.reduce", "scatter.value_reduce")
def scatter_named(ctx: Ctx, x: Tensor, dim: int, indices: Tensor, src: Tensor | float, *, reduce: str) -> Tensor:
    return _scatter_along({"add": "add", "multiply": "prod"}[reduce])(ctx, x, dim, indices, src)


@lowers("scatter_reduce.two")
def scatter_reduce(
    ctx: Ctx, x: Tensor, dim: int, indices: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if 0 in indices.sizes:
        return x
    x, indices = with_dim(x), with_dim(indices)
    where = _along(ctx, dim % len(x.sizes), indices, x)
    return combine(ctx, x, reduce, Updates(indices.sizes, where, _source(src, indices, x)), include_self)


def combine(ctx: Ctx, x: Tensor, reduce: str, updates: Updates, include_self: bool) -> Tensor:
    """Return `x` with the updates reduced into it.

    Without `include_self` the positions that are written start from the identity element instead of `x`.
    """
    mode = "add" if reduce == "mean" else MODES[reduce]
    identity = replace(updates, value=_identity(mode, x.dtype))
    start = x if include_self else scatter(ctx, x, "set", identity)
    total = scatter(ctx, with_dim(start), mode, updates)
    if reduce != "mean":
        return total
    # the number of values added at each position, at least 1; with include_self the value of x counts too
    acc = compute_dtype(x.dtype) if x.dtype.is_floating_point else torch.int64
    zero = Tensor(x.sizes, acc, va.const(int(include_self), acc))
    n = scatter(ctx, zero, "add", replace(updates, value=va.const(1, acc))).value
    op = "truediv" if acc.is_floating_point else "floor_divide"
    mean = va.apply(op, total.computed(acc), va.apply("maximum", n, va.const(1, acc)))
    return finish(ctx, total.sizes, x.dtype, mean)


def _identity(mode: str, dtype: torch.dtype) -> Value:
    """Return the identity element of a scatter mode."""
    if mode in ("add", "prod"):
        return va.const(int(mode == "prod"), dtype)
    if dtype == torch.bool:
        return va.const(mode == "min", dtype)
    if dtype.is_floating_point:
        return va.const(float("inf" if mode == "min" else "-inf"), dtype)
    limits = torch.iinfo(dtype)
    return va.const(limits.max if mode == "min" else limits.min, dtype)


def _index_along(
    ctx: Ctx, x: Tensor, dim: int, indices: Tensor, src: Tensor, code: int = va.INDEX_ERROR
) -> tuple[tuple[Index, ...], list[Index]]:
    """Return (shape of the source, position) of an index_add or index_copy."""
    dim %= len(x.sizes)
    p = list(points(src.sizes))
    p[dim] = position(ctx, indices, [p[dim]] if indices.sizes else [], x.sizes[dim], IndexRule(code=code))
    return src.sizes, p


def _refuse_shapes(x: Tensor, indices: Tensor, src: Tensor) -> None:
    """Raise FallBack for shapes that the library refuses although fake kernels accept them."""
    if len(indices.sizes) > 1 or len(with_dim(x).sizes) != len(with_dim(src).sizes):
        raise FallBack("indices or a source of another number of dimensions, which the library refuses")
    if not x.sizes and any(n != 1 for n in src.sizes):
        raise FallBack("more than one element for a tensor without dimensions, which the library refuses")


@lowers("index_add.default")
def index_add(ctx: Ctx, x: Tensor, dim: int, indices: Tensor, src: Tensor, *, alpha: s.Num = 1) -> Tensor:
    _refuse_shapes(x, indices, src)
    if 0 in src.sizes:
        return x
    x, src = with_dim(x), with_dim(src)
    # for matrices eager calls scatter_add, which raises another error
    code = va.RUNTIME_ERROR if len(x.sizes) == 2 and indices.dtype == torch.int64 else va.INDEX_ERROR
    sizes, where = _index_along(ctx, x, dim, indices, src, code)
    value = src.computed()
    return scatter(ctx, x, "add", Updates(sizes, where, value if alpha == 1 else s.mul(value, alpha)))


@lowers("index_copy.default")
def index_copy(ctx: Ctx, x: Tensor, dim: int, indices: Tensor, src: Tensor) -> Tensor:
    _refuse_shapes(x, indices, src)
    if 0 in src.sizes:
        return x
    x, src = with_dim(x), with_dim(src)
    sizes, where = _index_along(ctx, x, dim, indices, src)
    return scatter(ctx, x, "set", Updates(sizes, where, va.cast(src.value, src.dtype)))


@lowers("index_reduce.default")
def index_reduce(
    ctx: Ctx, x: Tensor, dim: int, indices: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    _refuse_shapes(x, indices, src)
    if 0 in src.sizes:
        return x
    x, src = with_dim(x), with_dim(src)
    sizes, where = _index_along(ctx, x, dim, indices, src)
    return combine(ctx, x, reduce, Updates(sizes, where, va.cast(src.value, src.dtype)), include_self)


@lowers("index_put.default")
def index_put(
    ctx: Ctx,
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *,
    checked: bool = True,
) -> Tensor:
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices):
        return _mask_put(x, indices, values, accumulate)
    if len(indices) > len(x.sizes) or not indices:
        raise FallBack("more indices than dimensions, or none, which the library refuses")
    sizes = indexed_sizes(x, indices)
    if 0 in sizes:
        return x
    where = advanced(ctx, x, indices, sizes, IndexRule(from_end=True, checked=checked))
    value = expand(values, sizes)
    return scatter(ctx, x, "add" if accumulate else "set", Updates(sizes, where, va.cast(value.value, values.dtype)))


@lowers("_unsafe_index_put.default")
def unsafe_index_put(
    ctx: Ctx, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Lower an index_put by a decomposition that guarantees indices in range."""
    out: Tensor = index_put(ctx, x, indices, values, accumulate, checked=False)
    return out


def _mask_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor:
    """Return `x` with one value at every element for which a mask over the leading dimensions holds."""
    if len([t for t in indices if t is not None]) != 1 or indices[0] is None or indices[0].dtype != torch.bool:
        raise FallBack("a mask together with other indices")
    if any(n != 1 for n in values.sizes):
        raise FallBack("one value per element of the mask")
    mask = indices[0]
    hit = mask.at(points(x.sizes)[: len(mask.sizes)])
    value = va.cast(values.value, x.value.dtype)
    return Tensor(x.sizes, x.dtype, va.where(hit, s.add(x.value, value) if accumulate else value, x.value))


def indexed_sizes(x: Tensor, indices: Sequence[Any]) -> tuple[Index, ...]:
    """Return the shape of `x[indices]`: the broadcast shape of the indices replaces the indexed dimensions."""
    indexed = [k for k, t in enumerate(indices) if t is not None]
    common = _broadcast([indices[k].sizes for k in indexed])
    rest = [n for k, n in enumerate(x.sizes) if k not in indexed]
    first = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    return (*rest[:first], *common, *rest[first:])


def _broadcast(shapes: Sequence[tuple[Index, ...]]) -> tuple[Index, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(n)) + tuple(n) for n in shapes]
    return tuple(next((n for n in column if n != 1), 1) for column in zip(*padded, strict=True))


@lowers("embedding_dense_backward.default")
def embedding_backward(
    ctx: Ctx, grad: Tensor, indices: Tensor, rows: Size, padding: int, scale_by_frequency: bool
) -> Tensor:
    if scale_by_frequency:
        raise FallBack("rows scaled by their frequency")
    sizes = ctx.result_sizes
    zero = Tensor(sizes, grad.dtype, va.const(0, grad.dtype))
    if 0 in grad.sizes:
        return zero
    p = points(grad.sizes)
    value = grad.computed()
    if padding >= 0:
        row = va.cast(indices.at(p[:-1]), torch.int64)
        value = s.where(s.binary("eq", row, padding), 0, value)
    at = [position(ctx, indices, p[:-1], sizes[0]), p[-1]]
    return scatter(ctx, zero, "add", Updates(grad.sizes, at, value))
