"""View operators as index maps; a tensor is copied only if its index would need a division per element."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...aten.name import operator_name
from ...aten.reduction import is_scan
from ...aten.view import passes_storage_on, storage_owner
from ...compat import torch_api
from ...errors import Unsupported
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Extern, View
from ...ir.value import Value
from .. import extern, facts
from .. import scalar as s
from ..context import Ctx, memory_order
from ..registry import FallBack, lowers
from ..temporary_layout import are_kernels, is_computed, order_of_operands, readers
from ..tensor import Size, Tensor, as_view, expand, full, of_view, permuted, points, with_dim


def out_sizes(ctx: Ctx) -> tuple[Index, ...]:
    """Return the traced shape of the node that is lowered."""
    return ctx.result_sizes


def has_division(v: va.Value) -> bool:
    """Return whether the index of a load has a division or remainder."""
    return any("%" in ex.show(i) or "//" in ex.show(i) for _, i in va.loads(v))


@lowers("view.default", "reshape.default", "_unsafe_view.default", "_reshape_alias.default")
def view(ctx: Ctx, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return reshape(ctx, x, out_sizes(ctx), traced=True)


def reshape(ctx: Ctx, x: Tensor, sizes: tuple[Index, ...], traced: bool = False) -> Tensor:
    """Return `x` in another shape, row-major; a source whose loads would need divisions is stored first.

    `traced`: the node being lowered is this reshape, so a reshape that was traced as a view may take the traced
    strides.
    """
    if sizes == x.sizes:
        return x
    if (regrouped := _regroup(x.sizes, sizes)) is not None:
        return Tensor(sizes, x.dtype, x.at(regrouped))
    where = ex.unflatten(ex.flatten(sizes, points(sizes)), x.sizes)
    value = x.at(where)
    if has_division(value) and not has_division(x.value) and not ctx.node.meta.get("read_through"):
        if traced and (same := _as_traced(ctx, x, sizes)) is not None:
            return same
        value = ctx.realize(x, fresh=as_view(x) is not None).at(where)
    return Tensor(sizes, x.dtype, value)


def _as_traced(ctx: Ctx, x: Tensor, sizes: tuple[Index, ...]) -> Tensor | None:
    """Return the node being lowered as a view with the traced strides, or None.

    `x` must have the strides of the traced argument. With symbolic sizes the index algebra may not simplify the
    divisions of a reshape that torch has proved to be a view.
    """
    node = ctx.node
    argument_fake, result_fake = (
        n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in (node.args[0], node)
    )
    if not isinstance(argument_fake, torch.Tensor) or not isinstance(result_fake, torch.Tensor):
        return None
    if torch_api.storage_of(argument_fake) is None or torch_api.storage_of(argument_fake) != torch_api.storage_of(
        result_fake
    ):
        return None
    traced_strides = ctx.shape(argument_fake.stride())
    v = as_view(x, traced_strides)
    if v is None or any(a != b and n != 1 for a, b, n in zip(v.strides, traced_strides, v.sizes, strict=True)):
        return None
    return of_view(View(v.buffer, sizes, ctx.shape(result_fake.stride()), v.offset), x.dtype)


def _regroup(old: tuple[Index, ...], new: tuple[Index, ...]) -> list[Index] | None:
    """Return the index map between shapes that differ only by dimensions of size 1, or None for other shapes."""
    if tuple(n for n in old if n != 1) != tuple(n for n in new if n != 1):
        return None
    live = iter([p for p, n in zip(points(new), new, strict=True) if n != 1])
    return [0 if n == 1 else next(live) for n in old]


@lowers("permute.default")
def permute(ctx: Ctx, x: Tensor, order: Sequence[int]) -> Tensor:
    return permuted(x, [k % len(x.sizes) for k in order])


@lowers("t.default")
def t(ctx: Ctx, x: Tensor) -> Tensor:
    return x if len(x.sizes) < 2 else permute(ctx, x, [1, 0])


@lowers("transpose.int")
def transpose(ctx: Ctx, x: Tensor, a: int, b: int) -> Tensor:
    order = list(range(len(x.sizes)))
    if order:
        order[a], order[b] = order[b], order[a]
    return permute(ctx, x, order)


@lowers("expand.default")
def expand_op(ctx: Ctx, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return expand(x, out_sizes(ctx))


@lowers("unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims")
def unsqueeze(ctx: Ctx, x: Tensor, *args: object) -> Tensor:
    return reshape(ctx, x, out_sizes(ctx))


@lowers("select.int")
def select(ctx: Ctx, x: Tensor, dim: int, at: Size) -> Tensor:
    dim %= len(x.sizes)
    index = _selected(ctx, at, x.sizes[dim], dim)
    sizes = x.sizes[:dim] + x.sizes[dim + 1 :]
    p = points(sizes)
    value = x.at([*p[:dim], index, *p[dim:]])
    _check_unread(ctx, index, value)
    return Tensor(sizes, x.dtype, value)


def _check_unread(ctx: Ctx, index: Index, value: Value) -> None:
    """Let the host program compute a position that `value` does not contain, since that is what checks it.

    No element of a filled or expanded tensor depends on its position.
    """
    if not ex.syms_of(index) <= value.syms:
        ctx.require(f"{ex.show(index)} >= 0", "a position is negative", as_index_error=True)


def _selected(ctx: Ctx, at: Size, size: Index, dim: int) -> Index:
    """Return a position of either sign, counted from the front; the host program checks one that may be out of range.

    Tracing does not check a number that it has made a constant late, so that a constant may be out of range, too.
    """
    index = ctx.index(at)
    if isinstance(index, int) and isinstance(size, int) and -size <= index < size:
        return index % size
    if ex.known_nonnegative(index) and ex.known_less(index, size):
        return index
    if ex.bounds(size)[1] <= 1 or (isinstance(index, int) and isinstance(size, int)):
        raise FallBack(f"position {ex.show(index)} of {ex.show(size)}, which the library checks")
    name = ctx.number(f"position({ex.show(index)}, {ex.show(size)}, {dim})")
    return ex.sym(name, 0, ex.bounds(size)[1] - 1)


@lowers("slice.Tensor")
def slice_op(
    ctx: Ctx, x: Tensor, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1
) -> Tensor:
    dim %= len(x.sizes)
    sizes = out_sizes(ctx)
    begin = slice_start(ctx, start, x.sizes[dim])
    p = list(points(sizes))
    p[dim] = ex.add(begin, ex.mul(p[dim], ctx.index(step)))
    return Tensor(sizes, x.dtype, x.at(p))


def slice_start(ctx: Ctx, start: object, size: Index) -> Index:
    """Return the first position of a slice in a dimension of `size`, by Python's rules."""
    begin: Index = 0 if start is None else ctx.index(start)
    if isinstance(begin, int) and begin < 0:
        begin = ex.maximum(ex.add(begin, size), 0)
    elif not ex.known_nonnegative(begin):
        name = ctx.number(f"slice_begin({ex.show(begin)}, {ex.show(size)})")
        return ex.sym(name, 0, ex.bounds(size)[1])
    return ex.minimum(begin, size)


@lowers("split_with_sizes.default", "split.Tensor", "split.sizes", "chunk.default")
def split(ctx: Ctx, x: Tensor, how: object, dim: int = 0) -> tuple[Tensor, ...]:
    dim %= len(x.sizes)
    out = []
    begin: Index = 0
    for fake in ctx.results:
        sizes = ctx.shape(fake.shape)
        p = list(points(sizes))
        p[dim] = ex.add(begin, p[dim])
        out.append(Tensor(sizes, x.dtype, x.at(p)))
        begin = ex.add(begin, sizes[dim])
    return tuple(out)


@lowers("unbind.int")
def unbind(ctx: Ctx, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    n = x.sizes[dim]
    if not isinstance(n, int):
        raise FallBack("the number of results is symbolic")
    return tuple(select(ctx, x, dim, k) for k in range(n))


@lowers("diagonal.default")
def diagonal(ctx: Ctx, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rank = len(x.sizes)
    dim1, dim2 = dim1 % rank, dim2 % rank
    sizes = out_sizes(ctx)
    p = points(sizes)
    rest = iter(p[:-1])
    where: list[Index] = []
    for k in range(rank):
        if k == dim1:
            where.append(ex.add(p[-1], max(-offset, 0)))
        elif k == dim2:
            where.append(ex.add(p[-1], max(offset, 0)))
        else:
            where.append(next(rest))
    return Tensor(sizes, x.dtype, x.at(where))


@lowers("unfold.default")
def unfold(ctx: Ctx, x: Tensor, dim: int, size: int, step: int) -> Tensor:
    sizes, x = out_sizes(ctx), with_dim(x)
    dim %= len(x.sizes)
    p = list(points(sizes)) if len(sizes) > 1 else [0, *points(sizes)]
    window = p.pop()
    p[dim] = ex.add(ex.mul(p[dim], step), window)
    return Tensor(sizes, x.dtype, x.at(p))


@lowers("as_strided.default")
def as_strided(ctx: Ctx, x: Tensor, size: Sequence[Size], stride: Sequence[Size], offset: Size | None = None) -> Tensor:
    """Lower as_strided to a view of the argument's buffer, or of the buffer of the value that owns its storage.

    Raises Unsupported for a view that reaches beyond both.
    """
    node = ctx.node
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    if offset is not None and facts.in_an_input(source):
        raise FallBack("no guard fixes the position of an input in its storage")
    storage_offset = source.meta["val"].storage_offset() if offset is None else offset
    sizes, strides = ctx.shape(size), ctx.shape(stride)
    reach = ex.add(0, *(ex.mul(ex.sub(n, 1), s) for n, s in zip(sizes, strides, strict=True)))
    owner = storage_owner(source)
    static = True
    for n, lowered in dict.fromkeys(((source, x), (owner, ctx.env[owner]))):
        if not isinstance(lowered, Tensor) or not _in_one(n.meta["val"], source.meta["val"]):
            continue
        v = _with_traced_strides(ctx, lowered, n.meta["val"])
        away = ex.sub(ctx.index(storage_offset), ctx.index(n.meta["val"].storage_offset()))
        first = ex.add(v.offset, away)
        room = ex.sub(ex.sub(ctx.buffers[v.buffer].extent, 1), ex.add(first, reach))
        if 0 in sizes or facts.in_an_input(source) or (ex.known_nonnegative(first) and ex.known_nonnegative(room)):
            return of_view(View(v.buffer, sizes, strides, first), x.dtype)
        static = isinstance(first, int) and isinstance(room, int)
    if static:
        raise Unsupported(node, "a view that reaches beyond the storage of its argument")
    return extern.window(ctx, v, View(v.buffer, sizes, strides, away), x.dtype)


def _in_one(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two traced values share a storage, with equal dtype, negative bit and conjugate bit."""
    same = (a.dtype, a.is_neg(), a.is_conj()) == (b.dtype, b.is_neg(), b.is_conj())
    return same and torch_api.storage_of(a) == torch_api.storage_of(b)


def _with_traced_strides(ctx: Ctx, x: Tensor, fake: torch.Tensor) -> View:
    """Return `x` in a buffer with the strides of the traced `fake`."""
    traced_strides = ctx.shape(fake.stride())
    v = as_view(ctx.realize(x, fake), traced_strides)
    if v is None or any(a != b for a, b, n in zip(v.strides, traced_strides, x.sizes, strict=True) if n != 1):
        return extern.with_strides(ctx, x, traced_strides)
    return v


@lowers("flip.default")
def flip(ctx: Ctx, x: Tensor, dims: Sequence[int]) -> Tensor:
    if not x.sizes:  # torch accepts dimension 0 of a 0-d tensor
        return x
    p = list(points(x.sizes))
    for d in dims:
        p[d] = ex.sub(ex.sub(x.sizes[d], 1), p[d]) if x.sizes[d] != 1 else 0
    return Tensor(x.sizes, x.dtype, x.at(p))


@lowers("roll.default")
def roll(ctx: Ctx, x: Tensor, shifts: Sequence[object], dims: Sequence[int] = ()) -> Tensor:
    if not x.sizes:
        return x
    if not dims:
        flat = reshape(ctx, x, (ex.prod(x.sizes),))
        return reshape(ctx, _rolled(ctx, flat, shifts, [0]), x.sizes)
    return _rolled(ctx, x, shifts, dims)


def _rolled(ctx: Ctx, x: Tensor, shifts: Sequence[object], dims: Sequence[int]) -> Tensor:
    p = list(points(x.sizes))
    for shift, d in zip(shifts, dims, strict=True):
        p[d] = ex.mod(ex.add(p[d], ex.sub(x.sizes[d], ex.mod(ctx.index(shift), x.sizes[d]))), x.sizes[d])
    return Tensor(x.sizes, x.dtype, x.at(p))


@lowers("repeat.default")
def repeat(ctx: Ctx, x: Tensor, repeats: Sequence[object]) -> Tensor:
    sizes = out_sizes(ctx)
    lead = len(sizes) - len(x.sizes)
    where = [ex.mod(i, n) for i, n in zip(points(sizes)[lead:], x.sizes, strict=True)]
    return Tensor(sizes, x.dtype, x.at(where))


@lowers("constant_pad_nd.default")
def constant_pad(ctx: Ctx, x: Tensor, pad: Sequence[object], number: float = 0) -> Tensor:
    return padded(x, out_sizes(ctx), first_positions(ctx, pad, len(x.sizes)), number)


def first_positions(ctx: Ctx, pad: Sequence[object], rank: int) -> list[Index]:
    """Return the position of the operand's first element in a padding of it, one number for each dimension."""
    before: list[Index] = [0] * rank
    for k, n in enumerate(pad[::2]):
        before[rank - 1 - k] = ctx.index(n)
    return before


def padded(x: Tensor, sizes: tuple[Index, ...], before: Sequence[Index], number: float) -> Tensor:
    """Return `x` in a tensor of `sizes` behind `before[k]` elements of dimension k, with `number` around it."""
    p = [ex.sub(i, n) for i, n in zip(points(sizes), before, strict=True)]
    conds = []
    for i, first, n, outer in zip(p, before, x.sizes, sizes, strict=True):
        if first != 0 or n != outer:
            conds += [va.compare_index("ge", i, 0), va.compare_index("lt", i, n)]
    value = x.at(p)
    return Tensor(sizes, x.dtype, va.masked(va.conjunction(*conds), value, va.const(number, value.dtype)))


@lowers("cat.default")
def cat(ctx: Ctx, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Lower a concatenation: each part is written into its region of one new buffer."""
    out, sizes = ctx.result, ctx.result_sizes
    dim %= len(sizes)
    parts = [p for p in parts if len(p.sizes) == len(sizes) and p.sizes[dim] != 0]
    if not parts:
        return full(sizes, 0, out.dtype)  # without elements
    if len(parts) == 1:
        return Tensor(sizes, out.dtype, va.cast(va.cast(parts[0].value, parts[0].dtype), out.dtype))
    if _is_read_in_place(ctx, parts):
        return Tensor(sizes, out.dtype, _choice_of_parts(parts, sizes, dim, out.dtype))
    any_order = are_kernels(readers(ctx.node, None))
    strides = order_of_operands(ctx, parts, sizes, out) if any_order else None
    buffer = ctx.new_buffer(out.dtype, sizes, strides or ctx.strides_like(sizes, out))
    begin: Index = 0
    for part in parts:
        ctx.store_region(buffer, Tensor(part.sizes, out.dtype, va.cast(part.value, part.dtype)), dim, begin)
        begin = ex.add(begin, part.sizes[dim])
    return of_view(View(buffer.name, buffer.sizes, buffer.strides), out.dtype)


MOST_PARTS, PART_FLOPS, PART_LOADS = 6, 8, 3  # limits for a concatenation that its readers compute
MOST_READERS = 2


def _is_read_in_place(ctx: Ctx, parts: Sequence[Tensor]) -> bool:
    """Return whether the readers of a concatenation choose the part of each element, and nothing is stored.

    This holds on a GPU under two conditions. No kernel computes a part, since it could store the part in its place. The
    readers are kernels, for which writing and reading the concatenation would be two more passes over memory.
    """
    if not ctx.gpu or len(parts) > MOST_PARTS or ctx.returned[ctx.node] or len(ctx.node.users) > MOST_READERS:
        return False
    if not all(_reads_each_element_once(u) for u in ctx.node.users):
        return False
    computed = {n.out for n in ctx.nodes if not isinstance(n, Extern)}
    return all(_is_plain(p, computed) for p in parts)


def _reads_each_element_once(user: torch.fx.Node) -> bool:
    if user.op != "call_function":
        return False
    if passes_storage_on(user):
        return bool(user.users) and all(_reads_each_element_once(u) for u in user.users)
    converts = operator_name(user.target) == "_to_copy"
    return converts or is_computed(user) or is_scan(user.target)


def _is_plain(part: Tensor, computed: set[str]) -> bool:
    """Return whether a part is little more than a load of a tensor that a library call or the caller wrote."""
    loads = va.loads(part.value)
    few = va.flops(part.value) <= PART_FLOPS and 0 < len(loads) <= PART_LOADS
    return few and not any(b in computed for b, _ in loads)


def _choice_of_parts(parts: Sequence[Tensor], sizes: Sequence[Index], dim: int, dtype: torch.dtype) -> va.Value:
    """Return the value of a concatenation at a point: that of the part in which the point lies."""
    p = list(points(sizes))
    end = sizes[dim]
    value = va.const(0, dtype)
    for part in reversed(parts):
        begin = ex.sub(end, part.sizes[dim])
        inside = va.conjunction(va.compare_index("ge", p[dim], begin), va.compare_index("lt", p[dim], end))
        own = part.at([*p[:dim], ex.sub(p[dim], begin), *p[dim + 1 :]])
        value = va.masked(inside, va.cast(va.cast(own, part.dtype), dtype), value)
        end = begin
    return value


@lowers("slice_scatter.default")
def slice_scatter(
    ctx: Ctx, x: Tensor, src: Tensor, dim: int = 0, start: Size | None = None, end: Size | None = None, step: int = 1
) -> Tensor:
    dim %= len(x.sizes)
    begin = slice_start(ctx, start, x.sizes[dim])
    p = list(points(x.sizes))
    source = expand(src, (*x.sizes[:dim], _slice_length(ctx, dim), *x.sizes[dim + 1 :]))
    moved = ex.sub(p[dim], begin)
    conds = [va.compare_index("ge", p[dim], begin)]
    conds.append(va.compare_index("lt", moved, ex.mul(source.sizes[dim], step)))
    if step != 1:
        conds.append(s.binary("eq", va.index(ex.mod(moved, step)), 0))
    p[dim] = ex.floordiv(moved, step)
    value = va.cast(source.at(p), x.value.dtype)
    return Tensor(x.sizes, x.dtype, va.masked(va.conjunction(*conds), value, x.value))


def _slice_length(ctx: Ctx, dim: int) -> Index:
    return ctx.index(ctx.traced(1).shape[dim])


@lowers("select_scatter.default")
def select_scatter(ctx: Ctx, x: Tensor, src: Tensor, dim: int, at: Size) -> Tensor:
    dim %= len(x.sizes)
    index = _selected(ctx, at, x.sizes[dim], dim)
    p = points(x.sizes)
    hit = s.binary("eq", va.index(p[dim]), va.index(index)) if x.sizes[dim] != 1 else va.const(True, torch.bool)
    value = va.where(hit, va.cast(src.at([*p[:dim], *p[dim + 1 :]]), x.value.dtype), x.value)
    _check_unread(ctx, index, value)
    return Tensor(x.sizes, x.dtype, value)


@lowers("diagonal_scatter.default")
def diagonal_scatter(ctx: Ctx, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rank = len(x.sizes)
    dim1, dim2 = dim1 % rank, dim2 % rank
    p = points(x.sizes)
    along = ex.sub(p[dim1], max(-offset, 0))  # position on the diagonal
    on_diagonal = s.binary("eq", va.index(ex.sub(p[dim2], p[dim1])), offset)
    hit = va.conjunction(on_diagonal, va.compare_index("ge", along, 0), va.compare_index("lt", along, src.sizes[-1]))
    value = va.cast(src.at([*(i for k, i in enumerate(p) if k not in (dim1, dim2)), along]), x.value.dtype)
    return Tensor(x.sizes, x.dtype, va.masked(hit, value, x.value))


@lowers("as_strided_scatter.default")
def as_strided_scatter(
    ctx: Ctx, x: Tensor, src: Tensor, size: Sequence[Size], stride: Sequence[Size], offset: Size | None = None
) -> Tensor:
    """Lower an as_strided_scatter whose `src` covers all of `x`; others are library calls."""
    fake = ctx.traced(0)
    strides, sizes = ctx.shape(stride), ctx.shape(size)
    order = memory_order(strides, sizes)
    dense = tuple(strides[k] for k in order if sizes[k] != 1) == ex.strides_for(
        tuple(sizes[k] for k in order if sizes[k] != 1)
    )
    covers_all = ex.prod(sizes) == ex.prod(x.sizes) and ctx.shape(fake.stride()) == ex.strides_for(x.sizes)
    if not (dense and covers_all and offset in (0, None) and fake.storage_offset() == 0):
        raise FallBack("the source covers only a part of the tensor")
    # position in memory -> coordinates of src, slowest first
    inner = ex.unflatten(ex.flatten(x.sizes, points(x.sizes)), tuple(sizes[k] for k in order))
    where: list[Index] = [0] * len(sizes)
    for k, i in zip(order, inner, strict=True):
        where[k] = i
    return Tensor(x.sizes, x.dtype, va.cast(src.at(where), x.dtype))
