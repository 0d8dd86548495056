"""One pass over long rows for a maximum and the sums of exponentials below it (`online.py` finds them)."""

from __future__ import annotations

import torch

from ..ir import value as va
from ..ir.value import Value
from .ast import Let, identity, name
from .online import Online
from .tile_ast import Accumulator, Comment, TileLoop
from .tile_scope import Emitter, Scope, bind, let, on_tile, row_axis, row_length, row_points, shape_of, store, whole
from .tile_totals import provenance


def emit_online(e: Emitter, scope: Scope, part: Online) -> None:
    """One pass for a maximum and the sums of exponentials below it.

    m' = max(m, max v);  s' = s exp(m - m') + sum exp(v - m'), where exp(-inf - -inf) counts as 0.
    """
    n, rank = row_length(e, part.top), e.blocks.rank
    row_axis(e, scope, n)
    inner, after = Scope(scope, "r"), Scope(scope)
    row_points(e, inner, n, "base")
    for q in part.passed:
        e.writers[q.node.out] = on_tile(e, inner, q)
    inner.body.append(Comment(provenance(part.top)))
    top = on_tile(e, inner, part.top)
    axes = frozenset({"x"}) if e.blocks.tiled_x else frozenset()
    value = bind(e, inner, top.value)
    kind = value.dtype
    best, sums = _running(e, scope, "best", "max", kind, axes), []
    block = va.make("reduced", (whole(e, inner, top, value, "max"),), kind, ("max", rank - 1, rank))
    new = let(e, inner, va.make("combined", (best, let(e, inner, block, axes)), kind, "max"), axes)
    floor = va.apply("where", va.apply("eq", new, identity("max", kind)), va.const(0.0, kind), new)
    floor = let(e, inner, floor, axes)
    scale = let(e, inner, _exp(e, va.apply("sub", best, floor)), axes)
    for q in part.sums:
        inner.body.append(Comment(provenance(q)))
        total = _running(e, scope, "sum", "sum", kind, axes)
        terms = let(e, inner, _exp(e, va.apply("sub", value, floor)), axes | {"r"})
        held = va.make("reduced", (whole(e, inner, top, terms, "sum"),), kind, ("sum", rank - 1, rank))
        grown = va.apply("add", va.apply("mul", total, scale), let(e, inner, held, axes))
        inner.body.append(Let(total.attr, grown))
        sums.append(total)
    inner.body.append(Let(best.attr, new))
    e.note(n)
    scope.body.append(TileLoop("base", "0", n, e.blocks.name_of(n), tuple(inner.body)))
    for q, result in zip((part.top, *part.sums), (best, *sums), strict=True):
        placed = on_tile(e, scope, q)
        e.results[q.node.out], e.writers[q.node.out] = result, placed
        if q.node.out in e.kernel.stored:
            store(e, after, placed, result)
    scope.body.extend(after.body)


def _running(e: Emitter, scope: Scope, prefix: str, op: str, dtype: torch.dtype, axes: frozenset[str]) -> Value:
    """A number a row that a loop carries."""
    out = name(e.fresh(prefix), dtype)
    e.axes[out] = axes
    scope.body.append(Accumulator(out.attr, dtype, identity(op, dtype), shape_of(e, axes, None)))
    return out


def _exp(e: Emitter, x: Value) -> Value:
    return va.make("fast_exp" if e.fast and x.dtype == torch.float32 else "exp", (x,), x.dtype)
