"""Emit reductions, scans and scatters of a kernel as statements over tiles."""

from __future__ import annotations

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Reduction, Scan, Scatter
from ...ir.ops import ATOMIC
from ...ir.value import Value
from ...schedule.loop_mapping import MappedNode
from ..cpp.ast import name
from .scope import (
    Emitter,
    Scope,
    axes_of,
    bind,
    fill_block,
    let,
    needed_mask,
    row_length,
    row_mask,
    shape_of,
    store,
    unsupported,
)
from .tile_ast import Accumulator, Fold, Masks, TileStore, Total

_LABELS = {"sum": "sum", "max": "best", "min": "best"}


def within_row(e: Emitter, scope: Scope, q: MappedNode, after: Scope) -> None:
    """Emit a reduction that the program finishes itself; `after` is the scope behind the loop over a long row."""
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
        total = fill_block(e, scope, q, value, node.op)
    result = let(e, after, va.make("reduced", (total,), value.dtype, (node.op, rank - 1, rank)), axes, "total")
    e.results[node.out] = result
    if node.out in e.kernel.stored:
        store(e, after, q, result)


def _accumulate(e: Emitter, scope: Scope, q: MappedNode, value: Value, before: Scope) -> Value:
    """Return a tile of running results, which every block of a long row updates."""
    node = q.node
    assert isinstance(node, Reduction)
    shape = shape_of(e, frozenset({"x", "r"}), row_length(e, q))
    label = e.fresh(_LABELS.get(node.op, "part"))
    before.body.append(Accumulator(label, value.dtype, va.identity(node.op, value.dtype), shape))
    mask = needed_mask(e, row_mask(e, q), value, node.op)
    scope.body.append(Fold(label, node.op, value, () if mask is None else (mask,)))
    running = name(label, value.dtype)
    e.axes[running] = frozenset({"x", "r"})
    return running


def across_programs(e: Emitter, scope: Scope, q: MappedNode) -> None:
    """Emit a reduction over rows: every program reduces its own rows; a second kernel reduces the programs' results."""
    node = q.node
    assert isinstance(node, Reduction)
    assert scope.parent is not None
    value = bind(e, scope, q.value)
    b, n, partial = e.blocks, row_length(e, q), e.tiled.partials[node.out]
    x = ex.var("x", n if b.flat else b.points)
    shape = shape_of(e, frozenset({"x"} if b.flat or n == 1 else {"x", "r"}), n)
    label = e.fresh(_LABELS.get(node.op, "part"))
    scope.parent.body.append(Accumulator(label, value.dtype, va.identity(node.op, value.dtype), shape))
    within = row_mask(e, q) if partial.numel == 1 and not b.flat else None
    masks = [m for m in (e.masks.get(x), within) if m is not None and needed_mask(e, m, value, node.op)]
    scope.body.append(Fold(label, node.op, value, tuple(masks)))
    e.totals.append(Total(label, shape, partial))


def store_partials(e: Emitter, top: Scope, t: Total) -> None:
    """Reduce the accumulator along the axes that do not hold results, and store `numel` elements in the workspace."""
    b, partial = e.blocks, t.partial
    value: Value = name(t.accumulator, partial.dtype)
    has_row = partial.numel != 1
    for axis, block in enumerate(t.shape):
        if block == "1" or (has_row and axis == len(t.shape) - 1):
            continue
        reduced = va.make("reduced", (value,), partial.dtype, (partial.op, axis, b.rank))
        value = let(e, top, reduced, frozenset(), "total")
    position: Index = 0
    masks: Masks = ()
    if has_row:
        atom = e.rows[partial.numel]
        position = ex.ix(atom)
        masks = (e.masks[atom],) if atom in e.masks else ()
    offset = ex.add(ex.mul(ex.sym("program"), partial.numel), position)
    shape = ("1", "1") if b.rank == 2 and not has_row else None
    top.body.append(TileStore(partial.workspace, offset, value, masks, shape))


def scatter(e: Emitter, scope: Scope, q: MappedNode) -> None:
    """Emit stores to positions read from data: atomic where they accumulate, else the last of several is undefined."""
    node = q.node
    assert isinstance(node, Scatter)
    if node.mode != "set" and q.value.dtype not in ATOMIC.get(node.mode, ()):
        raise unsupported(node.out, f"no atomic {node.mode} of {str(q.value.dtype).removeprefix('torch.')}")
    value = bind(e, scope, q.value)
    store(e, scope, q, value, "" if node.mode == "set" else node.mode)


def scan(e: Emitter, scope: Scope, q: MappedNode) -> None:
    """Emit a running result along the row; each block of a long row carries it to the next."""
    node = q.node
    assert isinstance(node, Scan)
    value = bind(e, scope, q.value)
    n, b = row_length(e, q), e.blocks
    if n != 1:
        value = fill_block(e, scope, q, value, node.op)
        source = value
        value = let(e, scope, va.make("scanned", (source,), value.dtype, (node.op, b.rank - 1)), axes_of(e, source))
        if b.looped(n):
            value = _carried(e, scope, source, value, node.op)
    e.results[node.out] = value
    if node.out in e.kernel.stored:
        store(e, scope, q, value)


def _carried(e: Emitter, scope: Scope, source: Value, scanned: Value, op: str) -> Value:
    """Return the scanned block combined with the result of the blocks before it."""
    assert scope.parent is not None
    carry = name(e.fresh("carry"), scanned.dtype)
    e.axes[carry] = frozenset({"x"})
    shape = shape_of(e, frozenset({"x"}), None)
    scope.parent.body.append(Accumulator(carry.attr, carry.dtype, va.identity(op, carry.dtype), shape))
    combined = let(e, scope, va.make("combined", (carry, scanned), scanned.dtype, op), axes_of(e, scanned))
    block = va.make("reduced", (source,), source.dtype, (op, e.blocks.rank - 1, e.blocks.rank))
    total = let(e, scope, block, frozenset({"x"}), "total")
    scope.body.append(Fold(carry.attr, op, total, ()))
    return combined


def provenance(q: MappedNode) -> str:
    """Return the operators of a node. Names of graph nodes would make the kernels of equal layers differ."""
    return ", ".join(dict.fromkeys(o.target.removeprefix("aten.") for o in q.node.origins))
