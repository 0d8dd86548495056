"""Reductions, softmax and scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import COMBINE, MOST_WRITTEN_OUT, Reduction, Scan, written_out
from ...ir.ops import LOW_PRECISION, compute_dtype
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx, dense_strides, memory_order
from ..registry import FallBack, lowers
from ..repeated_terms import stored_factors
from ..temporary_layout import is_temporary, reduced_strides
from ..tensor import Dims, Tensor, axes, expand, full, of_buffer, permuted, points
from .one_hot import total
from .pointwise import finish

FEW_GROUPS = 512  # groups that do not fill a GPU with one program each
LARGE_GROUP = 1 << 16  # elements from which such a group is reduced in parts
SECTOR = 32  # bytes of the smallest memory access of a GPU


@dataclass(frozen=True)
class Groups:
    """Groups of channels that a normalisation reduces: their number, and the channels of each."""

    number: Index
    channels: Index


def norm_dims(dims: Dims, rank: int) -> tuple[int, ...]:
    """Return sorted dimension numbers, counted from the front; None or () means all dimensions."""
    if dims is None or rank == 0 or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    return tuple(sorted({d % rank for d in dims}))


def reduce(ctx: Ctx, op: str, x: Tensor, dims: tuple[int, ...], acc: torch.dtype, out: torch.dtype) -> Tensor:
    """Emit a reduction and return its result, which has size 1 in `dims` (keepdim).

    `acc`: dtype of the accumulator. `out`: dtype of the buffer. Equal reductions share a buffer: a softmax and a
    log-softmax of one tensor have the same maximum.
    """
    out_sizes = tuple(1 if k in dims else n for k, n in enumerate(x.sizes))
    if all(k >= len(x.sizes) or x.sizes[k] == 1 for k in dims):  # a reduction of single elements
        value = va.cast(x.value, acc)
        return Tensor(out_sizes, out, va.cast(value, out))
    if acc == torch.bool:
        op = {"max": "any", "min": "all", "sum": "any", "prod": "all"}.get(op, op)
    value = va.cast(x.value, acc)
    varying = [k for k in dims if x.sizes[k] != 1]
    if op == "sum" and len(varying) == 1 and (single := total(value, axes(x.sizes)[varying[0]])) is not None:
        return Tensor(out_sizes, out, va.cast(single, out))
    if ctx.gpu and op in COMBINE and _is_recomputed(x, value, varying):
        return Tensor(out_sizes, out, va.cast(written_out(op, value, [axes(x.sizes)[k] for k in varying]), out))
    if ctx.gpu:
        value = stored_factors(ctx, x.sizes, varying, value)
    key = (op, value, x.sizes, dims, out)
    if key in ctx.stored:
        return ctx.stored[key]
    order = loop_order(x, value) if ctx.gpu else slowest_first(x, value)
    fresh = {k: ex.dim(j, x.sizes[k]) for j, k in enumerate(order)}
    env = {a: ex.ix(fresh[k]) for k, a in enumerate(axes(x.sizes))}
    read = value.substitute({a: e for a, e in env.items() if e is not ex.ix(a)})
    parallel = tuple(fresh[k] for k in order if k not in dims and x.sizes[k] != 1)
    reduced = tuple(fresh[k] for k in order if k in dims and x.sizes[k] != 1)
    buffer = ctx.new_buffer(out, out_sizes, reduced_strides(ctx, order, out_sizes))
    index = ex.add(
        0,
        *(
            ex.mul(st, env[a])
            for k, (st, a) in enumerate(zip(buffer.strides, axes(x.sizes), strict=True))
            if k not in dims
        ),
    )
    ctx.emit(Reduction(buffer.name, parallel, reduced, index, op, read, ctx.origins()))
    return ctx.remember(key, value, of_buffer(buffer))


MOST_FLOPS = 64  # float additions of all terms of a reduction that its readers compute anew


def _is_recomputed(x: Tensor, value: Value, dims: Sequence[int]) -> bool:
    """Return whether a reduction over `dims` has few terms and operands that are all smaller than its results.

    Distances of all pairs of points are an example. Each reader computes them anew, from operands in the cache, in
    place of reading as many numbers as there are pairs.
    """
    terms = ex.prod(x.sizes[k] for k in dims)
    results = {a for k, (a, n) in enumerate(zip(axes(x.sizes), x.sizes, strict=True)) if k not in dims and n != 1}
    loads = va.loads(value)
    small = bool(loads) and all(not results <= set(ex.vars_of(index)) for _, index in loads)
    few = isinstance(terms, int) and 0 < terms <= MOST_WRITTEN_OUT and terms * va.flops(value) <= MOST_FLOPS
    return small and few


_FAR = 1 << 40  # elements: slower than the stride of any tensor


def slowest_first(x: Tensor, value: Value) -> list[int]:
    """Return the dimensions from slowest to fastest in the memory of the operand that has the most of them."""
    steps = _steps_of_main_operand(x, value)
    return memory_order([c if c != 0 else 1 << 50 for c in steps], x.sizes) if steps else list(range(len(x.sizes)))


def _steps_of_main_operand(x: Tensor, value: Value) -> list[Index]:
    """Return the strides, by dimension, of the operand that has the most of them; [] without operands."""
    best: list[Index] = []
    best_terms = -1
    for _, index in va.loads(value):
        # an index that depends on a dimension in another way jumps in memory: slower than any stride
        steps = [_FAR if (c := ex.stride(index, a)) is None else c for a in axes(x.sizes)]
        used = sum(c != 0 for c in steps)
        if used > best_terms:
            best, best_terms = steps, used
    return best


def loop_order(x: Tensor, value: Value) -> list[int]:
    """Return the dimensions from slowest to fastest for the loops of a reduction on a GPU.

    A dimension that the main operand lacks follows those that stand before it, such as j in sum_k a[i, k] b[k, j].
    Rows then lie as results do, and neighbouring rows read the same elements of the main operand. In the slowest loop,
    it would have the whole operand read once for each of its points.
    """
    absent = [k for k, c in enumerate(_steps_of_main_operand(x, value)) if c == 0 and x.sizes[k] != 1]
    order = [k for k in slowest_first(x, value) if k not in absent]
    for k in absent:
        order.insert(max((order.index(j) + 1 for j in range(k) if j in order and x.sizes[j] != 1), default=0), k)
    return order


def drop_dims(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return `x` without the dimensions `dims`, which have size 1, unless `keepdim`."""
    if keepdim:
        return x
    sizes = tuple(n for k, n in enumerate(x.sizes) if k not in dims)
    it = iter(points(sizes))
    return Tensor(sizes, x.dtype, x.at([0 if k in dims else next(it) for k in range(len(x.sizes))]))


def count(x: Tensor, dims: tuple[int, ...]) -> Index:
    """Return the number of elements that one result of a reduction over `dims` combines."""
    return ex.prod(x.sizes[k] for k in dims if k < len(x.sizes))  # torch accepts dimension 0 of a 0-d tensor


def as_number(e: Index, dtype: torch.dtype) -> Value:
    """Return an index expression as a scalar of `dtype`."""
    return va.cast(va.index(e), dtype)


def shared(ctx: Ctx, x: Tensor, dtype: torch.dtype, like: torch.Tensor | None = None) -> Tensor:
    """Return `x` for several readers: stored, unless recomputing it costs no more than a load and a cast.

    `like`: a fake tensor whose order of strides a new buffer takes.
    """
    if va.flops(x.value) == 0 and len(va.loads(x.value)) <= 1:
        return x
    if ctx.gpu:  # a tile in registers has the value in `dtype` anyway, and memory holds half the bytes
        return ctx.realize(x.rounded(), like)
    return ctx.realize(Tensor(x.sizes, dtype, va.cast(va.cast(x.value, x.dtype), dtype)), like)


def shared_by_rows(ctx: Ctx, x: Tensor, dtype: torch.dtype, like: torch.Tensor | None) -> Tensor:
    """Return `x` for reductions of rows and for what reads their totals. None of them compares its elements exactly."""
    if not ctx.gpu:
        return shared(ctx, x, dtype, like)
    return x.rounded() if _reads_as_much(ctx, x) else shared_as_read(ctx, x, dtype)


FEW_FLOPS = 8  # float additions of a value that each kernel computes again from its operands


def _reads_as_much(ctx: Ctx, x: Tensor) -> bool:
    """Return whether the operands of `x` are as many bytes as `x`, and little computes it from them.

    Storing it for several kernels would only add a copy. An example is a bias of channels. The parts of a concatenation
    are not: a kernel of statistics that read three of them took longer by the time of the copy.
    """
    every = {a for a in axes(x.sizes) if ex.size_of(a) != 1}
    large = [(b, index) for b, index in va.loads(x.value) if every <= ex.vars_of(index)]
    if va.flops(x.value) > FEW_FLOPS or len(large) != 1:
        return False
    ((buffer, index),) = large
    in_place = all(ex.coefficient(index, a) is not None for a in every)
    return in_place and ctx.buffers[buffer].dtype.itemsize <= x.dtype.itemsize


def _crosses_three_dims(ctx: Ctx, x: Tensor, dim: int) -> bool:
    """Return whether a scan of `x` along `dim` reads along one dimension and stores along another, on a GPU.

    The scan's result lies plain. If rows lie along a third dimension, no tile of them reads and stores whole sectors.
    """
    long = [k for k, n in enumerate(x.sizes) if n != 1]
    if not ctx.gpu or len(long) < 3 or not all(isinstance(n, int) for n in x.sizes):
        return False
    read = next(k for k in reversed(slowest_first(x, x.value)) if k in long)
    return read != long[-1] and dim not in (read, long[-1])


def shared_of_groups(ctx: Ctx, x: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Return `x` for several readers, which reduce each group of channels over all points.

    Few, large groups are reduced in parts by kernels that read `x` from memory. Then it is stored as its main operand
    lies, so that a channels-last image is not transposed. Other groups are rows of one kernel, and `x` is stored only
    for other kernels: like the normalised result if a group's channels fill sectors of memory.
    """
    number, numel = groups.number, ex.prod(x.sizes)
    if ctx.gpu and _reads_as_much(ctx, x):
        return x.rounded()
    if isinstance(number, int) and isinstance(numel, int) and number < FEW_GROUPS and numel >= number * LARGE_GROUP:
        return shared_as_read(ctx, x, dtype)
    whole = isinstance(groups.channels, int) and groups.channels * x.dtype.itemsize >= SECTOR
    return shared(ctx, x, dtype, result_of(ctx, 0) if whole else None)


def shared_as_read(ctx: Ctx, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` for reductions with few results: on a GPU stored as its main operand lies, so that rows follow it."""
    order = slowest_first(x, x.value)
    if not ctx.gpu or order == sorted(order) or not reads_every_dim(x):
        return shared(ctx, x, dtype)
    stored = shared(ctx, permuted(x, order), dtype)
    return permuted(stored, [order.index(d) for d in range(len(order))])


def reads_every_dim(x: Tensor) -> bool:
    """Return whether an operand has an element of its own for every point."""
    every = {a for a in axes(x.sizes) if ex.size_of(a) != 1}
    return any(every <= ex.vars_of(index) for _, index in va.loads(x.value))


def result_of(ctx: Ctx, k: int | None = None) -> Any:
    val = ctx.node.meta["val"]
    return val if k is None else val[k]


@lowers("sum.dim_IntList", "sum.default")
def sum_(ctx: Ctx, x: Tensor, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    out = result_of(ctx)
    reduced_dims = norm_dims(dims, len(x.sizes))
    total = reduce(ctx, "sum", x, reduced_dims, compute_dtype(out.dtype), compute_dtype(out.dtype))
    return finish(ctx, *_shape(total, reduced_dims, keepdim), out.dtype, drop_dims(total, reduced_dims, keepdim).value)


def _shape(t: Tensor, dims: tuple[int, ...], keepdim: bool) -> tuple[tuple[Index, ...]]:
    return (drop_dims(t, dims, keepdim).sizes,)


@lowers("mean.dim", "mean.default")
def mean(ctx: Ctx, x: Tensor, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    out = result_of(ctx)
    reduced_dims = norm_dims(dims, len(x.sizes))
    acc = compute_dtype(out.dtype)
    total = drop_dims(reduce(ctx, "sum", x, reduced_dims, acc, acc), reduced_dims, keepdim)
    return finish(ctx, total.sizes, out.dtype, s.div(total.value, as_number(count(x, reduced_dims), acc)))


@lowers("prod.default", "prod.dim_int")
def prod(ctx: Ctx, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    out = result_of(ctx)
    reduced_dims = norm_dims(dim, len(x.sizes))
    acc = compute_dtype(out.dtype)
    reduced = drop_dims(reduce(ctx, "prod", x, reduced_dims, acc, acc), reduced_dims, keepdim)
    return finish(ctx, reduced.sizes, out.dtype, reduced.value)


def _extremum(op: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dims: Dims = None, keepdim: bool = False) -> Tensor:
        reduced_dims = norm_dims(dims, len(x.sizes))
        _require_elements(ctx, x, reduced_dims, bool(dims))
        acc = compute_dtype(x.dtype)
        reduced = drop_dims(reduce(ctx, op, x, reduced_dims, acc, acc), reduced_dims, keepdim)
        return finish(ctx, reduced.sizes, x.dtype, reduced.value)

    return lower


def _require_elements(ctx: Ctx, x: Tensor, dims: Sequence[int], named: bool, as_index_error: bool = False) -> None:
    """Check that an extremum has elements: over all of `x`, or over `dims` if they are `named`.

    For symbolic sizes the host program raises IndexError if `named` or `as_index_error`, else RuntimeError. Raises
    FallBack if there are certainly no elements; the library call then raises eager's error.
    """
    sizes = [x.sizes[k] for k in dims] if named else list(x.sizes)
    if 0 in sizes:
        raise FallBack("the extremum of no elements")
    maybe_zero = [ex.show(n) for n in sizes if ex.bounds(n)[0] < 1]
    if not maybe_zero:
        return
    text = " and ".join(f"{n} > 0" for n in maybe_zero)
    message = f"Expected reduction dims {tuple(dims)} to have non-zero size." if named else _NO_ELEMENTS
    ctx.require(text, message, named or as_index_error)


_NO_ELEMENTS = "Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim."


lowers("amax.default", "max.default")(_extremum("max"))
lowers("amin.default", "min.default")(_extremum("min"))


def _logical(op: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dims: Dims = None, keepdim: bool = False) -> Tensor:
        reduced_dims = norm_dims(dims, len(x.sizes))
        truth = x if x.dtype == torch.bool else Tensor(x.sizes, torch.bool, s.binary("ne", x.computed(), 0))
        reduced = drop_dims(reduce(ctx, op, truth, reduced_dims, torch.bool, torch.bool), reduced_dims, keepdim)
        return Tensor(reduced.sizes, result_of(ctx).dtype, va.cast(reduced.value, result_of(ctx).dtype))

    return lower


lowers("any.default", "any.dim", "any.dims")(_logical("any"))
lowers("all.default", "all.dim", "all.dims")(_logical("all"))


def extremum_position(ctx: Ctx, op: str, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return (extremum, row-major position of its first occurrence in `dims`), with keepdim; a NaN is the extremum.

    A second reduction finds the least position that holds the extremum, so both reductions vectorise in any layout.
    """
    dims = tuple(k for k in dims if k < len(x.sizes))  # torch accepts dimension 0 of a 0-d tensor
    acc = compute_dtype(x.dtype)
    n = count(x, dims)
    if n == 1:
        best = reduce(ctx, op, x, dims, acc, acc)
        return best, full(best.sizes, 0, torch.int64)
    x = shared_as_read(ctx, x, x.dtype)
    best = reduce(ctx, op, x, dims, acc, acc)
    small = torch.int32 if ex.bounds(n)[1] < 2**31 else torch.int64
    v, top = va.cast(x.value, acc), expand(best, x.sizes).value
    hit = s.binary("eq", v, top)
    if acc.is_floating_point:
        hit = va.apply("logical_or", hit, s.unary("isnan", v))
    position = va.cast(va.index(ex.flatten([x.sizes[k] for k in dims], [points(x.sizes)[k] for k in dims])), small)
    at = s.where(hit, position, torch.iinfo(small).max)
    return best, reduce(ctx, "min", Tensor(x.sizes, small, at), dims, small, small)


def _position(op: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        reduced_dims = norm_dims(dim, len(x.sizes))
        _require_elements(ctx, x, reduced_dims, dim is not None, as_index_error=True)
        _, at = extremum_position(ctx, op, x, reduced_dims)
        at = drop_dims(at, reduced_dims, keepdim)
        return Tensor(at.sizes, torch.int64, va.cast(at.value, torch.int64))

    return lower


lowers("argmax.default")(_position("max"))
lowers("argmin.default")(_position("min"))


def _with_position(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(ctx: Ctx, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        reduced_dims = norm_dims(dim, len(x.sizes))
        _require_elements(ctx, x, reduced_dims, True)
        best, at = (drop_dims(t, reduced_dims, keepdim) for t in extremum_position(ctx, op, x, reduced_dims))
        return finish(ctx, best.sizes, x.dtype, best.value), Tensor(
            at.sizes, torch.int64, va.cast(at.value, torch.int64)
        )

    return lower


lowers("max.dim")(_with_position("max"))
lowers("min.dim")(_with_position("min"))


@lowers("_softmax.default")
def softmax(ctx: Ctx, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    # exp(x - max) / sum(exp(x - max))
    out = result_of(ctx)
    acc = compute_dtype(out.dtype)
    reduced_dims = norm_dims(dim, len(x.sizes))
    x = shared_by_rows(ctx, x, acc, out)
    top = reduce(ctx, "max", x, reduced_dims, acc, acc)
    e = Tensor(x.sizes, acc, s.unary("exp", s.sub(va.cast(x.value, acc), expand(top, x.sizes).value)))
    e = e if ctx.gpu else ctx.realize(e, out)
    total = reduce(ctx, "sum", e, reduced_dims, acc, acc)
    return finish(ctx, x.sizes, out.dtype, s.div(e.value, expand(total, x.sizes).value))


@lowers("_log_softmax.default")
def log_softmax(ctx: Ctx, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    # x - max - log sum exp(x - max)
    out = result_of(ctx)
    acc = compute_dtype(out.dtype)
    reduced_dims = norm_dims(dim, len(x.sizes))
    x = shared_by_rows(ctx, x, acc, out)
    top = reduce(ctx, "max", x, reduced_dims, acc, acc)
    shifted = s.sub(va.cast(x.value, acc), expand(top, x.sizes).value)
    total = reduce(ctx, "sum", Tensor(x.sizes, acc, s.unary("exp", shifted)), reduced_dims, acc, acc)
    log = Tensor(total.sizes, acc, s.unary("log", total.value))
    return finish(ctx, x.sizes, out.dtype, s.sub(shifted, expand(log, x.sizes).value))


def running(ctx: Ctx, op: str, x: Tensor, dim: int, acc: torch.dtype, order: Sequence[int] | None = None) -> Tensor:
    """Emit an inclusive scan of `x` along `dim` and return its result, in a buffer of dtype `acc`.

    `order`: the dimensions of the buffer from slowest to fastest, row-major by default.
    """
    value = va.cast(va.cast(x.value, x.dtype), acc)
    if not x.sizes or x.sizes[dim] == 1:
        return Tensor(x.sizes, acc, value)
    strides = ctx.strides_like(x.sizes, None) if order is None else dense_strides(order, x.sizes)
    buffer = ctx.new_buffer(acc, x.sizes, strides)
    ax = axes(x.sizes)
    index = ex.add(0, *(ex.mul(st, ex.ix(a)) for st, a in zip(buffer.strides, ax, strict=True)))
    parallel = tuple(a for k, a in enumerate(ax) if k != dim and x.sizes[k] != 1)
    if order is not None:
        parallel = tuple(ax[k] for k in order if ax[k] in parallel)
    ctx.emit(Scan(buffer.name, parallel, (ax[dim],), index, op, value, ctx.origins()))
    return of_buffer(buffer)


def _scanned(ctx: Ctx, x: Tensor, dim: int) -> tuple[Tensor, list[int] | None]:
    """Return `x` as a scan along `dim` reads it, and the order of the result's dimensions in memory (None: row-major).

    Rows that cross two other dimensions are scanned as they lie if kernels alone read the result, and else copied.
    """
    if not _crosses_three_dims(ctx, x, dim):
        return x, None
    if not is_temporary(ctx, ctx.node):
        return ctx.realize(x.rounded(), fresh=True), None
    return x, slowest_first(x, x.value)


def _scan(op: str) -> Callable[..., Tensor]:
    def lower(ctx: Ctx, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        out = result_of(ctx)
        # the input is converted to the result's dtype before it is scanned
        x = Tensor(x.sizes, out.dtype, va.cast(va.cast(x.value, x.dtype), out.dtype)) if x.dtype != out.dtype else x
        dim %= max(len(x.sizes), 1)
        x, order = _scanned(ctx, x, dim)
        reduced = running(ctx, op, x, dim, compute_dtype(out.dtype), order)
        result = finish(ctx, x.sizes, out.dtype, reduced.value)
        # readers take half the bytes of the running result, which then stays in registers
        strides = None if order is None else dense_strides(order, x.sizes)
        return ctx.realize(result, strides=strides) if out.dtype in LOW_PRECISION else result

    return lower


lowers("cumsum.default")(_scan("sum"))
lowers("cumprod.default")(_scan("prod"))
lowers("logcumsumexp.default")(_scan("logaddexp"))


def _running_extremum(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def lower(ctx: Ctx, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        dim %= max(len(x.sizes), 1)
        x = shared(ctx, x, x.dtype)
        best = running(ctx, op, x, dim, x.dtype if x.dtype == torch.bool else compute_dtype(x.dtype))
        # an element that equals the extremum so far, or is NaN, is its latest position
        v = x.computed()
        hit = s.binary("eq", v, best.value)
        if v.dtype.is_floating_point:
            hit = va.apply("logical_or", hit, s.unary("isnan", v))
        own_position = va.index(points(x.sizes)[dim] if x.sizes else 0)
        at = running(ctx, "max", Tensor(x.sizes, torch.int64, s.where(hit, own_position, 0)), dim, torch.int64)
        return finish(ctx, x.sizes, x.dtype, best.value), at

    return lower


lowers("cummax.default")(_running_extremum("max"))
lowers("cummin.default")(_running_extremum("min"))


@lowers("logsumexp.default")
def logsumexp(ctx: Ctx, x: Tensor, dims: Dims, keepdim: bool = False) -> Tensor:
    # max + log sum exp(x - max), or max if it is infinite
    out = result_of(ctx)
    if not x.dtype.is_floating_point:
        raise FallBack("logsumexp of integers")
    acc = compute_dtype(out.dtype)
    reduced_dims = norm_dims(dims, len(x.sizes))
    x = shared_by_rows(ctx, x, acc, None)
    top = reduce(ctx, "max", x, reduced_dims, acc, acc)
    e = Tensor(x.sizes, acc, s.unary("exp", s.sub(va.cast(x.value, acc), expand(top, x.sizes).value)))
    total = reduce(ctx, "sum", e, reduced_dims, acc, acc)
    infinite = s.binary("eq", s.unary("abs", top.value), math.inf)
    value = s.where(infinite, top.value, s.add(s.unary("log", total.value), top.value))
    reduced = drop_dims(Tensor(total.sizes, acc, value), reduced_dims, keepdim)
    return finish(ctx, reduced.sizes, out.dtype, reduced.value)
