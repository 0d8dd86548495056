"""Emit the AST of a CPU kernel: every scalar is computed in the outermost loop that has its operands."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.loops import Program, Reduction, Scan, Scatter
from ...ir.value import Value
from ...schedule.device import Cpu, ScheduleContext
from ...schedule.kernel import SCALAR, SCRATCH, Kernel, Stage, scratch_index
from ...schedule.loop_mapping import Kind, MappedNode
from .ast import Declare, Function, Let, Loop, Param, Partial, Stmt, Store, Update, name
from .short_rows import with_short_rows

SUM_BLOCK = 256  # elements of a float32 sum in 16 lanes, before it is added to a float64 total
ANY_CPU = ScheduleContext(Cpu(1))
COLUMN_BLOCK = SUM_BLOCK // 16  # the same for sums in one lane


@dataclass
class Scope:
    """One stage being emitted: statements before and after the loop at each level.

    `bound`: names of values. `forwarded`: values of buffers in registers. `sums`: reductions of the innermost loop.
    `serial`: the innermost loop is not vectorised. `blocked`: (float64 total, float32 sum) pairs. `columns`: statements
    before and after each block of a loop over rows.
    """

    stage: Stage
    before: list[list[Stmt]]
    after: list[list[Stmt]]
    bound: dict[Value, Value] = field(default_factory=dict)
    forwarded: dict[str, Value] = field(default_factory=dict)
    sums: list[tuple[str, str]] = field(default_factory=list)
    serial: bool = False
    blocked: list[tuple[str, str]] = field(default_factory=list)
    columns: list[tuple[Stmt, Stmt]] = field(default_factory=list)


@dataclass
class Emitter:
    """The state of emitting one kernel.

    `levels`: the loop level of names. `scalars`: values of the row by buffer. `ready`: buffers of earlier stages.
    `stream`: elements from which a row exceeds L1. `exact`: no reciprocals. `checks`: some position is checked.
    """

    program: Program
    kernel: Kernel
    params: dict[str, Param] = field(default_factory=dict)
    scratch: dict[str, Declare] = field(default_factory=dict)
    partials: list[Partial] = field(default_factory=list)
    row: list[Stmt] = field(default_factory=list)
    row_names: dict[Value, Value] = field(default_factory=dict)
    levels: dict[Value, int] = field(default_factory=dict)
    scalars: dict[str, Value] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    symbols: set[Atom] = field(default_factory=set)
    counter: int = 0
    checks: bool = False
    stream: int = 0
    exact: bool = False

    def fresh(self, prefix: str) -> str:
        """Return a new name."""
        self.counter += 1
        return f"{prefix}{self.counter - 1}"

    def param(self, buffer: str, written: bool = False) -> str:
        """Return the parameter that stands for a buffer."""
        old = self.params.get(buffer)
        if old is None or (written and not old.written):
            label = old.name if old else f"p{len(self.params)}"
            self.params[buffer] = Param(label, self.program.buffers[buffer].dtype, written)
        return self.params[buffer].name

    def note(self, e: Index) -> None:
        """Enter the symbols of an index, which become arguments."""
        self.symbols.update(ex.syms_of(e))


def emit(p: Program, k: Kernel, ctx: ScheduleContext = ANY_CPU) -> tuple[Function, tuple[str, ...]]:
    """Return the AST of a kernel, and the program buffers that its parameters stand for.

    Without fast math every quotient is a division, where a product with a reciprocal could err below normal numbers.
    """
    assert isinstance(ctx.device, Cpu)
    e = Emitter(p, k, stream=ctx.device.stream_elements, exact=not ctx.fast_math)
    for b, numel in k.scratch.items():
        _scratch(e, b, numel)
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
    return with_short_rows(function), tuple(e.params)


def _scratch(e: Emitter, b: str, numel: Index) -> str:
    if b not in e.scratch:
        e.scratch[b] = Declare(e.fresh("w"), e.program.buffers[b].dtype, None, numel)
    return e.scratch[b].name


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
    if not s.blocked:
        return [Loop(v, begin, end, tuple(body), simd=not s.serial, sums=tuple(s.sums), limit=limit)]
    parts = [Declare(part, torch.float32, va.const(0.0, torch.float32)) for _, part in s.blocked]
    folds = [
        Update(total, None, "sum", va.make("cast", (name(part, torch.float32),), torch.float64))
        for total, part in s.blocked
    ]
    if _known_at_most(ex.size_of(v), SUM_BLOCK):
        return [*parts, Loop(v, begin, end, tuple(body), simd=not s.serial, sums=tuple(s.sums), limit=limit), *folds]
    inner = Loop(v, "block", "block_end", tuple(body), simd=not s.serial, sums=tuple(s.sums))
    return [Loop(v, begin, end, (*parts, inner, *folds), step=SUM_BLOCK)]


def _level(e: Emitter, s: Scope, v: Value) -> int:
    """Return the outermost loop level at which a value can be computed."""
    level = e.levels.get(v)
    if level is not None and v.op == "name":
        return level
    inner = s.stage.inner
    deepest = max((k + 1 for k, a in enumerate(inner) if a in v.vars), default=0)
    return max([deepest, *(_level(e, s, a) for a in v.args)], default=0) if v.op != "name" else deepest


def _bind(e: Emitter, s: Scope, v: Value) -> Value:
    """Return `v` as a name or constant, defined at the outermost possible level."""
    if v.op in ("const", "name"):
        return v
    bound = s.bound.get(v) or e.row_names.get(v)
    if bound is not None:
        return bound
    if v.op == "load":
        source = _existing(e, s, v)
        if source is not None:
            s.bound[v] = source
            return source
    resolved, level = _resolve(e, s, v)
    label = name(e.fresh("t"), v.dtype)
    e.levels[label] = level
    s.before[level].append(Let(label.attr, resolved))
    (e.row_names if level == 0 else s.bound)[v] = label
    return label


def _existing(e: Emitter, s: Scope, v: Value) -> Value | None:
    """Return the variable with the value of a load, if the row has one."""
    b = v.attr[0]
    if b in s.forwarded:
        return s.forwarded[b]
    return e.scalars.get(b)


def _resolve(e: Emitter, s: Scope, v: Value) -> tuple[Value, int]:
    """Return `v` with its operands bound, and its level."""
    if v.op == "masked":
        cond, other = _bind(e, s, v.args[0]), _bind(e, s, v.args[2])
        guarded = _inline(e, s, v.args[1])
        masked = va.make("masked", (cond, guarded, other), v.dtype)
        return masked, max(_level(e, s, cond), _level(e, s, other), _tree_level(e, s, guarded))
    if v.op == "load":
        address, level = _address(e, s, v)
        return address, level
    if v.op in ("index", "wrap_index"):
        at, level = _index(e, s, v.attr)
        e.checks |= v.op == "wrap_index"
        s.serial |= v.op == "wrap_index" and level == len(s.stage.inner) and bool(s.stage.inner)
        args = tuple(_bind(e, s, a) for a in v.args)
        return va.make(v.op, args, v.dtype, at), max([level, *(_level(e, s, a) for a in args)])
    args = tuple(_bind(e, s, a) for a in v.args)
    level = max((_level(e, s, a) for a in args), default=0)
    if v.op == "nonzero":
        e.checks = True
        s.serial |= level == len(s.stage.inner) and bool(s.stage.inner)
    if (
        v.op == "truediv"
        and not e.exact
        and v.dtype == torch.float32
        and _level(e, s, args[1]) < level == len(s.stage.inner)
    ):
        return _divide_by(e, s, *args), level
    return va.make(v.op, args, v.dtype, v.attr), level


def _divide_by(e: Emitter, s: Scope, a: Value, d: Value) -> Value:
    """Return a / d where d does not change in the loop: a reciprocal outside, scaled to neither overflow nor vanish."""
    f32 = torch.float32
    scale = _bind(e, s, va.make("divisor_scale", (d,), f32))
    scaled = _bind(e, s, va.make("mul", (d, scale), f32))
    inverse = _bind(e, s, va.make("reciprocal", (scaled,), f32))
    return va.make("divide_by", (a, scale, scaled, inverse), f32)


def _tree_level(e: Emitter, s: Scope, v: Value) -> int:
    return max(_level(e, s, x) for x in va.walk(v))


def _inline(e: Emitter, s: Scope, v: Value) -> Value:
    """Return a tree that is evaluated only under its mask: loads stay inside the expression."""
    if not any(x.op in ("load", "wrap_index", "nonzero") for x in va.walk(v)):
        return _bind(e, s, v)
    if v.op == "load":
        existing = _existing(e, s, v)
        return existing if existing is not None else _address(e, s, v, masked=True)[0]
    if v.op in ("index", "wrap_index"):
        at, _ = _index(e, s, v.attr, masked=True)
        e.checks |= v.op == "wrap_index"
        s.serial |= v.op == "wrap_index"
        return va.make(v.op, tuple(_inline(e, s, a) for a in v.args), v.dtype, at)
    e.checks |= v.op == "nonzero"
    s.serial |= v.op == "nonzero"
    return va.make(v.op, tuple(_inline(e, s, a) for a in v.args), v.dtype, v.attr)


def _address(e: Emitter, s: Scope, v: Value, masked: bool = False) -> tuple[Value, int]:
    b, index = v.attr
    if b in e.ready and e.kernel.storage.get(b) == SCRATCH:
        writer = next(q for st in e.kernel.stages for q in st.members if q.node.out == b)
        at, level = _index(e, s, scratch_index(writer, index), masked)
        return va.load(_scratch(e, b, e.kernel.scratch[b]), at, v.dtype), level
    at, level = _index(e, s, index, masked)
    return va.load(e.param(b), at, v.dtype), level


def _index(e: Emitter, s: Scope, index: Index, masked: bool = False) -> tuple[Index, int]:
    """Return an index whose data-dependent parts are names, and its level.

    `masked`: these parts are read and checked only under the mask.
    """
    e.note(index)
    level = max((k + 1 for k, a in enumerate(s.stage.inner) if a in ex.vars_of(index)), default=0)
    if not ex.lookups(index):
        return index, level
    bind = _inline if masked else _bind
    bound = {x: bind(e, s, x) for x in ex.lookups(index)}
    level = max([level, *(_tree_level(e, s, b) for b in bound.values())])
    return ex.substitute(index, {}, lambda x: bound[x]), level


def _member(e: Emitter, s: Scope, q: MappedNode) -> None:
    if q.kind is Kind.POINT:
        _point(e, s, q)
    elif q.kind is Kind.SCAN:
        _scan(e, s, q)
    elif q.kind is Kind.SCATTER:
        _scatter(e, s, q)
    elif e.kernel.flat or q.kind is Kind.CROSS_ROW:
        _across_rows(e, s, q)
    else:
        _within_row(e, s, q)


def _point(e: Emitter, s: Scope, q: MappedNode) -> None:
    b = q.node.out
    value = _bind(e, s, q.value)
    depth = len(s.stage.inner)
    storage = e.kernel.storage[b]
    s.forwarded[b] = value
    if storage == SCALAR:
        e.scalars[b] = value
    if storage == SCRATCH:
        target = _scratch(e, b, e.kernel.scratch[b])
        s.before[depth].append(Store(target, scratch_index(q, q.index), value))
    if b in e.kernel.stored:
        at, _ = _index(e, s, q.index)
        s.before[depth].append(Store(e.param(b, written=True), at, value))


def _leading_parallel(q: MappedNode) -> int | None:
    """Return the number of parallel inner loops if all of them precede all reduced loops, else None."""
    flags = [v in q.reduced for v in q.inner]
    count = flags.count(False)
    return count if flags == [False] * count + [True] * (len(flags) - count) else None


def _accumulate(e: Emitter, s: Scope, q: MappedNode, level: int) -> Value:
    """Return the name of an accumulator that `level` declares and the innermost loop updates."""
    node = q.node
    assert isinstance(node, Reduction)
    value = _bind(e, s, q.value)
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
    """Return after what a float32 sum is added to a float64 total: "blocks" of vectors, "steps", or "" for never."""
    length = ex.prod(ex.size_of(v) for v in q.inner if v in q.reduced)
    if _one_lane(s.stage):
        return "" if _known_at_most(length, COLUMN_BLOCK) else "steps"
    if isinstance(length, int) and length >= e.stream:
        return "steps"
    return "" if _known_at_most(length, SUM_BLOCK) else "blocks"


def _one_lane(stage: Stage) -> bool:
    """Return whether the stage's innermost loop runs in order, so that its sums have no lanes."""
    return any(
        q.kind in (Kind.SCAN, Kind.SCATTER)
        or any(v.op == "wrap_index" for v in va.walk(q.value))
        or (bool(q.reduced) and _leading_parallel(q) is None and stage.inner[-1] in q.reduced)
        for q in stage.members
    )


def _known_at_most(size: Index, limit: int) -> bool:
    return isinstance(size, int) and size <= limit


def _within_row(e: Emitter, s: Scope, q: MappedNode) -> None:
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
        after.append(Store(_scratch(e, b, e.kernel.scratch[b]), scratch_index(q, q.index), result))
    if b in e.kernel.stored:
        at, _ = _index(e, s, q.index)
        after.append(Store(e.param(b, written=True), at, result))


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
    wide = node.op == "sum" and dtype == torch.float32 and not _known_at_most(length, COLUMN_BLOCK)
    direct = e.kernel.storage[b] == SCRATCH and not wide
    target = _scratch(e, b, numel) if direct else _temp(e, f"acc.{b}", torch.float64 if wide else dtype, numel)
    at = scratch_index(q, q.index) if direct else slot
    total = va.load(target, at, torch.float64 if wide else dtype)
    s.before[0].append(_over(parallel, Store(target, at, va.identity(node.op, total.dtype))))
    value = _bind(e, s, q.value)
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
        s.after[0].append(_over(parallel, Store(_scratch(e, b, numel), scratch_index(q, q.index), result)))
    if b in e.kernel.stored:
        position, _ = _index(e, s, q.index)
        s.after[0].append(_over(parallel, Store(e.param(b, written=True), position, result)))


def _temp(e: Emitter, key: str, dtype: torch.dtype, numel: Index) -> str:
    e.scratch[key] = Declare(e.fresh("w"), dtype, None, numel)
    return e.scratch[key].name


def _over(loops: tuple[Atom, ...], body: Stmt) -> Stmt:
    for k, v in enumerate(reversed(loops)):
        body = Loop(v, "0", "", (body,), simd=k == 0)
    return body


def _across_rows(e: Emitter, s: Scope, q: MappedNode) -> None:
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
    value = _bind(e, s, q.value)
    s.before[len(s.stage.inner)].append(Update(acc, slot, node.op, _widen(value, wide)))
    s.serial |= bool(s.stage.inner) and s.stage.inner[-1] in q.reduced


def _widen(v: Value, dtype: torch.dtype) -> Value:
    return v if v.dtype == dtype else va.make("cast", (v,), dtype)


def _scan(e: Emitter, s: Scope, q: MappedNode) -> None:
    """Emit a scan: one running result for each point of the loops inside the scanned one, which are independent."""
    node = q.node
    assert isinstance(node, Scan)
    depth = len(s.stage.inner)
    value = _bind(e, s, q.value)
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
        target = _scratch(e, node.out, e.kernel.scratch[node.out])
        s.before[depth].append(Store(target, scratch_index(q, q.index), result))
    if node.out in e.kernel.stored:
        at, _ = _index(e, s, q.index)
        s.before[depth].append(Store(e.param(node.out, written=True), at, result))


def _in_range(e: Emitter, s: Scope, index: Index) -> tuple[Value, ...]:
    """Return the conditions under which the checked positions in an index are in range, bound to names."""
    guards: list[Value] = []
    for v in ex.lookups(index):
        if v.op == "wrap_index":
            at, size = v.args[0], va.index(v.attr)
            from_zero = len(v.args) > 1 and int(v.args[1].attr) & va.FROM_ZERO
            least = va.const(0, torch.int64) if from_zero else va.index(ex.mul(v.attr, -1))
            guards += [_bind(e, s, va.apply("ge", at, least)), _bind(e, s, va.apply("lt", at, size))]
    return tuple(guards)


_SCATTER_OPS = {"add": "sum", "prod": "prod", "max": "max", "min": "min"}


def _scatter(e: Emitter, s: Scope, q: MappedNode) -> None:
    """Emit stores in loop order; only a loop whose iterations store different elements may run as vectors."""
    node = q.node
    assert isinstance(node, Scatter)
    value = _bind(e, s, q.value)
    at, _ = _index(e, s, q.index)
    target = e.param(node.out, written=True)
    # a temporary may be written at a wrong position, since the call then raises; an input may not
    guards = _in_range(e, s, q.index) if e.program.buffers[node.out].kind == "input" else ()
    body = s.before[len(s.stage.inner)]
    if node.mode == "set":
        body.append(Store(target, at, value, guards))
    else:
        body.append(Update(target, at, _SCATTER_OPS[node.mode], value, guards))
    s.serial |= not s.stage.inner or ex.coefficient(q.index, s.stage.inner[-1]) != 1
