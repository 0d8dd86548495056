"""Emit the tile AST of a finished GPU kernel: statements over whole tiles (`tile_ast.py`) that one program runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Program
from ...schedule.kernel import Kernel, Stage
from ...schedule.loop_mapping import Kind, MappedNode
from ...schedule.products.matmul import PRODUCT, Matmul, tiles_of
from ...schedule.tiling.gpu.blocks import Blocks, Form, ceil_div
from ...schedule.tiling.gpu.one_pass import Joined
from ...schedule.tiling.gpu.online_softmax import OnlineSoftmax
from ...schedule.tiling.gpu.tiled import TiledKernel
from ..cpp.ast import Let, name
from .access import is_shared
from .emitter import Emitter, Scope
from .online_position import emit_online_position
from .online_softmax import emit_online_softmax
from .scope import bind, on_tile, row_axis, row_points, store
from .templates.matmul import Descriptors, Product
from .tile_ast import Comment, Mask, Points, TileFunction, TileLoop
from .totals import across_programs, provenance, scan, scatter, store_partials, within_row

PIPELINED_ROWS = 3  # rows that a program works on or waits for: 2 leave a third of the bandwidth unused
PIPELINE_BYTES = 96 << 10  # shared memory for them, so that two programs fit on a multiprocessor


def emit(p: Program, tiled: TiledKernel) -> TileFunction:
    """Return the tile AST of a finished kernel. Raises Unsupported where tiles cannot express it."""
    e = Emitter(p, tiled)
    top = Scope()
    _program_axis(e, top)
    body = _rows_loop(e, top) if e.blocks.form is Form.PERSISTENT else top
    _passes(e, body)
    if body is not top:
        _close_rows_loop(e, top, body)
    if e.kernel.matmul is not None:
        _close_tiles_loop(e, top, e.kernel.matmul)
    e.note(e.blocks.points, *(t.partial.numel for t in e.totals))
    return TileFunction(
        params=tuple(e.params.values()),
        buffers=tuple(e.params),
        symbols=tuple(sorted(a.key for a in e.symbols)),
        checks=e.checks,
        blocks=e.blocks,
        body=tuple(top.body),
        totals=tuple(e.totals),
    )


# --- passes over rows ------------------------------------------------------------------------------------------------


def _passes(e: Emitter, body: Scope) -> None:
    """Emit all passes; the last one that reads a long row lets the cache evict it."""
    passes, long = e.tiled.passes, e.tiled.long_stages
    read = [_read_by(e.kernel, x) if x in long or not isinstance(x, Stage) else set() for x in passes]
    for n, x in enumerate(passes):
        e.last_reads = read[n].intersection(*[set().union(*read[:n])]).difference(*read[n + 1 :])
        if isinstance(x, Stage):
            _stage(e, body, x)
        elif isinstance(x, OnlineSoftmax):
            emit_online_softmax(e, body, x)
        else:
            emit_online_position(e, body, x)


def _read_by(k: Kernel, one_pass: Stage | Joined) -> set[str]:
    """Return the buffers that a pass over long rows reads, also for points that it computes again."""
    point_of = {q.node.out: q for q in k.nodes if q.kind is Kind.POINT}
    pending = list(one_pass.members)
    read: set[str] = set()
    while pending:
        new = {b for b, _ in va.loads(pending.pop().value)} - read
        read |= new
        pending += [point_of[b] for b in new & point_of.keys()]
    return read


def _stage(e: Emitter, scope: Scope, stage: Stage) -> None:
    n = _points_of(stage)
    if e.blocks.flat or not e.blocks.looped(n):
        _members(e, scope, stage.members, scope)
        return
    row_axis(e, scope, n)
    inner, after = Scope(scope, "r"), Scope(scope)
    row_points(e, inner, n, _block_start(e.blocks, n))
    header = len(inner.body)
    _members(e, inner, stage.members, after)
    if any(not isinstance(x, Comment) for x in inner.body[header:]):
        e.note(n)
        scope.body.append(TileLoop("base", "0", n, e.blocks.name_of(n), tuple(inner.body)))
    scope.body.extend(after.body)
    e.passed.update(q.node.out for q in stage.members if q.kind is Kind.SCAN)


def _block_start(b: Blocks, n: Index) -> str:
    """Return where a turn of the loop over a row of `n` points begins: the first one at the row's end if backwards."""
    if not b.backwards:
        return "base"
    assert isinstance(n, int)
    return f"({(n - 1) // b.rblocks[n] * b.rblocks[n]} - base)"


def _points_of(s: Stage) -> Index:
    return ex.prod(ex.size_of(v) for v in s.inner)


def _members(e: Emitter, scope: Scope, members: Sequence[MappedNode], after: Scope) -> None:
    for q in members:
        tile = on_tile(e, scope, q)
        note = provenance(q)
        if note:
            scope.body.append(Comment(note))
        _member(e, scope, tile, after)
        e.writers[q.node.out] = tile


def _member(e: Emitter, scope: Scope, q: MappedNode, after: Scope) -> None:
    match q.kind:
        case Kind.POINT:
            if q.node.out in e.kernel.stored:
                store(e, scope, q, bind(e, scope, q.value))
        case Kind.SCATTER:
            scatter(e, scope, q)
        case Kind.SCAN:
            scan(e, scope, q)
        case Kind.CROSS_ROW:
            across_programs(e, scope, q)
        case Kind.IN_ROW if e.blocks.flat:
            across_programs(e, scope, q)
        case Kind.IN_ROW:
            within_row(e, scope, q, after)


# --- the axis over programs ------------------------------------------------------------------------------------------


def _program_axis(e: Emitter, top: Scope) -> None:
    b = e.blocks
    if b.form is Form.PERSISTENT or b.points == 1:
        return
    if e.kernel.matmul is not None:
        _product(e, top, e.kernel.matmul)
        return
    if b.form is Form.TRANSPOSE:
        ((width, rblock),) = b.rblocks.items()
        program, columns = ex.sym("program"), ceil_div(width, rblock)
        for label, position in (("across", ex.floordiv(program, columns)), ("along", ex.mod(program, columns))):
            top.body.append(Let(label, va.make("tile_scalar", (), torch.int64, position)))
        base, block = ("across * XBLOCK", "XBLOCK") if b.tiled_x else ("across", None)
        top.body.append(Points("x", base, block, 0, b.rank))
    elif b.tiled_x:
        e.define_axis(top, Points("x", "program * XBLOCK", "XBLOCK", 0, b.rank))
    else:
        top.body.append(Points("x", "program", None, 0, b.rank))
    _x_masks(e, top)


def _x_masks(e: Emitter, scope: Scope) -> None:
    """Define one mask for every length that the tile of rows or elements does not divide."""
    b = e.blocks
    lengths = dict.fromkeys(_points_of(s) for s in e.kernel.stages) if b.flat else {b.points: None}
    for n in lengths:
        if n == b.points and isinstance(n, int) and n % b.xblock == 0:
            continue
        label = "xmask" if n == b.points else e.fresh("xmask_")
        e.masks[ex.var("x", n)] = label
        e.note(n)
        scope.body.append(Mask(label, "x", n))


def _product(e: Emitter, top: Scope, m: Matmul) -> None:
    """Emit the sums of a tile of a matrix product; the tile has rows of one matrix of the batch only."""
    tiles, batch = tiles_of(m)[0], ex.sym("batch")
    operands = e.param(m.left.buffer), e.param(m.right.buffer)
    top.body.append(Product("tile" if tiles.persistent else "program", *operands, m))
    base = f"batch * {m.rows} + across * XBLOCK" if m.batch > 1 else "across * XBLOCK"
    top.body.append(Points("x", base, "XBLOCK", 0, e.blocks.rank))
    if m.rows % tiles.rows:
        e.masks[ex.var("x", e.blocks.points)] = "xmask"
        top.body.append(Mask("xmask", "x", ex.mul(ex.add(batch, 1), m.rows) if m.batch > 1 else m.rows))
    e.axes[PRODUCT] = frozenset({"x", "r"})
    top.bound[PRODUCT, ()] = name("sums", PRODUCT.dtype)
    e.axes[top.bound[PRODUCT, ()]] = e.axes[PRODUCT]


def _close_tiles_loop(e: Emitter, top: Scope, m: Matmul) -> None:
    """Put the body in a loop over tiles where programs are persistent."""
    tiles, down, across = tiles_of(m)
    if tiles.persistent:
        count = m.batch * down * across
        top.body = [TileLoop("tile", "program", count, "programs", tuple(top.body), joined=tiles.descriptors)]
    if tiles.descriptors:
        top.body.insert(0, Descriptors(e.param(m.left.buffer), e.param(m.right.buffer), m))


# --- persistent programs ---------------------------------------------------------------------------------------------


def _rows_loop(e: Emitter, top: Scope) -> Scope:
    """Open the loop of a persistent program over its rows or elements."""
    scope = Scope(top, "x")
    if e.blocks.tiled_x:
        e.define_axis(scope, Points("x", "first", "XBLOCK", 0, e.blocks.rank))
    _x_masks(e, scope)
    return scope


def _close_rows_loop(e: Emitter, top: Scope, body: Scope) -> None:
    b = e.blocks
    step = "programs * XBLOCK" if b.tiled_x else "programs"
    start = "program * XBLOCK" if b.tiled_x else "program"
    var = "first" if b.tiled_x else "x"
    top.body.append(TileLoop(var, start, b.points, step, tuple(body.body), _pipeline_stages(e)))
    for t in e.totals:
        store_partials(e, top, t)


def _pipeline_stages(e: Emitter) -> int:
    """Return how many turns of the loop over rows overlap; loads under way occupy shared memory.

    Loads of operands that rows share, and of windows, do not overlap. Triton copies the former to shared memory element
    by element: a cross-entropy behind an instance norm took 454 us, and 117 with loads where they are needed. Of a
    window it copies one tile for each element: twelve tiles of a pool occupied about 49 KB a warp.
    """
    if not e.blocks.has_rows:
        return 1
    members = e.kernel.nodes
    written = {q.node.out for q in members}
    full_tiles = {
        (b, i, q.points)
        for q in members
        for b, i in va.loads(q.value)
        if b not in written and q.row in ex.vars_of(i) and ex.vars_of(i).intersection(q.inner)
    }
    if any(b in e.windows or is_shared(e, i, n) for b, i, n in full_tiles):
        return 1
    points = e.blocks.xblock * max(e.blocks.rblocks.values())
    turn_bytes = sum(e.program.buffers[b].dtype.itemsize for b, _, _ in full_tiles) * points
    return next((n for n in range(PIPELINED_ROWS, 1, -1) if n * turn_bytes <= PIPELINE_BYTES), 1)
