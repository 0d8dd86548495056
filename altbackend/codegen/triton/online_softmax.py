"""Emit one pass over long rows for a maximum and the sums of exponentials below it.

While the program reads the row, every thread has a maximum and sums of its own elements. No thread waits for another
before the end. Where a tile has several rows, every element of the tile has a maximum and sums.
"""

from __future__ import annotations

import math

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import LOW_PRECISION
from ...ir.value import Value
from ...schedule.tiling.gpu.online_softmax import OnlineSoftmax
from ..cpp.ast import Let, name
from .emitter import Emitter, Scope
from .one_pass import emit_points, over_blocks
from .scope import bind, fill_block, let, on_tile, row_axis, row_length, shape_of, store
from .tile_ast import Accumulator, Comment, Shape
from .totals import provenance

LOAD_BYTES = 16  # one load of a thread
THREADS = 32  # threads of a warp
TILE = frozenset({"x", "r"})


@dataclass(frozen=True)
class Running:
    """The names of the running maximum and sums.

    `group`: the block as (turns, threads, width), with a maximum and sums for each thread. This is Triton's layout of a
    block: in every turn a thread holds the neighbours of one load. Where a tile has several rows there is no group, and
    each element of the tile has a maximum and sums.
    """

    maximum: Value
    sums: tuple[Value, ...]
    group: Shape = ()


def emit_online_softmax(e: Emitter, scope: Scope, softmax: OnlineSoftmax) -> None:
    """Emit the maximum and the sums of a row, block after block; a last partial block is masked.

    m' = max(m, max v);  s' = s exp(m - m') + sum exp(v - m'), where exp(-inf - -inf) counts as 0.
    """
    n = row_length(e, softmax.maximum)
    row_axis(e, scope, n)
    run = _start(e, scope, softmax, n)
    over_blocks(e, scope, n, lambda inner: _turn(e, inner, softmax, run))
    _finish(e, scope, softmax, run)


def _start(e: Emitter, scope: Scope, softmax: OnlineSoftmax, n: Index) -> Running:
    """Emit the accumulators of the maximum and of the sums."""
    kind = softmax.maximum.value.dtype
    group: Shape = ()
    shape = shape_of(e, TILE, n)
    if not e.blocks.tiled_x:
        block = e.blocks.rblocks[n]
        threads = min(THREADS * e.blocks.warps, block)
        width = min(_width(softmax), block // threads)
        group = f"{e.blocks.name_of(n)} // {threads * width}", str(threads), str(width)
        shape = (str(threads),)
    carried = []
    for prefix, op in (("best", "max"), *(("sum", "sum") for _ in softmax.sums)):
        label = e.fresh(prefix)
        scope.body.append(Accumulator(label, kind, va.identity(op, kind), shape))
        carried.append(name(label, kind))
        e.axes[carried[-1]] = TILE if not group else frozenset()
    return Running(carried[0], tuple(carried[1:]), group)


def _width(softmax: OnlineSoftmax) -> int:
    """Return the elements of one load: a number of which the start of every row is a multiple."""
    written = {q.node.out for q in softmax.points}
    loads = [(q, v) for q in (*softmax.points, softmax.maximum) for v in va.walk(q.value) if v.op == "load"]
    rows = [(q, v) for q, v in loads if v.attr[0] not in written and ex.vars_of(v.attr[1]) & {*q.inner}]
    starts = [ex.substitute(v.attr[1], dict.fromkeys(q.inner, 0)) for q, v in rows]
    width = LOAD_BYTES // max(min((v.dtype.itemsize for _, v in rows), default=LOAD_BYTES), 2)
    while width > 1 and any(ex.mod(i, width) != 0 for i in starts):
        width //= 2
    return width


def _turn(e: Emitter, inner: Scope, softmax: OnlineSoftmax, run: Running) -> None:
    """Emit the update by one block of the row."""
    emit_points(e, inner, softmax.points)
    inner.body.append(Comment(provenance(softmax.maximum)))
    maximum = on_tile(e, inner, softmax.maximum)
    value = fill_block(e, inner, maximum, bind(e, inner, maximum.value), "max")
    if run.group:
        value = let(e, inner, va.make("reshaped", (value,), value.dtype, run.group), frozenset())
    kind, none = value.dtype, frozenset[str]()
    block_maximum = _reduced(e, inner, value, "max", run)
    new = let(e, inner, va.make("combined", (run.maximum, block_maximum), kind, "max"), none)
    floor = _floor(e, inner, new)
    scale = let(e, inner, _exp(e, va.apply("sub", run.maximum, floor), softmax), none)
    spread = va.make("spread", (floor,), kind) if run.group else floor
    for q, total in zip(softmax.sums, run.sums, strict=True):
        inner.body.append(Comment(provenance(q)))
        terms = let(e, inner, _exp(e, va.apply("sub", value, spread), softmax), none)
        block_sum = _reduced(e, inner, terms, "sum", run)
        inner.body.append(Let(total.attr, va.apply("add", va.apply("mul", total, scale), block_sum)))
    inner.body.append(Let(run.maximum.attr, new))


def _reduced(e: Emitter, scope: Scope, value: Value, op: str, run: Running) -> Value:
    """Return a block reduced to one number a thread; a tile of several rows stays as it is."""
    if not run.group:
        return value
    of_loads = let(e, scope, va.make("reduced", (value,), value.dtype, (op, 2, 1)), frozenset())
    return let(e, scope, va.make("reduced", (of_loads,), value.dtype, (op, 0, 1)), frozenset())


def _floor(e: Emitter, scope: Scope, maximum: Value) -> Value:
    """Return the number to subtract: 0 before there is a maximum, so that exp(-inf - floor) is 0 and not NaN."""
    kind = maximum.dtype
    is_none = va.apply("eq", maximum, va.identity("max", kind))
    return let(e, scope, va.apply("where", is_none, va.const(0.0, kind), maximum), frozenset())


def _finish(e: Emitter, scope: Scope, softmax: OnlineSoftmax, run: Running) -> None:
    """Emit the maximum and the sums of the row from those of its threads."""
    axis = (0, 1) if run.group else (1, 2)
    axes = frozenset({"x"}) if e.blocks.tiled_x else frozenset[str]()
    reduced = va.make("reduced", (run.maximum,), run.maximum.dtype, ("max", *axis))
    maximum = let(e, scope, reduced, axes, "total")
    below = va.apply("sub", run.maximum, _floor(e, scope, maximum))
    scale = let(e, scope, _exp(e, below, softmax), frozenset())
    scaled = [va.make("reduced", (va.apply("mul", s, scale),), s.dtype, ("sum", *axis)) for s in run.sums]
    totals = [let(e, scope, s, axes, "total") for s in scaled]
    is_none = va.apply("eq", maximum, va.identity("max", maximum.dtype))
    # the exponentials of a row of -inf are NaN
    totals = [let(e, scope, va.where(is_none, va.const(math.nan, t.dtype), t), axes, "total") for t in totals]
    results = [maximum, *totals]
    for q, result in zip((softmax.maximum, *softmax.sums), results, strict=True):
        mapped = on_tile(e, scope, q)
        e.axes[result] = axes
        e.results[q.node.out], e.writers[q.node.out] = result, mapped
        if q.node.out in e.kernel.stored:
            store(e, scope, mapped, result)
    e.normalisers.update(results[1:])


def _exp(e: Emitter, x: Value, softmax: OnlineSoftmax) -> Value:
    """Return exp(x) of x <= 0 as a term of a sum that has a term 1.

    The fast form errs by |x| 2^-24 of the term, which averages to a rounding of the sum. Rows of 16 bits, which leave
    the least time for each element, take it.
    """
    if x.dtype != torch.float32 or not e.tiled.fast_math:
        return va.make("exp", (x,), x.dtype)
    loaded = {v.dtype for q in (*softmax.points, softmax.maximum) for v in va.walk(q.value) if v.op == "load"}
    fast = e.tiled.low_precision or loaded <= LOW_PRECISION
    return va.make("helper", (x,), x.dtype, "exp_below_fast" if fast else "exp_below")
