"""Values that a GPU would compute anew for each of many results."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..aten.name import operator_name
from ..aten.pointwise import is_pointwise
from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Index
from ..ir.loops import Reduction
from ..ir.value import Value
from .context import Ctx
from .tensor import Tensor, axes, of_buffer

REPEATS = 4  # results that compute a value anew
COSTLY = 8  # float additions of a value: an exponential, a quotient, or several products
WORK = 1 << 26  # float additions of all results that take a GPU longer than a launch does


def stored_factors(ctx: Ctx, sizes: Sequence[Index], dims: Sequence[int], terms: Value) -> Value:
    """Return the terms of a reduction over `dims` of `sizes` with costly factors that lack a result's dimension stored.

    A softmax times a matrix is an example: sum_k exp(a[i, k] - m[i]) / s[i] * b[k, j] computes an exponential and a
    quotient for each column j. A factor that a condition guards, or that may raise an error, stays where it is.
    """
    names = axes(sizes)
    results = frozenset(a for k, (a, n) in enumerate(zip(names, sizes, strict=True)) if k not in dims and n != 1)
    reduced = frozenset(names[k] for k in dims)
    rewritten: dict[Value, Value] = {}

    def visit(v: Value) -> Value:
        if va.flops(v) < COSTLY:
            return v
        if v not in rewritten:
            rewritten[v] = stored(v) if suits(v) else rebuilt(v)
        return rewritten[v]

    def suits(v: Value) -> bool:
        if v.op in ("load", "const", "index") or not reduced & v.vars or va.may_raise(v):
            return False
        if v.op == "cast" and v.dtype.itemsize >= v.args[0].dtype.itemsize:  # its argument takes no more memory
            return False
        absent = [n for a, n in zip(names, sizes, strict=True) if a in results - v.vars]
        work = ex.bounds(ex.prod(sizes))[1] * va.flops(v)
        return ex.bounds(ex.prod(absent))[0] >= REPEATS and work >= WORK

    def stored(v: Value) -> Value:
        own = tuple(n if a in v.vars else 1 for a, n in zip(names, sizes, strict=True))
        return ctx.realize(Tensor(own, v.dtype, v)).value

    def rebuilt(v: Value) -> Value:
        if v.op in ("load", "const", "index", "wrap_index"):
            return v
        guarded = (visit(v.args[0]), *v.args[1:]) if v.op == "masked" else tuple(map(visit, v.args))
        return v if guarded == v.args else va.make(v.op, guarded, v.dtype, v.attr)

    return visit(terms) if results and reduced & terms.vars else terms


def stored_statistic(ctx: Ctx, node: torch.fx.Node, t: Tensor) -> Tensor | None:
    """Return `t` stored if it is a costly function of a reduction that pointwise operators broadcast; else None.

    The root of a mean square is an example. The kernel that reduces computes it once a row, and it then stores this in
    place of the total. A kernel that reads the total would compute a quotient and a root for each element.
    """
    flops = va.flops(t.value)
    if not ctx.gpu or flops < COSTLY or va.may_raise(t.value) or not _broadcast(ctx, node, t, flops):
        return None
    names = {b for b, _ in va.loads(t.value)}
    total = next((n for n in ctx.nodes if isinstance(n, Reduction) and n.out in names), None)
    if total is None:
        return None
    b = ctx.new_buffer(t.value.dtype, t.sizes, ctx.strides_like(t.sizes, _last_reader(node).meta["val"]))
    ctx.store(b, t, order=_loop_order(ctx, total, t.sizes))
    return Tensor(t.sizes, t.dtype, of_buffer(b).value)


def _loop_order(ctx: Ctx, total: Reduction, sizes: Sequence[Index]) -> list[int] | None:
    """Return the order of a reduction's rows, so that its kernel computes a function of its results in the same loops.

    None: the results have other dimensions than `sizes`.
    """
    buffer = ctx.buffers[total.out]
    if buffer.sizes != tuple(sizes):
        return None
    dims = enumerate(zip(buffer.strides, sizes, strict=True))
    place: dict[object, int] = {(stride, n): k for k, (stride, n) in dims if n != 1}
    rows = [place.get((ex.coefficient(total.index, v), ex.size_of(v))) for v in total.dims]
    order = [k for k in rows if k is not None] + [k for k, n in enumerate(sizes) if n == 1]
    return order if sorted(order) == list(range(len(sizes))) else None


def _last_reader(node: torch.fx.Node) -> torch.fx.Node:
    """Return the last of a chain of pointwise operators and copies: a kernel stores in its layout."""
    reader = next(iter(node.users))
    while len(reader.users) == 1:
        (user,) = reader.users
        if not is_pointwise(user.target) and operator_name(user.target) != "clone":
            break
        reader = user
    return reader


def _broadcast(ctx: Ctx, node: torch.fx.Node, t: Tensor, flops: int) -> bool:
    """Return whether all readers of `t` are pointwise and large: to compute it anew takes them more than a launch."""
    least, most = REPEATS * ex.bounds(ex.prod(t.sizes))[0], 0
    for user in node.users:
        fake = user.meta.get("val")
        if not isinstance(fake, torch.Tensor) or not is_pointwise(user.target):
            return False
        elements = ex.bounds(ex.prod(ctx.shape(fake.shape)))[1]
        if elements < least:
            return False
        most = max(most, elements)
    return most * flops >= WORK
