"""Reductions and scans of a CPU kernel: within a row, across rows, and along a row."""

from __future__ import annotations

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.loops import Reduction, Scan
from ...ir.value import Value
from ...schedule.kernel import SCALAR, SCRATCH, Stage, scratch_index
from ...schedule.loop_mapping import Kind, MappedNode
from .ast import Declare, Let, Loop, Partial, Stmt, Store, Update, name
from .scalars import bind, bound_index
from .scope import Emitter, Scope, known_at_most, scratch

COLUMN_BLOCK = 16  # elements of a float32 sum in one lane, before it is added to a float64 total


def within_row(e: Emitter, s: Scope, q: MappedNode) -> None:
    """Emit a reduction that ends within a row; an array holds the results of its loops, if it has any."""
    b = q.node.out
    parallel = _leading_parallel(q)
    storage = e.kernel.storage[b]
    if parallel is None:
        _array_reduction(e, s, q)
        return
    result = _accumulate(e, s, q, parallel)
    after = s.after[parallel]
    if storage == SCALAR:
        label = name(e.fresh("t"), result.dtype)
        after.append(Let(label.attr, result))
        e.levels[label] = 0
        e.scalars[b] = label
        result = label
    if storage == SCRATCH:
        after.append(Store(scratch(e, b, e.kernel.scratch[b]), scratch_index(q, q.index), result))
    if b in e.kernel.stored:
        at, _ = bound_index(e, s, q.index)
        after.append(Store(e.param(b, written=True), at, result))


def across_rows(e: Emitter, s: Scope, q: MappedNode) -> None:
    """Emit a reduction over rows: each thread accumulates over its rows, and results are combined after all rows."""
    node = q.node
    assert isinstance(node, Reduction)
    b = node.out
    parallel = q.parallel
    dtype = q.value.dtype
    slot = ex.flatten([ex.size_of(v) for v in parallel], [ex.ix(v) for v in parallel])
    numel = ex.prod(ex.size_of(v) for v in parallel)
    acc = e.fresh("a")
    wide = torch.float64 if dtype == torch.float32 and node.op == "sum" else dtype
    target = e.param(b, written=True)
    e.note(numel)
    e.note(q.index)
    e.partials.append(Partial(acc, wide, numel, node.op, va.identity(node.op, wide), parallel, slot, target, q.index))
    lead = _leading_parallel(q)
    if lead is not None and any(v in q.reduced for v in q.inner):
        result = _accumulate(e, s, q, lead)
        total = result.args[0] if result.op == "cast" and result.args[0].dtype == wide else _widen(result, wide)
        s.after[lead].append(Update(acc, slot, node.op, total))
        return
    value = bind(e, s, q.value)
    s.before[len(s.stage.inner)].append(Update(acc, slot, node.op, _widen(value, wide)))
    s.serial |= bool(s.stage.inner) and s.stage.inner[-1] in q.reduced


def scan(e: Emitter, s: Scope, q: MappedNode) -> None:
    """Emit a scan: one running result for each point of the loops inside the scanned one, which are independent."""
    node = q.node
    assert isinstance(node, Scan)
    depth = len(s.stage.inner)
    value = bind(e, s, q.value)
    wide = torch.float64 if value.dtype == torch.float32 and node.op == "sum" else value.dtype
    first = min((k for k, v in enumerate(s.stage.inner) if v in q.scanned), default=depth)
    after = tuple(v for v in s.stage.inner[first:] if v not in q.scanned)
    if after:
        slot = ex.flatten([ex.size_of(v) for v in after], [ex.ix(v) for v in after])
        acc = e.fresh("w")
        e.scratch[f"scan.{acc}"] = Declare(acc, wide, None, ex.prod(ex.size_of(v) for v in after))
        s.before[first].append(_over(after, Store(acc, slot, va.identity(node.op, wide))))
        s.before[depth].append(Update(acc, slot, node.op, _widen(value, wide)))
        result = _widen(va.load(acc, slot, wide), value.dtype)
        s.serial |= s.stage.inner[-1] in q.scanned
    else:
        acc = e.fresh("r")
        s.before[first].append(Declare(acc, wide, va.identity(node.op, wide)))
        s.before[depth].append(Update(acc, None, node.op, _widen(value, wide)))
        result = _widen(name(acc, wide), value.dtype)
        s.serial = True
    if e.kernel.storage[node.out] == SCRATCH:
        target = scratch(e, node.out, e.kernel.scratch[node.out])
        s.before[depth].append(Store(target, scratch_index(q, q.index), result))
    if node.out in e.kernel.stored:
        at, _ = bound_index(e, s, q.index)
        s.before[depth].append(Store(e.param(node.out, written=True), at, result))


def _accumulate(e: Emitter, s: Scope, q: MappedNode, level: int) -> Value:
    """Return the name of an accumulator that `level` declares and the innermost loop updates."""
    node = q.node
    assert isinstance(node, Reduction)
    value = bind(e, s, q.value)
    depth = len(s.stage.inner)
    acc = e.fresh("r")
    if node.op == "sum" and value.dtype == torch.float32 and (wide := _float64_total(e, s, q)):
        s.before[level].append(Declare(acc, torch.float64, va.const(0.0, torch.float64)))
        if wide == "blocks":
            part = e.fresh("r")
            s.blocked.append((acc, part))
            s.sums.append(("sum", part))
            s.before[depth].append(Update(part, None, "sum", value))
        else:
            s.before[depth].append(Update(acc, None, "sum", _widen(value, torch.float64)))
            if level < depth:
                s.sums.append(("sum", acc))
        return va.make("cast", (name(acc, torch.float64),), torch.float32)
    s.before[level].append(Declare(acc, value.dtype, va.identity(node.op, value.dtype)))
    s.before[depth].append(Update(acc, None, node.op, value))
    if depth and level < depth:
        s.sums.append((node.op, acc))
    return name(acc, value.dtype)


def _float64_total(e: Emitter, s: Scope, q: MappedNode) -> str:
    """Return when a float32 sum is added to a float64 total: after "blocks" of vectors, after "steps", "" for never."""
    length = ex.prod(ex.size_of(v) for v in q.inner if v in q.reduced)
    if _one_lane(s.stage):
        return "" if known_at_most(length, COLUMN_BLOCK) else "steps"
    if isinstance(length, int) and length >= e.stream:
        return "steps"
    return "" if known_at_most(length, e.sum_block) else "blocks"


def _one_lane(stage: Stage) -> bool:
    """Return whether the stage's innermost loop runs in order, so that its sums have no lanes."""
    return any(
        q.kind in (Kind.SCAN, Kind.SCATTER)
        or any(v.op == "wrap_index" for v in va.walk(q.value))
        or (bool(q.reduced) and _leading_parallel(q) is None and stage.inner[-1] in q.reduced)
        for q in stage.members
    )


def _leading_parallel(q: MappedNode) -> int | None:
    """Return the number of parallel inner loops if all of them precede all reduced loops, else None."""
    flags = [v in q.reduced for v in q.inner]
    count = flags.count(False)
    return count if flags == [False] * count + [True] * (len(flags) - count) else None


def _array_reduction(e: Emitter, s: Scope, q: MappedNode) -> None:
    """Emit parallel loops inside reduced ones: one accumulator for each result, long float32 sums in blocks."""
    node = q.node
    assert isinstance(node, Reduction)
    b = node.out
    parallel = q.parallel
    numel = ex.prod(ex.size_of(v) for v in parallel)
    slot = ex.flatten([ex.size_of(v) for v in parallel], [ex.ix(v) for v in parallel])
    dtype = q.value.dtype
    length = ex.prod(ex.size_of(v) for v in q.inner if v in q.reduced)
    wide = node.op == "sum" and dtype == torch.float32 and not known_at_most(length, COLUMN_BLOCK)
    direct = e.kernel.storage[b] == SCRATCH and not wide
    target = scratch(e, b, numel) if direct else _temp(e, f"acc.{b}", torch.float64 if wide else dtype, numel)
    at = scratch_index(q, q.index) if direct else slot
    total = va.load(target, at, torch.float64 if wide else dtype)
    s.before[0].append(_over(parallel, Store(target, at, va.identity(node.op, total.dtype))))
    value = bind(e, s, q.value)
    if wide and q.inner[0] in q.reduced and not any(v in q.reduced for v in q.inner[1:]):
        part = _temp(e, f"part.{b}", dtype, numel)
        opened = _over(parallel, Store(part, at, va.identity(node.op, dtype)))
        folded = Update(target, at, node.op, _widen(va.load(part, at, dtype), torch.float64))
        s.columns.append((opened, _over(parallel, folded)))
        s.before[len(s.stage.inner)].append(Update(part, at, node.op, value))
    else:
        s.before[len(s.stage.inner)].append(Update(target, at, node.op, _widen(value, total.dtype)))
    s.serial |= s.stage.inner[-1] in q.reduced
    result = _widen(total, dtype)
    if e.kernel.storage[b] == SCRATCH and not direct:
        s.after[0].append(_over(parallel, Store(scratch(e, b, numel), scratch_index(q, q.index), result)))
    if b in e.kernel.stored:
        position, _ = bound_index(e, s, q.index)
        s.after[0].append(_over(parallel, Store(e.param(b, written=True), position, result)))


def _temp(e: Emitter, key: str, dtype: torch.dtype, numel: Index) -> str:
    e.scratch[key] = Declare(e.fresh("w"), dtype, None, numel)
    return e.scratch[key].name


def _over(loops: tuple[Atom, ...], body: Stmt) -> Stmt:
    for k, v in enumerate(reversed(loops)):
        body = Loop(v, "0", "", (body,), simd=k == 0)
    return body


def _widen(v: Value, dtype: torch.dtype) -> Value:
    return v if v.dtype == dtype else va.make("cast", (v,), dtype)
