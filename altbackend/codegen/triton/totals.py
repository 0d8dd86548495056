"""Emit reductions, scans and scatters of a kernel as statements over tiles."""

from __future__ import annotations

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Reduction, Scan, Scatter
from ...ir.ops import ATOMIC
from ...ir.value import Value
from ...schedule.loop_mapping import MappedNode
from .emitter import Emitter, Scope
from .exact_sums import Term, fold, halvings, is_exact, is_long, reduced, rounded
from .scope import (
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
from .tile_ast import Masks, TileStore, Total


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
    exact = is_exact(e, q)
    times = halvings(e, q) if exact else 0
    if e.blocks.looped(n):
        mask = needed_mask(e, row_mask(e, q), value, node.op)
        shape = shape_of(e, frozenset({"x", "r"}), n)
        term = Term(node.op, value, () if mask is None else (mask,), shape, exact and is_long(n, e.blocks.rblocks[n]))
        tile = rounded(fold(e, scope.parent or scope, scope, term))
        axes = frozenset({"x"}) if e.blocks.tiled_x else frozenset()
    else:
        tile = fill_block(e, scope, q, value, node.op)
    result = let(e, after, reduced(tile, node.op, rank - 1, rank, times), axes, "total")
    e.results[node.out] = result
    if node.out in e.kernel.stored:
        store(e, after, q, result)


def across_programs(e: Emitter, scope: Scope, q: MappedNode) -> None:
    """Emit a reduction over rows: every program reduces its own rows; a second kernel reduces the programs' results."""
    node = q.node
    assert isinstance(node, Reduction)
    assert scope.parent is not None
    value = bind(e, scope, q.value)
    b, n, partial = e.blocks, row_length(e, q), e.tiled.partials[node.out]
    x = ex.var("x", n if b.flat else b.points)
    shape = shape_of(e, frozenset({"x"} if b.flat or n == 1 else {"x", "r"}), n)
    within = row_mask(e, q) if partial.numel == 1 and not b.flat else None
    masks = [m for m in (e.masks.get(x), within) if m is not None and needed_mask(e, m, value, node.op)]
    exact = is_exact(e, q)
    is_chain = exact and is_long(n if b.flat else b.points, ex.mul(b.programs, b.xblock))
    running = fold(e, scope.parent, scope, Term(node.op, value, tuple(masks), shape, is_chain))
    e.totals.append(Total(running, shape, partial, halvings(e, q) if exact and b.rank == 1 else 0))


def store_partials(e: Emitter, top: Scope, t: Total) -> None:
    """Reduce the accumulator along the axes that do not hold results, and store `numel` elements in the workspace."""
    b, partial = e.blocks, t.partial
    value = rounded(t.accumulators)
    has_row = partial.numel != 1
    for axis, block in enumerate(t.shape):
        if block == "1" or (has_row and axis == len(t.shape) - 1):
            continue
        value = let(e, top, reduced(value, partial.op, axis, b.rank, t.halvings), frozenset(), "total")
    position: Index = 0
    masks: Masks = ()
    if has_row:
        atom = e.rows[partial.numel]
        position = ex.sub(ex.sub(partial.numel, 1), ex.ix(atom)) if b.backwards else ex.ix(atom)
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
        source = _on_rows(e, scope, q, fill_block(e, scope, q, value, node.op))
        exact = is_exact(e, q)
        scanned = va.make("scanned", (source,), value.dtype, (node.op, b.rank - 1, exact, b.backwards))
        value = let(e, scope, scanned, axes_of(e, source))
        if b.looped(n):
            value = _carried(e, scope, source, value, node.op, exact)
    e.results[node.out] = value
    if node.out in e.kernel.stored:
        store(e, scope, q, value)


def _on_rows(e: Emitter, scope: Scope, q: MappedNode, value: Value) -> Value:
    """Return `value` on all rows of the tile, each of which carries its own result from block to block."""
    if not e.blocks.tiled_x or "x" in axes_of(e, value):
        return value
    axes = axes_of(e, value) | {"x"}
    tile = va.make("broadcast", (value,), value.dtype, shape_of(e, axes, row_length(e, q)))
    return let(e, scope, tile, axes)


def _carried(e: Emitter, scope: Scope, source: Value, scanned: Value, op: str, exact: bool) -> Value:
    """Return the scanned block combined with the result of the blocks before it."""
    assert scope.parent is not None
    axis, rank = e.blocks.rank - 1, e.blocks.rank
    block = va.make("exact_sum", (source,), source.dtype, (axis, rank)) if exact else reduced(source, op, axis, rank)
    total = let(e, scope, block, frozenset({"x"}), "total")
    turn = Scope(scope)
    term = Term(op, total, (), shape_of(e, frozenset({"x"}), None), exact)
    carried = rounded(fold(e, scope.parent, turn, term, "carry"))
    combined = let(e, scope, va.make("combined", (carried, scanned), scanned.dtype, op), axes_of(e, scanned))
    scope.body += turn.body
    return combined


def provenance(q: MappedNode) -> str:
    """Return the operators of a node. Names of graph nodes would make the kernels of equal layers differ."""
    return ", ".join(dict.fromkeys(o.target.removeprefix("aten.") for o in q.node.origins))
