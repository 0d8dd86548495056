"""Scalars of a CPU kernel: every scalar is computed in the outermost loop that has its operands."""

from __future__ import annotations

import functools

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import OPS
from ...ir.value import Value
from ...schedule.kernel import SCRATCH, Stage, scratch_index
from ...schedule.loop_mapping import Kind
from .ast import Let, name
from .scope import Emitter, Scope, scratch

MOST_BLENDED = 32  # vector registers; 25 windows take a fifth of the time of branches, 49 up to three times as long
# the dtypes that `alt::blend` selects bit by bit
_BLENDED = frozenset(
    (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
    )
)


def level_of(e: Emitter, s: Scope, v: Value) -> int:
    """Return the outermost loop level at which a value can be computed."""
    level = e.levels.get(v)
    if level is not None and v.op == "name":
        return level
    inner = s.stage.inner
    deepest = max((k + 1 for k, a in enumerate(inner) if a in v.vars), default=0)
    return max([deepest, *(level_of(e, s, a) for a in v.args)], default=0) if v.op != "name" else deepest


def bind(e: Emitter, s: Scope, v: Value) -> Value:
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
        cond, other = bind(e, s, v.args[0]), bind(e, s, v.args[2])
        guarded = _inline(e, s, v.args[1])
        level = max(level_of(e, s, cond), level_of(e, s, other), _tree_level(e, s, guarded))
        if level_of(e, s, cond) < level == len(s.stage.inner) and _blends(s.stage):
            anywhere = _anywhere(e, s, cond, v.args[1]) if v.dtype in _BLENDED else None
            if anywhere is not None:
                return va.make("blend", (cond, anywhere, other), v.dtype), level
        return va.make("masked", (cond, guarded, other), v.dtype), level
    if v.op == "load":
        address, level = _address(e, s, v)
        return address, level
    if v.op in ("index", "wrap_index"):
        at, level = bound_index(e, s, v.attr)
        e.checks |= v.op == "wrap_index"
        args = tuple(bind(e, s, a) for a in v.args)
        return va.make(v.op, args, v.dtype, at), max([level, *(level_of(e, s, a) for a in args)])
    args = tuple(bind(e, s, a) for a in v.args)
    level = max((level_of(e, s, a) for a in args), default=0)
    if v.op == "nonzero":
        e.checks = True
        s.serial |= level == len(s.stage.inner) and bool(s.stage.inner)
    if (
        v.op == "truediv"
        and not e.exact
        and v.dtype == torch.float32
        and level_of(e, s, args[1]) < level == len(s.stage.inner)
    ):
        return _divide_by(e, s, *args), level
    return va.make(v.op, args, v.dtype, v.attr), level


def _anywhere(e: Emitter, s: Scope, cond: Value, v: Value) -> Value | None:
    """Return `v` in a form that the innermost loop may compute even where `cond`, which it does not change, is false.

    Loads then read the beginning of their tensor, and the result is dropped. GCC vectorises no load under a condition
    from outside of the loop: padded max pools of channels-last images ran 3 to 9 times slower.
    """
    if v.op == "load":
        return _load_anywhere(e, s, cond, v)
    if v.op not in OPS and v.op != "cast":
        return None
    args = [_anywhere(e, s, cond, a) if _is_guarded(a) else bind(e, s, a) for a in v.args]
    computable = [a for a in args if a is not None]
    return va.make(v.op, tuple(computable), v.dtype, v.attr) if len(computable) == len(args) else None


def _load_anywhere(e: Emitter, s: Scope, cond: Value, v: Value) -> Value | None:
    if ex.lookups(v.attr[1]):
        return None
    b, index = v.attr
    stored = {q.node.out for st in e.kernel.stages for q in st.members}
    extent, last = e.program.buffers[b].extent, s.stage.inner[-1]
    step, size = ex.coefficient(index, last), ex.size_of(last)
    if b in stored or not all(isinstance(n, int) for n in (extent, step, size)):
        return None
    assert isinstance(extent, int)
    assert isinstance(step, int)
    assert isinstance(size, int)
    along = ex.mul(step, ex.ix(last))
    start = ex.sub(index, along)
    if step < 0 or step * (size - 1) >= extent or last in ex.vars_of(start):
        return None
    begin = bind(e, s, va.make("or_zero", (cond, bind(e, s, va.index(start))), torch.int64))
    return va.load(e.param(b), ex.add(ex.lookup(begin, 0, extent), along), v.dtype)


def _divide_by(e: Emitter, s: Scope, a: Value, d: Value) -> Value:
    """Return a / d where d does not change in the loop: a reciprocal outside, scaled to neither overflow nor vanish."""
    f32 = torch.float32
    scale = bind(e, s, va.make("divisor_scale", (d,), f32))
    scaled = bind(e, s, va.make("mul", (d, scale), f32))
    inverse = bind(e, s, va.make("reciprocal", (scaled,), f32))
    return va.make("divide_by", (a, scale, scaled, inverse), f32)


def _tree_level(e: Emitter, s: Scope, v: Value) -> int:
    return max(level_of(e, s, x) for x in va.walk(v))


@functools.lru_cache(256)
def _blends(stage: Stage) -> bool:
    """Return whether masked loads of a stage are blended, not put under branches.

    More loads than there are registers would take longer. A reduction with masked terms needs no blending, since it has
    a loop for each of its conditions.
    """
    masked = [sum(v.op == "masked" for v in va.walk(q.value)) for q in stage.members]
    pointwise = all(not n or q.kind is Kind.POINT for n, q in zip(masked, stage.members, strict=True))
    return pointwise and sum(masked) <= MOST_BLENDED


def _is_guarded(v: Value) -> bool:
    """Return whether a value may only be computed under its mask."""
    return any(x.op in ("load", "wrap_index", "nonzero") for x in va.walk(v))


def _inline(e: Emitter, s: Scope, v: Value) -> Value:
    """Return a tree that is evaluated only under its mask: loads stay inside the expression."""
    if not _is_guarded(v):
        return bind(e, s, v)
    if v.op == "load":
        existing = _existing(e, s, v)
        return existing if existing is not None else _address(e, s, v, masked=True)[0]
    if v.op in ("index", "wrap_index"):
        at, _ = bound_index(e, s, v.attr, masked=True)
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
        at, level = bound_index(e, s, scratch_index(writer, index), masked)
        return va.load(scratch(e, b, e.kernel.scratch[b]), at, v.dtype), level
    at, level = bound_index(e, s, index, masked)
    return va.load(e.param(b), at, v.dtype), level


def bound_index(e: Emitter, s: Scope, index: Index, masked: bool = False) -> tuple[Index, int]:
    """Return an index whose data-dependent parts are names, and its level.

    `masked`: these parts are read and checked only under the mask.
    """
    e.note(index)
    level = max((k + 1 for k, a in enumerate(s.stage.inner) if a in ex.vars_of(index)), default=0)
    if not ex.lookups(index):
        return index, level
    place = _inline if masked else bind
    bound = {x: place(e, s, x) for x in ex.lookups(index)}
    level = max([level, *(_tree_level(e, s, b) for b in bound.values())])
    return ex.substitute(index, {}, lambda x: bound[x]), level


def in_range(e: Emitter, s: Scope, index: Index) -> tuple[Value, ...]:
    """Return the conditions under which the checked positions in an index are in range, bound to names."""
    guards: list[Value] = []
    for v in ex.lookups(index):
        if v.op == "wrap_index":
            at, size = v.args[0], va.index(v.attr)
            from_zero = len(v.args) > 1 and int(v.args[1].attr) & va.FROM_ZERO
            least = va.const(0, torch.int64) if from_zero else va.index(ex.mul(v.attr, -1))
            guards += [bind(e, s, va.apply("ge", at, least)), bind(e, s, va.apply("lt", at, size))]
    return tuple(guards)
