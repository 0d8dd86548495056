"""Operators that read at data-dependent positions, as loads. Those that write are in `scatter.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import FallBack, lowers
from ..tensor import Size, Tensor, axes, expand, points, with_dim
from .even_positions import evenly_spaced
from .view import out_sizes


@dataclass(frozen=True)
class IndexRule:
    """A rule for indices read from data.

    `from_end`: negative indices count from the end. `checked`: an index out of range raises an error at run time.
    `reads`: nothing is written there, so that positions need not count as data. `code` selects the error.
    """

    from_end: bool = False
    checked: bool = True
    reads: bool = False
    code: int = va.INDEX_ERROR


FROM_FRONT = IndexRule()
READERS = 16  # readers of an index: a GPU stores one that at least so many elements of a result read
REPEATED_WORK = 1 << 26  # operations on indices that take a GPU longer than a launch does


def position(ctx: Ctx, t: Tensor, at: Sequence[Index], size: Index, rule: IndexRule = FROM_FRONT) -> Index:
    """Return the index that the tensor `t` holds at the point `at`, for a dimension of `size`.

    Raises FallBack for masks and empty dimensions.
    """
    if t.dtype in (torch.bool, torch.uint8):
        raise FallBack("a mask as index has a data-dependent result size")
    if size == 0:
        raise FallBack("an index into an empty dimension")
    i = va.cast(t.at(at), torch.int64)
    if rule.reads and (evenly := evenly_spaced(i, size)) is not None:
        return evenly
    if not rule.checked and i.op not in ("const", "index"):
        wrapped = i if _nonnegative(i) else s.where(s.binary("lt", i, 0), s.add(i, va.index(size)), i)
        return ex.lookup(wrapped, 0, max(ex.bounds(size)[1] - 1, 0))
    if ex.bounds(size)[0] < 1:
        # clamping an out-of-range index needs at least one element, so an empty dimension is refused by the host
        least = ctx.number(f"indexed_size({ex.show(size)}, {ex.show(ex.prod(t.sizes))})")
        size = ex.sym(least, 1, max(ex.bounds(size)[1], 1))
    if not rule.from_end and not (i.op in ("const", "index") and _nonnegative(i)):
        if not ctx.gpu:
            return va.wrap_index(i, size, rule.code | va.FROM_ZERO)
        i = s.where(s.binary("lt", i, 0), torch.iinfo(torch.int64).max, i)
    return va.wrap_index(i, size, va.INDEX_ERROR if ctx.gpu else rule.code)


def read(x: Tensor, point: Sequence[Index]) -> Value:
    """Return the scalar of `x` at a point; indices are checked even along dimensions in which `x` does not vary."""
    value = x.at(point)
    for axis, at in zip(axes(x.sizes), point, strict=True):
        if axis not in x.value.vars and ex.lookups(at):
            value = _with_check(at, value)
    return value


def _with_check(at: Index, value: Value) -> Value:
    """Return `value`, made to depend on the position `at` so that its range check runs; a checked position is >= 0."""
    in_range = va.apply("ge", va.index(at), va.const(0, torch.int64))
    other = va.const(0, value.dtype)
    if value is other:  # `where` drops the condition between two equal values
        other = va.const(1, value.dtype)
    return va.where(in_range, value, other)


def _stored_once(ctx: Ctx, indices: Tensor, results: Sequence[Index]) -> Tensor:
    """Return indices that a GPU computes from data in memory if each is read for many of so many results.

    A kernel otherwise computes the index anew for every element of a row, in every pass over it.
    """
    value = indices.value
    if not ctx.gpu or value.op == "load" or not va.loads(value):
        return indices
    elements, numbers = ex.bounds(ex.prod(results))[1], ex.bounds(ex.prod(indices.sizes))[0]
    if elements < READERS * numbers or elements * va.flops(value) < REPEATED_WORK:
        return indices
    return ctx.realize(indices)


def _nonnegative(v: Value) -> bool:
    """Return whether the operators of `v` imply `v >= 0`."""
    match v.op:
        case "const":
            return bool(v.attr >= 0)
        case "index":
            return ex.known_nonnegative(v.attr)
        case "maximum":
            return any(map(_nonnegative, v.args))
        case "minimum" | "add" | "mul" | "floor" | "trunc" | "abs" | "cast":
            return v.op == "abs" or all(map(_nonnegative, v.args))
    return False


@lowers("embedding.default")
def embedding(ctx: Ctx, weight: Tensor, indices: Tensor, *args: object) -> Tensor:
    sizes = out_sizes(ctx)
    p = points(sizes)
    row = position(ctx, _stored_once(ctx, indices, sizes), p[:-1], weight.sizes[0])
    return Tensor(sizes, weight.dtype, read(weight, [row, p[-1]]))


@lowers("index_select.default")
def index_select(ctx: Ctx, x: Tensor, dim: int, indices: Tensor) -> Tensor:
    if len(indices.sizes) > 1 or (not x.sizes and ex.prod(indices.sizes) != 1):
        raise FallBack("indices of more than one dimension, or several for one element, which the library refuses")
    sizes, x = out_sizes(ctx), with_dim(x)
    dim %= len(x.sizes)
    p = list(points(sizes)) or [0]
    indices = _stored_once(ctx, indices, sizes)
    p[dim] = position(ctx, indices, [p[dim]] if indices.sizes else [], x.sizes[dim])
    return Tensor(sizes, x.dtype, read(x, p))


@lowers("gather.default")
def gather(ctx: Ctx, x: Tensor, dim: int, indices: Tensor, sparse_grad: bool = False) -> Tensor:
    sizes, x, indices = out_sizes(ctx), with_dim(x), with_dim(indices)
    dim %= len(x.sizes)
    p = list(points(indices.sizes))
    p[dim] = position(ctx, indices, points(indices.sizes), x.sizes[dim], IndexRule(code=_gather_code(ctx)))
    return Tensor(sizes, x.dtype, read(x, p))


def _gather_code(ctx: Ctx) -> int:
    """Return the error code of a gather: RuntimeError, or IndexError for a gather that stems from an nll_loss."""
    node = ctx.graph_node
    source = str(node.meta.get("original_aten", "")) if node is not None else ""
    return va.INDEX_ERROR if "nll_loss" in source else va.RUNTIME_ERROR


@lowers("take.default")
def take(ctx: Ctx, x: Tensor, indices: Tensor) -> Tensor:
    x = with_dim(x)
    at = position(ctx, indices, points(indices.sizes), ex.prod(x.sizes), IndexRule(from_end=True))
    value = read(x, ex.unflatten(at, x.sizes))
    if ex.lookups(at) and not any(ex.lookups(i) for _, i in va.loads(value)):
        value = _with_check(at, value)
    return Tensor(indices.sizes, x.dtype, value)


@lowers("index.Tensor")
def index(ctx: Ctx, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Lower advanced indexing: the broadcast shape of the indices replaces the indexed dimensions."""
    sizes = out_sizes(ctx)
    return Tensor(sizes, x.dtype, read(x, advanced(ctx, x, indices, sizes, IndexRule(from_end=True, reads=True))))


@lowers("_unsafe_index.Tensor")
def unsafe_index(ctx: Ctx, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Lower advanced indexing by a decomposition that guarantees indices in range."""
    sizes = out_sizes(ctx)
    rule = IndexRule(from_end=True, reads=True, checked=False)
    return Tensor(sizes, x.dtype, x.at(advanced(ctx, x, indices, sizes, rule)))


def advanced(ctx: Ctx, x: Tensor, indices: Sequence[Any], sizes: tuple[Index, ...], rule: IndexRule) -> list[Index]:
    """Return the index in each dimension of `x` at a point of the result, whose shape is `sizes`."""
    indexed = [k for k, t in enumerate(indices) if t is not None]
    if len(indices) > len(x.sizes):
        raise FallBack("more indices than dimensions, which the library refuses")
    if any(indices[k].dtype in (torch.bool, torch.uint8) for k in indexed):
        raise FallBack("a mask as index has a data-dependent result size")
    rank = max(len(indices[k].sizes) for k in indexed)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if adjacent else 0
    p = points(sizes)
    common = p[first : first + rank]
    rest = iter([*p[:first], *p[first + rank :]])
    shape = sizes[first : first + rank]
    point: list[Index] = []
    for k in range(len(x.sizes)):
        if k < len(indices) and indices[k] is not None:
            at = expand(_stored_once(ctx, indices[k], sizes), shape)
            point.append(position(ctx, at, common, x.sizes[k], rule))
        else:
            point.append(next(rest))
    return point


@lowers("upsample_nearest2d.vec", "upsample_nearest2d.default")
def upsample_nearest2d(ctx: Ctx, x: Tensor, size: Sequence[Size], *scales: object) -> Tensor:
    sizes = out_sizes(ctx)
    p = list(points(sizes))
    scale_factors = _flat(scales) or [None, None]
    for d, scale in ((2, scale_factors[0]), (3, scale_factors[-1])):
        n, m = x.sizes[d], sizes[d]
        if scale is not None and not (
            isinstance(scale, (int, float)) and ex.mul(n, int(scale)) == m and scale % 1 == 0
        ):
            raise FallBack("a scale that is not an integer, which rounds differently from the ratio of sizes")
        p[d] = ex.floordiv(ex.mul(p[d], n), m)
    return Tensor(sizes, x.dtype, x.at(p))


def _flat(xs: object) -> list[object]:
    return [y for x in xs for y in _flat(x)] if isinstance(xs, (tuple, list)) else [xs]


def _mask_triangle(x: Tensor, diagonal: int, upper: bool) -> Tensor:
    p = points(x.sizes)
    shifted = ex.sub(ex.sub(p[-1], p[-2]), diagonal)
    keep = s.binary("ge" if upper else "le", va.index(shifted), 0)
    return Tensor(x.sizes, x.dtype, va.where(keep, x.value, va.const(0, x.value.dtype)))


@lowers("tril.default")
def tril(ctx: Ctx, x: Tensor, diagonal: int = 0) -> Tensor:
    return _mask_triangle(x, diagonal, upper=False)


@lowers("triu.default")
def triu(ctx: Ctx, x: Tensor, diagonal: int = 0) -> Tensor:
    return _mask_triangle(x, diagonal, upper=True)
