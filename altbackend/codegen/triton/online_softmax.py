"""One pass over long rows for a maximum and the sums of exponentials below it (`online.py` finds them).

The elements of a block that one thread holds have a maximum and sums of their own while the row is read, so that no
thread waits for another before the end; where a tile has several rows, each row has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import LOW_PRECISION
from ...ir.value import Value
from ...schedule.tiling.gpu.online_softmax import Online
from ..cpp.ast import Let, identity, name
from .scope import Emitter, Scope, bind, let, on_tile, row_axis, row_length, row_points, shape_of, store, whole
from .tile_ast import Accumulator, Comment, Shape, TileLoop
from .totals import provenance

LOAD_BYTES = 16  # what one thread loads at once
THREADS = 32  # of a warp


@dataclass(frozen=True)
class Running:
    """What the passes over blocks carry: names of the maximum and of the sums.

    `group`: the block as (turns, threads, width), with a maximum and sums for each thread. Triton lays a block out so:
    every thread holds neighbours that one load brings, and the same of every turn. Where a tile has several rows there
    is no group.
    """

    best: Value
    sums: tuple[Value, ...]
    group: Shape = ()


def emit_online(e: Emitter, scope: Scope, part: Online) -> None:
    """The maximum and the sums of a row, block after block; what is left beyond whole blocks comes last, masked.

    m' = max(m, max v);  s' = s exp(m - m') + sum exp(v - m'), where exp(-inf - -inf) counts as 0.
    """
    n = row_length(e, part.top)
    row_axis(e, scope, n)
    block = e.blocks.rblocks[n]
    run = _start(e, scope, part, n)
    full = n - n % block if isinstance(n, int) else 0
    if full or not isinstance(n, int):
        inner = Scope(scope, "r")
        row_points(e, inner, n, "base", whole=bool(full))
        _turn(e, inner, part, run)
        e.note(n)
        scope.body.append(TileLoop("base", "0", full or n, e.blocks.name_of(n), tuple(inner.body)))
    if isinstance(n, int) and full < n:
        inner = Scope(scope, "r")
        row_points(e, inner, n, str(full))
        _turn(e, inner, part, run)
        scope.body.extend(inner.body)
    _finish(e, scope, part, run)


def _start(e: Emitter, scope: Scope, part: Online, n: Index) -> Running:
    kind = part.top.value.dtype
    group: Shape = ()
    shape = shape_of(e, frozenset({"x"}), None)
    if not e.blocks.tiled_x:
        block = e.blocks.rblocks[n]
        threads = min(THREADS * e.blocks.warps, block)
        width = min(_width(part), block // threads)
        group = f"{e.blocks.name_of(n)} // {threads * width}", str(threads), str(width)
        shape = (str(threads),)
    carried = []
    for prefix, op in (("best", "max"), *(("sum", "sum") for _ in part.sums)):
        label = e.fresh(prefix)
        scope.body.append(Accumulator(label, kind, identity(op, kind), shape))
        carried.append(name(label, kind))
    return Running(carried[0], tuple(carried[1:]), group)


def _width(part: Online) -> int:
    """Elements that one load may bring: as many as the start of every row is a multiple of."""
    made = {q.node.out for q in part.passed}
    found = [(q, v) for q in (*part.passed, part.top) for v in va.walk(q.value) if v.op == "load"]
    rows = [(q, v) for q, v in found if v.attr[0] not in made and ex.vars_of(v.attr[1]) & {*q.inner}]
    starts = [ex.substitute(v.attr[1], dict.fromkeys(q.inner, 0)) for q, v in rows]
    width = LOAD_BYTES // max(min((v.dtype.itemsize for _, v in rows), default=LOAD_BYTES), 2)
    while width > 1 and any(ex.mod(i, width) != 0 for i in starts):
        width //= 2
    return width


def _turn(e: Emitter, inner: Scope, part: Online, run: Running) -> None:
    """One block of the row."""
    for q in part.passed:
        mapped = e.writers[q.node.out] = on_tile(e, inner, q)
        if q.node.out in e.kernel.stored:
            inner.body.append(Comment(provenance(q)))
            store(e, inner, mapped, bind(e, inner, mapped.value))
    inner.body.append(Comment(provenance(part.top)))
    top = on_tile(e, inner, part.top)
    value = whole(e, inner, top, bind(e, inner, top.value), "max")
    if run.group:
        value = let(e, inner, va.make("reshaped", (value,), value.dtype, run.group), frozenset())
    kind, none = value.dtype, frozenset[str]()
    highest = let(e, inner, _of_thread(e, inner, value, "max", run), none)
    new = let(e, inner, va.make("combined", (run.best, highest), kind, "max"), none)
    floor = _floor(e, inner, new)
    scale = let(e, inner, _exp(e, va.apply("sub", run.best, floor), part), none)
    spread = va.make("spread", (floor,), kind) if run.group else floor
    for q, total in zip(part.sums, run.sums, strict=True):
        inner.body.append(Comment(provenance(q)))
        terms = let(e, inner, _exp(e, va.apply("sub", value, spread), part), none)
        held = let(e, inner, _of_thread(e, inner, terms, "sum", run), none)
        inner.body.append(Let(total.attr, va.apply("add", va.apply("mul", total, scale), held)))
    inner.body.append(Let(run.best.attr, new))


def _of_thread(e: Emitter, scope: Scope, value: Value, op: str, run: Running) -> Value:
    """A block reduced to one number a thread, or a row where the tile has several."""
    if not run.group:
        return va.make("reduced", (value,), value.dtype, (op, 1, 2))
    of_loads = let(e, scope, va.make("reduced", (value,), value.dtype, (op, 2, 1)), frozenset())
    return va.make("reduced", (of_loads,), value.dtype, (op, 0, 1))


def _floor(e: Emitter, scope: Scope, best: Value) -> Value:
    """What is subtracted: 0 where there is no maximum yet, so that exp(-inf - floor) is 0 and not NaN."""
    kind = best.dtype
    found = va.apply("where", va.apply("eq", best, identity("max", kind)), va.const(0.0, kind), best)
    return let(e, scope, found, frozenset())


def _finish(e: Emitter, scope: Scope, part: Online, run: Running) -> None:
    """The row's own numbers from those of its groups."""
    results = [run.best, *run.sums]
    if run.group:
        best = let(e, scope, va.make("reduced", (run.best,), run.best.dtype, ("max", 0, 1)), frozenset(), "total")
        scale = let(e, scope, _exp(e, va.apply("sub", run.best, _floor(e, scope, best)), part), frozenset())
        scaled = [va.make("reduced", (va.apply("mul", s, scale),), s.dtype, ("sum", 0, 1)) for s in run.sums]
        results = [best, *(let(e, scope, s, frozenset(), "total") for s in scaled)]
    axes = frozenset({"x"}) if e.blocks.tiled_x else frozenset()
    for q, result in zip((part.top, *part.sums), results, strict=True):
        mapped = on_tile(e, scope, q)
        e.axes[result] = axes
        e.results[q.node.out], e.writers[q.node.out] = result, mapped
        if q.node.out in e.kernel.stored:
            store(e, scope, mapped, result)
    e.normalisers.update(results[1:])


def _exp(e: Emitter, x: Value, part: Online) -> Value:
    """exp(x) of x <= 0 as a term of a sum that has a term 1.

    The fast form is off by |x| 2^-24 of the term, which averages to a rounding of the sum; rows of 16 bits, which leave
    the least time for each element, take it.
    """
    if x.dtype != torch.float32 or not e.own_numerics:
        return va.make("exp", (x,), x.dtype)
    loaded = {v.dtype for q in (*part.passed, part.top) for v in va.walk(q.value) if v.op == "load"}
    return va.make("helper", (x,), x.dtype, "exp_below_fast" if e.fast or loaded <= LOW_PRECISION else "exp_below")
