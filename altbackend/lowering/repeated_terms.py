"""Factors of a reduction's terms that a GPU would compute anew for each of many results."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Index
from ..ir.value import Value
from .context import Ctx
from .tensor import Tensor, axes

REPEATS = 4  # results that compute a factor anew
COSTLY = 8  # float additions of a factor: an exponential, a quotient, or several products
WORK = 1 << 26  # float additions of all results that take a GPU longer than a launch does


def stored_factors(ctx: Ctx, sizes: Sequence[Index], dims: Sequence[int], terms: Value) -> Value:
    """Return the terms of a reduction over `dims` of `sizes` with costly factors that lack a result's dimension stored.

    A softmax times a matrix is an example: sum_k exp(a[i, k] - m[i]) / s[i] * b[k, j] computes an exponential and a
    quotient for each column j. A factor that a condition guards, or that may raise an error, stays where it is.
    """
    names = axes(sizes)
    results = frozenset(a for k, (a, n) in enumerate(zip(names, sizes, strict=True)) if k not in dims and n != 1)
    reduced = frozenset(names[k] for k in dims)
    known: dict[Value, Value] = {}

    def visit(v: Value) -> Value:
        if v not in known:
            known[v] = _stored(v) if suits(v) else _rebuilt(v)
        return known[v]

    def suits(v: Value) -> bool:
        if v.op in ("load", "const", "index") or not reduced & v.vars or va.may_raise(v):
            return False
        if v.op == "cast" and v.dtype.itemsize >= v.args[0].dtype.itemsize:  # its argument takes no more memory
            return False
        absent = [n for a, n in zip(names, sizes, strict=True) if a in results - v.vars]
        work = ex.bounds(ex.prod(sizes))[1] * va.flops(v)
        return va.flops(v) >= COSTLY and ex.bounds(ex.prod(absent))[0] >= REPEATS and work >= WORK

    def _stored(v: Value) -> Value:
        own = tuple(n if a in v.vars else 1 for a, n in zip(names, sizes, strict=True))
        return ctx.realize(Tensor(own, v.dtype, v)).value

    def _rebuilt(v: Value) -> Value:
        if v.op in ("load", "const", "index", "wrap_index"):
            return v
        guarded = (visit(v.args[0]), *v.args[1:]) if v.op == "masked" else tuple(map(visit, v.args))
        return v if guarded == v.args else va.make(v.op, guarded, v.dtype, v.attr)

    return visit(terms) if results and reduced & terms.vars else terms
