"""Reductions, scans and scatters of a kernel as statements over tiles."""

from __future__ import annotations

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Reduction, Scan, Scatter
from ...ir.ops import ATOMIC
from ...ir.value import Value
from ...schedule.loop_mapping import MappedNode
from ..cpp.ast import identity, name
from .scope import Emitter, Scope, axes_of, bind, let, needed, refusal, row_length, row_mask, shape_of, store, whole
from .tile_ast import Accumulator, Fold, Masks, TileStore, Total, parts_name


def within_row(e: Emitter, scope: Scope, q: MappedNode, after: Scope) -> None:
    """A reduction finished by the program that holds the row."""
    node = q.node
    assert isinstance(node, Reduction)
    value = bind(e, scope, q.value)
    n, rank = row_length(e, q), e.blocks.rank
    if n == 1:
        e.results[node.out] = value
        if node.out in e.kernel.stored:
            store(e, scope, q, value)
        return
    axes = axes_of(e, value) - {"r"}
    if e.blocks.looped(n):
        total = _accumulate(e, scope, q, value, scope.parent or scope)
        axes = frozenset({"x"}) if e.blocks.tiled_x else frozenset()
    else:
        total = whole(e, scope, q, value, node.op)
    result = let(e, after, va.make("reduced", (total,), value.dtype, (node.op, rank - 1, rank)), axes, "total")
    e.results[node.out] = result
    if node.out in e.kernel.stored:
        store(e, after, q, result)


def _accumulate(e: Emitter, scope: Scope, q: MappedNode, value: Value, before: Scope) -> Value:
    """A tile of running results, updated by every block of a long row."""
    node = q.node
    assert isinstance(node, Reduction)
    shape = shape_of(e, frozenset({"x", "r"}), row_length(e, q))
    label = e.fresh("sum" if node.op == "sum" else "best" if node.op in ("max", "min") else "part")
    before.body.append(Accumulator(label, value.dtype, identity(node.op, value.dtype), shape))
    mask = needed(e, row_mask(e, q), value, node.op)
    scope.body.append(Fold(label, node.op, value, () if mask is None else (mask,)))
    out = name(label, value.dtype)
    e.axes[out] = frozenset({"x", "r"})
    return out


def across_programs(e: Emitter, scope: Scope, q: MappedNode) -> None:
    """A reduction over rows: every program folds its own rows and leaves a partial result in a workspace."""
    node = q.node
    assert isinstance(node, Reduction)
    assert scope.parent is not None
    value = bind(e, scope, q.value)
    b, n = e.blocks, row_length(e, q)
    kept = 1 if b.flat or q.reduced else n
    x = ex.var("x", n if b.flat else b.points)
    shape = shape_of(e, frozenset({"x"} if b.flat or n == 1 else {"x", "r"}), n)
    label = e.fresh("sum" if node.op == "sum" else "best" if node.op in ("max", "min") else "part")
    scope.parent.body.append(Accumulator(label, value.dtype, identity(node.op, value.dtype), shape))
    rows = e.masks.get(x)
    within = row_mask(e, q) if kept == 1 and not b.flat else None
    masks = [m for m in (rows, within) if m is not None and needed(e, m, value, node.op)]
    scope.body.append(Fold(label, node.op, value, tuple(masks)))
    slot = ex.var("i0", kept)
    where = ex.substitute(q.index, {v: ex.ix(slot) for v in ex.vars_of(q.index)})
    e.totals.append(Total(label, value.dtype, kept, shape, node.op, node.out, slot, where))


def store_total(e: Emitter, top: Scope, t: Total) -> None:
    """What remains of the axes that the accumulator sums over, then one store of `numel` elements."""
    b = e.blocks
    value: Value = name(t.workspace, t.dtype)
    keeps_row = t.numel != 1
    for axis, block in enumerate(t.shape):
        if block == "1" or (keeps_row and axis == len(t.shape) - 1):
            continue
        value = let(e, top, va.make("reduced", (value,), t.dtype, (t.op, axis, b.rank)), frozenset(), "total")
    at: Index = 0
    masks: Masks = ()
    if keeps_row:
        atom = e.rows[t.numel]
        at = ex.ix(atom)
        masks = (e.masks[atom],) if atom in e.masks else ()
    offset = ex.add(ex.mul(ex.sym("program"), t.numel), at)
    shape = ("1", "1") if b.rank == 2 and not keeps_row else None
    top.body.append(TileStore(parts_name(t), offset, value, masks, shape))


def scatter(e: Emitter, scope: Scope, q: MappedNode) -> None:
    """Stores to positions from data, atomic where they accumulate; which of several plain stores stays is open."""
    node = q.node
    assert isinstance(node, Scatter)
    if node.mode != "set" and q.value.dtype not in ATOMIC.get(node.mode, ()):
        raise refusal(node.out, f"no atomic {node.mode} of {str(q.value.dtype).removeprefix('torch.')}")
    value = bind(e, scope, q.value)
    store(e, scope, q, value, "" if node.mode == "set" else node.mode)


def scan(e: Emitter, scope: Scope, q: MappedNode) -> None:
    """A running result along the row; blocks of a long row carry it from one to the next."""
    node = q.node
    assert isinstance(node, Scan)
    value = bind(e, scope, q.value)
    n, b = row_length(e, q), e.blocks
    if n != 1:
        value = whole(e, scope, q, value, node.op)
        source = value
        value = let(e, scope, va.make("scanned", (source,), value.dtype, (node.op, b.rank - 1)), axes_of(e, source))
        if b.looped(n):
            value = _carried(e, scope, q, source, value, node.op)
        else:
            e.results[node.out] = value
    else:
        e.results[node.out] = value
    if node.out in e.kernel.stored:
        store(e, scope, q, value)


def _carried(e: Emitter, scope: Scope, q: MappedNode, source: Value, scanned: Value, op: str) -> Value:
    assert scope.parent is not None
    carry = name(e.fresh("carry"), scanned.dtype)
    e.axes[carry] = frozenset({"x"})
    shape = shape_of(e, frozenset({"x"}), None)
    scope.parent.body.append(Accumulator(carry.attr, carry.dtype, identity(op, carry.dtype), shape))
    out = let(e, scope, va.make("combined", (carry, scanned), scanned.dtype, op), axes_of(e, scanned))
    block = va.make("reduced", (source,), source.dtype, (op, e.blocks.rank - 1, e.blocks.rank))
    total = let(e, scope, block, frozenset({"x"}), "total")
    scope.body.append(Fold(carry.attr, op, total, ()))
    return out


def provenance(q: MappedNode) -> str:
    """The operators that a member comes from. Names of nodes would make the kernels of equal layers differ."""
    return ", ".join(dict.fromkeys(o.target.removeprefix("aten.") for o in q.node.origins))
