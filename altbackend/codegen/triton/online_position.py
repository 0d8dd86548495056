"""Emit one pass over long rows for an extremum and its first position.

Every element of the tile has the best value that it has seen, and the least position of that value. A NaN is better
than every number. After the pass the elements of a row are compared.

Where positions grow along the row, an element keeps the first of equal values, and only a better one replaces it:

    better = not (value >= best) and best is no NaN        (of a minimum; the first part holds for a NaN)

A row of which no value is better than the identity, as one of infinities, has the position of its first point.
"""

from __future__ import annotations

from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Reduction
from ...ir.value import Value
from ...schedule.tiling.gpu.online_position import OnlinePosition, first_position
from ..cpp.ast import Let, name
from .emitter import Emitter, Scope
from .one_pass import emit_points, over_blocks
from .scope import bind, fill_block, let, on_tile, row_axis, row_length, shape_of, store
from .tile_ast import Accumulator, Comment
from .totals import provenance

TILE = frozenset({"x", "r"})


@dataclass(frozen=True)
class Running:
    """The names of the best values and of their positions. `op`: "max" or "min".

    `first`: the position of a row's first point, where positions grow along the row.
    """

    best: Value
    at: Value
    op: str
    first: Value | None


def emit_online_position(e: Emitter, scope: Scope, one_pass: OnlinePosition) -> None:
    """Emit the extremum and its position, block after block; a last partial block is masked."""
    n = row_length(e, one_pass.extremum)
    row_axis(e, scope, n)
    run = _start(e, scope, one_pass, n)
    over_blocks(e, scope, n, lambda inner: _turn(e, inner, one_pass, run))
    _finish(e, scope, one_pass, run)


def _start(e: Emitter, scope: Scope, one_pass: OnlinePosition, n: Index) -> Running:
    """Emit the accumulators of the best values and of their positions."""
    reduction_node = one_pass.extremum.node
    assert isinstance(reduction_node, Reduction)
    op = reduction_node.op
    shape = shape_of(e, TILE, n)
    names = []
    dtypes = one_pass.extremum.value.dtype, one_pass.position.dtype
    for prefix, reduction, kind in zip(("best", "at"), (op, "min"), dtypes, strict=True):
        label = e.fresh(prefix)
        scope.body.append(Accumulator(label, kind, va.identity(reduction, kind), shape))
        names.append(name(label, kind))
        e.axes[names[-1]] = TILE
    return Running(names[0], names[1], op, None if e.blocks.backwards else first_position(one_pass))


def _turn(e: Emitter, inner: Scope, one_pass: OnlinePosition, run: Running) -> None:
    """Emit the update by one block of the row."""
    emit_points(e, inner, one_pass.points)
    inner.body.append(Comment(provenance(one_pass.least)))
    extremum = on_tile(e, inner, one_pass.extremum)
    value = fill_block(e, inner, extremum, bind(e, inner, extremum.value), run.op)
    node = replace(one_pass.least.node, value=one_pass.position)
    least = on_tile(e, inner, replace(one_pass.least, node=node, value=one_pass.position))
    position = fill_block(e, inner, least, bind(e, inner, least.value), "min")
    keep = _keep_first if run.first is not None else _keep_least
    keep(e, inner, run, value, position)


def _keep_first(e: Emitter, inner: Scope, run: Running, value: Value, position: Value) -> None:
    """Emit the update by values whose positions come after those of the tile."""
    is_better = va.apply("gt" if run.op == "max" else "lt", value, run.best)
    if value.dtype.is_floating_point:
        is_worse = va.apply("le" if run.op == "max" else "ge", value, run.best)
        is_number = va.apply("eq", run.best, run.best)
        is_better = va.apply("logical_and", va.apply("logical_not", is_worse), is_number)
    is_better = let(e, inner, is_better, TILE)
    inner.body.append(Let(run.at.attr, va.apply("where", is_better, position, run.at)))
    inner.body.append(Let(run.best.attr, va.apply("where", is_better, value, run.best)))


def _keep_least(e: Emitter, inner: Scope, run: Running, value: Value, position: Value) -> None:
    """Emit the update by values at any positions."""
    better = va.apply("gt" if run.op == "max" else "lt", value, run.best)
    equal = va.apply("eq", value, run.best)
    if value.dtype.is_floating_point:
        new, old = va.apply("isnan", value), va.apply("isnan", run.best)
        better = va.apply("logical_or", better, va.apply("logical_and", new, va.apply("logical_not", old)))
        equal = va.apply("logical_or", equal, va.apply("logical_and", new, old))
    is_better, is_equal = (let(e, inner, v, TILE) for v in (better, equal))
    earlier = va.apply("where", is_equal, va.apply("minimum", run.at, position), run.at)
    inner.body.append(Let(run.at.attr, va.apply("where", is_better, position, earlier)))
    inner.body.append(Let(run.best.attr, va.apply("where", is_better, value, run.best)))


def _finish(e: Emitter, scope: Scope, one_pass: OnlinePosition, run: Running) -> None:
    """Emit the extremum of the row and its least position from those of the tile's elements."""
    rank = e.blocks.rank
    axes = frozenset({"x"}) if e.blocks.tiled_x else frozenset[str]()
    reduced = va.make("reduced", (run.best,), run.best.dtype, (run.op, rank - 1, rank))
    total = let(e, scope, reduced, axes, "total")
    hit = va.apply("eq", run.best, total)
    if run.best.dtype.is_floating_point:
        hit = va.apply("logical_or", hit, va.apply("isnan", run.best))
    kind = run.at.dtype
    candidates = let(e, scope, va.apply("where", hit, run.at, va.identity("min", kind)), TILE)
    first = let(e, scope, va.make("reduced", (candidates,), kind, ("min", rank - 1, rank)), axes, "total")
    if run.first is not None:
        none = va.apply("eq", first, va.identity("min", kind))
        first = let(e, scope, va.apply("where", none, bind(e, scope, va.cast(run.first, kind)), first), axes)
    for q, result in zip((one_pass.extremum, one_pass.least), (total, first), strict=True):
        mapped = on_tile(e, scope, q)
        e.results[q.node.out], e.writers[q.node.out] = result, mapped
        if q.node.out in e.kernel.stored:
            store(e, scope, mapped, result)
