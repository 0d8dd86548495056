"""Emit the AST of a CPU kernel: its stages, their loops, and the statements in the innermost loops."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.loops import Program, Scatter
from ...schedule.device import Cpu, ScheduleContext
from ...schedule.kernel import SCALAR, SCRATCH, Kernel, Stage, scratch_index
from ...schedule.loop_mapping import Kind, MappedNode
from .ast import Declare, Function, Loop, Stmt, Store, Update, name
from .column_blocks import with_column_blocks
from .column_values import with_column_values
from .dense_rows import with_dense_rows
from .lane_rows import with_rows_in_lanes
from .reductions import COLUMN_BLOCK, across_rows, scan, within_row
from .row_blocks import with_row_blocks
from .row_totals import with_row_totals
from .scalars import bind, bound_index, in_range
from .scope import Emitter, Scope, known_at_most, scratch
from .short_rows import with_short_rows
from .vector_checks import with_vector_checks
from .whole_vectors import with_whole_vectors

CACHE_SHARE = 8  # part of L2 that the values of a block of columns may take: 4x256x56x56 took 0.53 ms, 0.72 in L1
ANY_CPU = ScheduleContext(Cpu(1))
_SCATTER_OPS = {"add": "sum", "prod": "prod", "max": "max", "min": "min"}


def emit(p: Program, k: Kernel, ctx: ScheduleContext = ANY_CPU) -> tuple[Function, tuple[str, ...]]:
    """Return the AST of a kernel, and the program buffers that its parameters stand for.

    Without fast math every quotient is a division, where a product with a reciprocal could err below normal numbers.
    """
    assert isinstance(ctx.device, Cpu)
    block = ctx.device.vector_lanes * COLUMN_BLOCK
    e = Emitter(p, k, stream=ctx.device.stream_elements, sum_block=block, exact=not ctx.fast_math)
    for b, numel in k.scratch.items():
        scratch(e, b, numel)
    for stage in k.stages:
        _stage(e, stage)
        e.ready.update(q.node.out for q in stage.members)
    e.note(k.rows)
    e.note(k.work)
    for v in k.row_counters:
        e.note(ex.size_of(v))
    for d in e.scratch.values():
        e.note(d.numel or 0)
    function = Function(
        params=tuple(e.params.values()),
        symbols=tuple(sorted(a.key for a in e.symbols)),
        rows=ex.size_of(k.stages[0].inner[0]) if k.flat else k.rows,
        flat=k.stages[0].inner[0] if k.flat else None,
        scratch=tuple(e.scratch.values()),
        body=tuple(e.row),
        partials=tuple(e.partials),
        work=k.work,
        checks=e.checks,
        row_counters=k.row_counters,
    )
    in_place = {e.params[b].name: e.params[a].name for a, b in k.in_place if a in e.params and b in e.params}
    function = with_column_values(with_column_blocks(function, ctx.device.l2 // CACHE_SHARE, in_place))
    side_by_side = with_rows_in_lanes(function, ctx.device.vector_lanes, in_place)
    if side_by_side is not function:
        return side_by_side, tuple(e.params)
    in_rows = with_row_totals(with_dense_rows(with_row_blocks(with_short_rows(function))))
    return with_whole_vectors(in_rows, ctx.device.vector_lanes, in_place), tuple(e.params)


def _stage(e: Emitter, stage: Stage) -> None:
    depth = len(stage.inner)
    s = Scope(stage, [[] for _ in range(depth + 1)], [[] for _ in range(depth + 1)])
    for v in stage.inner:
        e.note(ex.size_of(v))
    for q in stage.members:
        _member(e, s, q)
    e.row.extend(s.before[0])
    if depth:
        e.row.extend(_nest(e, s, 0))
    e.row.extend(s.after[0])


def _nest(e: Emitter, s: Scope, at: int) -> list[Stmt]:
    """Return the loop at level `at` around all deeper ones."""
    v = s.stage.inner[at]
    begin, end = ("begin", "end") if e.kernel.flat else ("0", "")
    innermost = at == len(s.stage.inner) - 1
    limit = e.kernel.tail_bounds.get(v)
    e.note(limit if limit is not None else 0)
    if not innermost:
        body = [*s.before[at + 1], *_nest(e, s, at + 1), *s.after[at + 1]]
        if at == 0 and s.columns:
            opened, folded = zip(*s.columns, strict=True)
            inner = Loop(v, "block", "block_end", tuple(body))
            return [Loop(v, begin, end, (*opened, inner, *folded), step=COLUMN_BLOCK)]
        return [Loop(v, begin, end, tuple(body), limit=limit)]
    body = [*s.before[at + 1], *s.after[at + 1]]
    vectors = not s.serial
    whole = Loop(v, begin, end, tuple(body), simd=vectors, sums=tuple(s.sums), limit=limit)
    if not s.blocked:
        return with_vector_checks(e, whole) if vectors else [whole]
    parts = [Declare(part, torch.float32, va.const(0.0, torch.float32)) for _, part in s.blocked]
    folds = [
        Update(total, None, "sum", va.make("cast", (name(part, torch.float32),), torch.float64))
        for total, part in s.blocked
    ]
    if known_at_most(ex.size_of(v), e.sum_block):
        return [*parts, whole, *folds]
    inner = replace(whole, begin="block", end="block_end", limit=None)
    return [Loop(v, begin, end, (*parts, inner, *folds), step=e.sum_block)]


def _member(e: Emitter, s: Scope, q: MappedNode) -> None:
    if q.kind is Kind.POINT:
        _point(e, s, q)
    elif q.kind is Kind.SCAN:
        scan(e, s, q)
    elif q.kind is Kind.SCATTER:
        _scatter(e, s, q)
    elif e.kernel.flat or q.kind is Kind.CROSS_ROW:
        across_rows(e, s, q)
    else:
        within_row(e, s, q)


def _point(e: Emitter, s: Scope, q: MappedNode) -> None:
    b = q.node.out
    value = bind(e, s, q.value)
    depth = len(s.stage.inner)
    storage = e.kernel.storage[b]
    s.forwarded[b] = value
    if storage == SCALAR:
        e.scalars[b] = value
    if storage == SCRATCH:
        target = scratch(e, b, e.kernel.scratch[b])
        s.before[depth].append(Store(target, scratch_index(q, q.index), value))
    if b in e.kernel.stored:
        at, _ = bound_index(e, s, q.index)
        s.before[depth].append(Store(e.param(b, written=True), at, value))


def _scatter(e: Emitter, s: Scope, q: MappedNode) -> None:
    """Emit stores in loop order; only a loop whose iterations store different elements may run as vectors."""
    node = q.node
    assert isinstance(node, Scatter)
    value = bind(e, s, q.value)
    at, _ = bound_index(e, s, q.index)
    target = e.param(node.out, written=True)
    # a temporary may be written at a wrong position, since the call then raises; an input may not
    guards = in_range(e, s, q.index) if e.program.buffers[node.out].kind == "input" else ()
    body = s.before[len(s.stage.inner)]
    if node.mode == "set":
        body.append(Store(target, at, value, guards))
    else:
        body.append(Update(target, at, _SCATTER_OPS[node.mode], value, guards))
    s.serial |= not s.stage.inner or ex.coefficient(q.index, s.stage.inner[-1]) != 1
