"""Kernel -> tile AST: what one program of a GPU computes, as statements over whole tiles (`tile_ast.py`)."""

from __future__ import annotations

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Program
from ...schedule.device import Target
from ...schedule.kernel import Kernel, Stage
from ...schedule.loop_mapping import MappedNode
from ...schedule.products.matmul import PRODUCT, Matmul, tiles_of
from ...schedule.tiling.gpu.blocks import CROSSED, SLICES, Blocks, ceil_div, choose
from ...schedule.tiling.gpu.fast_math import cheapened, only_low_precision
from ...schedule.tiling.gpu.online_softmax import Online, plan
from ..cpp.ast import Let, name
from .online_softmax import emit_online
from .scope import Emitter, Scope, bind, on_tile, row_axis, row_points, store
from .templates.matmul import Descriptors, Product
from .tile_ast import Comment, Mask, Points, TileFunction, TileLoop
from .totals import across_programs, provenance, scan, scatter, store_total, within_row

PIPELINE = 3  # rows that a program works on or waits for: 2 leave a third of the bandwidth unused
PIPELINE_BYTES = 96 << 10  # shared memory for them, so that two programs fit on a multiprocessor


def emit(p: Program, k: Kernel, target: Target, blocks: Blocks | None = None) -> TileFunction:
    """The tile AST of a kernel, of `blocks` or those of the rules. Raises Unsupported where tiles cannot express it."""
    fast = target.fast and only_low_precision(p, k)
    cheap = cheapened(p, k) if target.fast and not fast else {}
    e = Emitter(p, k, blocks or choose(p, k, target), fast=fast, cheap=cheap, own_numerics=target.fast)
    top = Scope()
    _program_axis(e, top)
    body = _rows_loop(e, top) if e.blocks.form == SLICES else top
    long = [s for s in k.stages if not e.blocks.flat and e.blocks.looped(_flat_points(s))]
    parts = plan(k.stages, long, k.stored)
    read = [_read_by(k, part) if part in long or isinstance(part, Online) else set() for part in parts]
    for n, part in enumerate(parts):
        e.last_reads = read[n].intersection(*[set().union(*read[:n])]).difference(*read[n + 1 :])
        if isinstance(part, Stage):
            _stage(e, body, part)
        else:
            emit_online(e, body, part)
    if body is not top:
        _close_rows_loop(e, top, body)
    if k.matmul is not None:
        _close_tiles_loop(e, top, k.matmul)
    e.note(e.blocks.points, *(t.numel for t in e.totals))
    return TileFunction(
        params=tuple(e.params.values()),
        buffers=tuple(e.params),
        symbols=tuple(sorted(a.key for a in e.symbols)),
        checks=e.checks,
        blocks=e.blocks,
        body=tuple(top.body),
        totals=tuple(e.totals),
    )


def _read_by(k: Kernel, part: Stage | Online) -> set[str]:
    """The buffers that a pass over long rows reads, for the points too that it computes again."""
    points = {q.node.out: q for s in k.stages for q in s.members if q.kind == "point"}
    pending = list(part.members if isinstance(part, Stage) else (*part.passed, part.top, *part.sums))
    read: set[str] = set()
    while pending:
        found = {b for b, _ in va.loads(pending.pop().value)} - read
        read |= found
        pending += [points[b] for b in found & points.keys()]
    return read


def _program_axis(e: Emitter, top: Scope) -> None:
    b = e.blocks
    if b.form == SLICES or b.points == 1:
        return
    if e.kernel.matmul is not None:
        _product(e, top, e.kernel.matmul)
        return
    if b.form == CROSSED:
        program, wide = ex.sym("program"), ceil_div(ex.size_of(b.cross[-1]), *b.rblocks.values())
        for label, at in (("across", ex.floordiv(program, wide)), ("along", ex.mod(program, wide))):
            top.body.append(Let(label, va.make("tile_scalar", (), torch.int64, at)))
        base, block = ("across * XBLOCK", "XBLOCK") if b.tiled_x else ("across", None)
        top.body.append(Points("x", base, block, 0, b.rank))
    elif b.tiled_x:
        e.place(top, Points("x", "program * XBLOCK", "XBLOCK", 0, b.rank))
    else:
        top.body.append(Points("x", "program", None, 0, b.rank))
    _x_masks(e, top)


def _x_masks(e: Emitter, scope: Scope) -> None:
    """One mask for every length that the tile of rows or elements does not divide."""
    b = e.blocks
    lengths = dict.fromkeys(_flat_points(s) for s in e.kernel.stages) if b.flat else {b.points: None}
    for n in lengths:
        atom = ex.var("x", n)
        if n == b.points and isinstance(n, int) and n % b.xblock == 0:
            continue
        label = "xmask" if n == b.points else e.fresh("xmask_")
        e.masks[atom] = label
        e.note(n)
        scope.body.append(Mask(label, "x", n))


def _flat_points(s: Stage) -> Index:
    return ex.prod(ex.size_of(v) for v in s.inner)


def _product(e: Emitter, top: Scope, m: Matmul) -> None:
    """The sums of a tile of a matrix product; its rows are those of their own batch only."""
    tiles, batch = tiles_of(m)[0], ex.sym("batch")
    sides = e.param(m.left.buffer), e.param(m.right.buffer)
    top.body.append(Product("tile" if tiles.persistent else "program", *sides, m))
    base = f"batch * {m.rows} + across * XBLOCK" if m.batch > 1 else "across * XBLOCK"
    top.body.append(Points("x", base, "XBLOCK", 0, e.blocks.rank))
    if m.rows % tiles.rows:
        e.masks[ex.var("x", e.blocks.points)] = "xmask"
        top.body.append(Mask("xmask", "x", ex.mul(ex.add(batch, 1), m.rows) if m.batch > 1 else m.rows))
    e.axes[PRODUCT] = frozenset({"x", "r"})
    top.bound[PRODUCT, ()] = name("sums", PRODUCT.dtype)
    e.axes[top.bound[PRODUCT, ()]] = e.axes[PRODUCT]


def _close_tiles_loop(e: Emitter, top: Scope, m: Matmul) -> None:
    """A persistent program computes one tile after the other."""
    tiles, high, wide = tiles_of(m)
    if tiles.persistent:
        count = m.batch * high * wide
        top.body = [TileLoop("tile", "program", count, "programs", tuple(top.body), joined=tiles.descriptors)]
    if tiles.descriptors:
        top.body.insert(0, Descriptors(e.param(m.left.buffer), e.param(m.right.buffer), m))


def _rows_loop(e: Emitter, top: Scope) -> Scope:
    scope = Scope(top, "x")
    b = e.blocks
    if b.tiled_x:
        e.place(scope, Points("x", "first", "XBLOCK", 0, b.rank))
    _x_masks(e, scope)
    return scope


def _close_rows_loop(e: Emitter, top: Scope, body: Scope) -> None:
    b = e.blocks
    step = "programs * XBLOCK" if b.tiled_x else "programs"
    start = "program * XBLOCK" if b.tiled_x else "program"
    top.body.append(TileLoop("first" if b.tiled_x else "x", start, b.points, step, tuple(body.body), _stages(e)))
    for t in e.totals:
        store_total(e, top, t)


def _stages(e: Emitter) -> int:
    """How many turns of the loop over rows to overlap; what is on its way lies in shared memory."""
    if not e.blocks.has_rows:
        return 1
    members = [q for s in e.kernel.stages for q in s.members]
    made = {q.node.out for q in members}
    full = {
        b
        for q in members
        for b, i in va.loads(q.value)
        if b not in made and q.row in ex.vars_of(i) and ex.vars_of(i).intersection(q.inner)
    }
    points = e.blocks.xblock * max(e.blocks.rblocks.values())
    waiting = sum(e.program.buffers[b].dtype.itemsize for b in full) * points
    return next((n for n in range(PIPELINE, 1, -1) if n * waiting <= PIPELINE_BYTES), 1)


def _stage(e: Emitter, scope: Scope, stage: Stage) -> None:
    n = _flat_points(stage)
    if e.blocks.flat or not e.blocks.looped(n):
        _members(e, scope, stage, scope)
        return
    row_axis(e, scope, n)
    inner, after = Scope(scope, "r"), Scope(scope)
    row_points(e, inner, n, "base")
    header = len(inner.body)
    _members(e, inner, stage, after)
    if any(not isinstance(x, Comment) for x in inner.body[header:]):
        e.note(n)
        scope.body.append(TileLoop("base", "0", n, e.blocks.name_of(n), tuple(inner.body)))
    scope.body.extend(after.body)


def _members(e: Emitter, scope: Scope, stage: Stage, after: Scope) -> None:
    for q in stage.members:
        tile = on_tile(e, scope, q)
        note = provenance(q)
        if note:
            scope.body.append(Comment(note))
        _member(e, scope, tile, after)
        e.writers[q.node.out] = tile


def _member(e: Emitter, scope: Scope, q: MappedNode, after: Scope) -> None:
    match q.kind:
        case "point":
            if q.node.out in e.kernel.stored:
                store(e, scope, q, bind(e, scope, q.value))
        case "scatter":
            scatter(e, scope, q)
        case "scan":
            scan(e, scope, q)
        case "outer":
            across_programs(e, scope, q)
        case _ if e.blocks.flat:
            across_programs(e, scope, q)
        case _:
            within_row(e, scope, q, after)
