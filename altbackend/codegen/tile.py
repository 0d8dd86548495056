"""Kernel -> tile AST: what one program of a GPU computes, as statements over whole tiles.

A tile has up to two axes: `x` over rows (or, without rows, over all elements) and `r` over the points of a row. A
scalar of the IR becomes a named tile that has the axes on which it depends. Values are `ir.value` trees whose
operands are names, with these operators beside those of the IR:

    tile_load   args: masks; attr: (parameter, index, shape to broadcast the index to or None, eviction policy)
    tile_index  attr: index, as int64
    wrapped     args: position; attr: size
    inside      args: wrapped position; attr: size
    tile_scalar attr: index, as it is
    guarded     args: value, mask; attr: identity of an operator where the mask does not hold
    broadcast   attr: shape
    reduced     attr: (operator, axis number, rank)
    scanned     attr: (operator, axis number)

`shape` is a tuple of block names, "1" for an axis that the tile does not have, () for a scalar.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ..errors import Unsupported
from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Loop, Program, Reduction, Scan, Scatter
from ..ir.ops import ATOMIC, OPS, triton_spelling
from ..ir.value import Value
from ..schedule.kernel import Kernel, Stage
from ..schedule.matmul import PRODUCT, Matmul
from ..schedule.place import Placed
from ..schedule.target import Target
from .ast import Let, Param, identity, name
from .blocks import CROSSED, MATMUL, ROWS, SLICES, Blocks, ceil_div, choose
from .online import Online, plan
from .rounding import CHEAP, cheapened, only_low_precision
from .templates.matmul import Descriptors, Product, tiles_of

Shape = tuple[str, ...]
Masks = tuple[str, ...]


@dataclass(frozen=True)
class Points:
    """`name`: the positions of one axis that start at `base`; without a block a single one.

    `axis` of `rank` is the place of the axis in the tile.
    """

    name: str
    base: str
    block: str | None
    axis: int
    rank: int


@dataclass(frozen=True)
class Mask:
    """`name = var < size`."""

    name: str
    var: str
    size: Index


@dataclass(frozen=True)
class Accumulator:
    """A tile that a loop updates, filled with `init`."""

    name: str
    dtype: torch.dtype
    init: Value
    shape: Shape


@dataclass(frozen=True)
class Fold:
    """`target = target op value` where the masks hold."""

    target: str
    op: str
    value: Value
    masks: Masks


@dataclass(frozen=True)
class TileStore:
    """`target[index] = value`, or the atomic `op` of both, where the masks hold."""

    target: str
    index: Index
    value: Value
    masks: Masks
    shape: Shape | None
    op: str = ""


@dataclass(frozen=True)
class TileLoop:
    """`for var in range(begin, end, step)`. `stages`: turns whose loads are under way at a time.

    `joined`: the loop inside it runs on from one turn to the next, so that its loads are ahead of its turn.
    """

    var: str
    begin: str
    end: Index
    step: str
    body: tuple[TileStmt, ...]
    stages: int = 1
    joined: bool = False


@dataclass(frozen=True)
class Comment:
    text: str


TileStmt: TypeAlias = (
    "Let | Points | Mask | Accumulator | Fold | TileStore | TileLoop | Descriptors | Product | Comment"
)


@dataclass(frozen=True)
class Total:
    """Partial results of a reduction over rows, `numel` a program in a workspace of `dtype`.

    `workspace` names the accumulator, of `shape`. Result number `slot` is `op` over the programs, stored at `index` of
    the buffer `out`.
    """

    workspace: str
    dtype: torch.dtype
    numel: Index
    shape: Shape
    op: str
    out: str
    slot: Atom
    index: Index


@dataclass(frozen=True)
class TileFunction:
    """What the printer spells; `buffers` are the program's buffers in the order of `params`."""

    params: tuple[Param, ...]
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]
    checks: bool
    blocks: Blocks
    body: tuple[TileStmt, ...]
    totals: tuple[Total, ...]


@dataclass
class Scope:
    """Statements of one level; `axis` is the axis that its loop runs along."""

    parent: Scope | None = None
    axis: str = ""
    body: list[TileStmt] = field(default_factory=list)
    bound: dict[tuple[Value, tuple[Value, ...]], Value] = field(default_factory=dict)
    quads: set[str] = field(default_factory=set)


@dataclass
class Emitter:
    program: Program
    kernel: Kernel
    blocks: Blocks
    params: dict[str, Param] = field(default_factory=dict)
    writers: dict[str, Placed] = field(default_factory=dict)
    results: dict[str, Value] = field(default_factory=dict)
    guards: dict[Value, Value] = field(default_factory=dict)
    masks: dict[Atom, str] = field(default_factory=dict)
    axes: dict[Value, frozenset[str]] = field(default_factory=dict)
    rows: dict[Index, Atom] = field(default_factory=dict)
    points: dict[str, tuple[Scope, Points]] = field(default_factory=dict)
    totals: list[Total] = field(default_factory=list)
    symbols: set[Atom] = field(default_factory=set)
    counter: dict[str, int] = field(default_factory=dict)
    checks: bool = False
    fast: bool = False
    cheap: dict[Loop, Value] = field(default_factory=dict)
    unrounded: bool = False

    def fresh(self, prefix: str) -> str:
        n = self.counter[prefix] = self.counter.get(prefix, -1) + 1
        return f"{prefix}{n}"

    def param(self, buffer: str) -> str:
        if buffer not in self.params:
            written = any(q.node.out == buffer for s in self.kernel.stages for q in s.members)
            label = self.fresh("out" if written else "in")
            self.params[buffer] = Param(label, self.program.buffers[buffer].dtype, written)
        return self.params[buffer].name

    def note(self, *indices: Index) -> None:
        for e in indices:
            self.symbols.update(ex.syms_of(e))

    def place(self, scope: Scope, points: Points) -> None:
        """Define the positions of an axis; the last definition of a name is the one that holds."""
        scope.body.append(points)
        self.points[points.name] = scope, points


def refusal(node: object, reason: str) -> Unsupported:
    return Unsupported(node, reason, todo="leave it to a library call, or split the kernel")


def emit(p: Program, k: Kernel, target: Target, blocks: Blocks | None = None) -> TileFunction:
    """The tile AST of a kernel, of `blocks` or those of the rules. Raises Unsupported where tiles cannot express it."""
    fast = target.fast and only_low_precision(p, k)
    cheap = cheapened(p, k) if target.fast and not fast else {}
    e = Emitter(p, k, blocks or choose(p, k, target), fast=fast, cheap=cheap, unrounded=target.fast)
    top = Scope()
    _program_axis(e, top)
    body = _rows_loop(e, top) if e.blocks.form == SLICES else top
    long = [s for s in k.stages if not e.blocks.flat and e.blocks.looped(_flat_points(s))]
    for part in plan(k.stages, long, k.stored):
        if isinstance(part, Stage):
            _stage(e, body, part)
        else:
            _online(e, body, part)
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


# --- axes --------------------------------------------------------------------------------------------------------


def _program_axis(e: Emitter, top: Scope) -> None:
    b = e.blocks
    if b.form == SLICES or b.points == 1:
        return
    if e.kernel.matmul is not None:
        _product(e, top, e.kernel.matmul)
        return
    if b.form == CROSSED:
        program, wide = ex.sym("program"), ceil_div(b.cross[-1].args[1], *b.rblocks.values())
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
    return ex.prod(v.args[1] for v in s.inner)


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


def _unrounded(e: Emitter, v: Value) -> Value | None:
    """The float32 value of a product that the kernel itself rounds to its dtype, where `v` is its conversion back."""
    (x,) = v.args
    m = e.kernel.matmul
    if m is None or not e.unrounded or x.op != "load" or x.attr[0] != m.out or m.out not in e.writers:
        return None
    held = e.writers[m.out].value
    return held.args[0] if held.op == "cast" and held.args[0].dtype == v.dtype else None


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
        _store_total(e, top, t)


QUAD = 4  # words of a Philox block
PIPELINE = 3  # rows that a program works on or waits for: 2 leave a third of the bandwidth unused
PIPELINE_BYTES = 96 << 10  # shared memory for them, so that two programs fit on a multiprocessor


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


def _row_axis(e: Emitter, scope: Scope, n: Index) -> Atom:
    """The axis over the `n` points of a row; a row that is read in blocks has its own loops instead."""
    if n not in e.rows:
        e.rows[n] = ex.var(f"r{len(e.rows)}", n)
        if not e.blocks.looped(n):
            while scope.parent is not None:
                scope = scope.parent
            tiled = e.blocks.form in (CROSSED, MATMUL)
            _row_points(e, scope, n, f"along * {e.blocks.name_of(n)}" if tiled else "0")
    return e.rows[n]


def _row_points(e: Emitter, scope: Scope, n: Index, base: str) -> None:
    b, atom = e.blocks, e.rows[n]
    e.place(scope, Points(atom.key, base, b.name_of(n), b.rank - 1, b.rank))
    if not (isinstance(n, int) and n % b.rblocks[n] == 0):
        e.masks[atom] = f"{atom.key}mask"
        e.note(n)
        scope.body.append(Mask(e.masks[atom], atom.key, n))


def _axes_of(e: Emitter, v: Value) -> frozenset[str]:
    if v in e.axes:
        return e.axes[v]
    return frozenset("x" if a.key == "x" else "r" for a in v.vars)


def _shape(e: Emitter, axes: frozenset[str], row: Index | None) -> Shape:
    """The shape of a tile that has `axes`; `row`: the length of its row axis."""
    b = e.blocks
    out: list[str] = []
    if b.tiled_x:
        out.append("XBLOCK" if "x" in axes else "1")
    if b.has_rows:
        out.append(b.name_of(row) if "r" in axes and row is not None else "1")
    return tuple(out) if any(n != "1" for n in out) else ()


# --- scalars -----------------------------------------------------------------------------------------------------


def bind(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...] = ()) -> Value:
    """`v` as a name or constant, defined in the outermost scope where its operands are known.

    `conds`: conditions under which alone memory may be touched.
    """
    if v.op in ("const", "name"):
        return v
    if not any(x.op in ("load", "wrap_index") for x in va.walk(v)):
        conds = ()
    conds = tuple(c for c in conds if not (v.vars.isdisjoint(c.vars) and _holds_somewhere(c)))
    axes = frozenset().union(_axes_of(e, v), *(_axes_of(e, c) for c in conds))
    while scope.parent is not None and scope.axis not in axes:
        scope = scope.parent
    found = scope.bound.get((v, conds))
    if found is None:
        found = _define(e, scope, v, conds)
        scope.bound[v, conds] = found
    return found


def _holds_somewhere(cond: Value) -> bool:
    """Whether a comparison of positions holds for some of them. What does not vary with these is read there anyway."""
    if cond.op not in ("lt", "ge") or any(a.op not in ("index", "const") for a in cond.args):
        return False
    left, right = (ex.bounds(a.attr) if a.op == "index" else (a.attr, a.attr) for a in cond.args)
    return left[0] < right[0] if cond.op == "lt" else left[1] >= right[1]


def _let(e: Emitter, scope: Scope, v: Value, axes: frozenset[str], prefix: str = "t") -> Value:
    label = name(e.fresh(prefix), v.dtype)
    e.axes[label] = axes
    scope.body.append(Let(label.attr, v))
    return label


def _define(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...]) -> Value:
    axes = _axes_of(e, v)
    match v.op:
        case "load":
            return _load(e, scope, v, conds)
        case "masked":
            cond = bind(e, scope, v.args[0], conds)
            if cond.op == "const":
                return bind(e, scope, v.args[1 if cond.attr else 2], conds)
            held = bind(e, scope, v.args[1], (*conds, v.args[0]))
            other = bind(e, scope, v.args[2], conds)
            return _let(e, scope, va.make("where", (cond, held, other), v.dtype), axes)
        case "index":
            at = _resolved(e, scope, v.attr, conds)[0]
            return _let(e, scope, va.make("tile_index", (), v.dtype, at), axes)
        case "wrap_index":
            return _wrapped(e, scope, v, conds)
        case "cast":
            if (product := _unrounded(e, v)) is not None:
                return bind(e, scope, product)
            return _let(e, scope, va.make("cast", (bind(e, scope, v.args[0], conds),), v.dtype), axes)
        case "philox_uniform" if (quads := _quads(e, v)) is not None:
            seed = bind(e, scope, v.args[0], conds)
            return _let(e, scope, va.make("philox_quads", (seed,), v.dtype, quads), axes)
    op, kind = v.op, v.args[0].dtype if v.op != "where" else v.dtype
    if op.startswith(CHEAP):
        pass
    elif not triton_spelling(op, kind):
        raise refusal(op, f"it has no Triton form for {str(kind).removeprefix('torch.')}")
    elif e.fast and kind == torch.float32 and OPS[op].triton_fast:
        op = CHEAP + op
    return _let(e, scope, va.make(op, tuple(bind(e, scope, a, conds) for a in v.args), v.dtype, v.attr), axes)


def _quads(e: Emitter, v: Value) -> Index | None:
    """The number of the block of four, where neighbours of a tile's last axis draw from one; else None."""
    if v.args[1].op != "index" or e.kernel.matmul is not None:
        return None
    counter: Index = v.args[1].attr
    for a in ex.vars_of(counter):
        scope, points = e.points.get(a.key, (None, None))
        if scope is None or points is None or points.axis != points.rank - 1 or ex.coefficient(counter, a) != 1:
            continue
        block = e.blocks.xblock if a.key == "x" else e.blocks.rblocks[a.args[1]]
        rest = ex.substitute(counter, {a: 0})
        if block % QUAD or ex.mod(rest, QUAD) != 0:
            continue
        quad = ex.var(f"{a.key}q", a.args[1])
        if quad.key not in scope.quads:
            scope.quads.add(quad.key)
            base = "0" if points.base == "0" else f"{points.base} // {QUAD}"
            scope.body.append(Points(quad.key, base, f"{points.block} // {QUAD}", points.axis, points.rank))
        return ex.add(ex.floordiv(rest, QUAD), ex.ix(quad))
    return None


def _load(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...]) -> Value:
    b, index = v.attr
    if b in e.results:
        return e.results[b]
    if b in e.writers and e.writers[b].kind == "point":
        return bind(e, scope, e.writers[b].value)
    at, guards = _resolved(e, scope, index, conds)
    masks, axes = _masks(e, scope, index, conds, guards)
    row = next((a.args[1] for x in (v, *conds) for a in x.vars if a.key != "x"), None)
    if axes == {"r"} and e.blocks.form == ROWS and e.blocks.tiled_x:
        # a tensor of one row gets a layout of its own, and Triton then brings whole tiles into it, by shared memory
        axes = frozenset({"x", "r"})
    shape = _shape(e, axes, row) if axes != _plain_axes(e, at) else None
    policy = "evict_first" if _read_once(e, axes) else ""
    load = va.make("tile_load", tuple(name(m, torch.bool) for m in masks), v.dtype, (e.param(b), at, shape, policy))
    return _let(e, scope, load, axes)


def _read_once(e: Emitter, axes: frozenset[str]) -> bool:
    """Rows in registers are read once; what all rows share (weights) stays in the cache."""
    return e.blocks.streams and axes == {"x", "r"}


def _plain_axes(e: Emitter, index: Index) -> frozenset[str]:
    """Axes that the text of an index has: those of its variables, and of the names in it."""
    own = frozenset("x" if a.key == "x" else "r" for a in ex.vars_of(index))
    return own.union(*(e.axes.get(v, frozenset()) for v in ex.lookups(index)))


def _resolved(e: Emitter, scope: Scope, index: Index, conds: tuple[Value, ...]) -> tuple[Index, tuple[str, ...]]:
    """An index whose data-dependent parts are names, and the names that say whether these are in range."""
    e.note(index)
    found = ex.lookups(index)
    if not found:
        return index, ()
    bound = {x: bind(e, scope, x, conds) for x in found}
    guards = tuple(dict.fromkeys(e.guards[n].attr for n in bound.values() if n in e.guards))
    return ex.substitute(index, {}, lambda x: bound[x]), guards


def _masks(
    e: Emitter, scope: Scope, index: Index, conds: tuple[Value, ...], guards: tuple[str, ...]
) -> tuple[Masks, frozenset[str]]:
    """Masks of an access, and the axes of index and masks together."""
    atoms = set(ex.vars_of(index)).union(*(c.vars for c in conds))
    named = [bind(e, scope, c, conds[:n]) for n, c in enumerate(conds)]
    masks = [e.masks[a] for a in sorted(atoms, key=lambda a: a.key) if a in e.masks]
    texts = [n.attr for n in named if n.op == "name"]
    if any(n.op == "const" and not n.attr for n in named):
        raise refusal("masked value", "its mask never holds")
    axes = frozenset("x" if a.key == "x" else "r" for a in atoms)
    return tuple(dict.fromkeys((*masks, *texts, *guards))), axes


def _wrapped(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...]) -> Value:
    """A checked position: an index that is out of range reads and stores nothing, and raises the error flag.

    A program cannot stop its kernel, and clamping would give a wrong result silently. So accesses at such a position
    are masked out and the caller, who reads the flag after the launch, raises IndexError.
    """
    size, _ = _resolved(e, scope, v.attr, conds)
    axes = frozenset().union(_axes_of(e, v), *(_axes_of(e, c) for c in conds))
    position = bind(e, scope, v.args[0], conds)
    at = _let(e, scope, va.make("wrapped", (position,), torch.int64, size), _axes_of(e, v))
    inside = _let(e, scope, va.make("inside", (at,), torch.bool, size), _axes_of(e, v), "inside")
    e.guards[at] = inside
    e.checks = True
    atoms = set(v.vars).union(*(c.vars for c in conds))
    masks = [e.masks[a] for a in sorted(atoms, key=lambda a: a.key) if a in e.masks]
    masks += [n.attr for c in conds if (n := bind(e, scope, c)).op == "name"]
    row = next((a.args[1] for a in atoms if a.key != "x"), None)
    outside = va.make("logical_not", (inside,), torch.bool)
    flag = _let(e, scope, outside, _axes_of(e, v), "outside")
    scope.body.append(TileStore("error", 0, va.const(1, torch.int32), (*masks, flag.attr), _shape(e, axes, row)))
    return at


# --- stages ------------------------------------------------------------------------------------------------------


def _on_tile(e: Emitter, scope: Scope, q: Placed) -> Placed:
    """`q` with its loops replaced by the axes of the tile."""
    b, n = e.blocks, _row_length(e, q)
    x = ex.ix(ex.var("x", n if b.flat else b.points))
    env: dict[Atom, Index] = {} if b.flat else {q.row: x}
    if b.form == CROSSED:
        *rows, column = b.cross
        env = {column: ex.ix(_row_axis(e, scope, n))}
        env |= dict(zip(rows, ex.unflatten(x, tuple(v.args[1] for v in rows)), strict=True))
    else:
        at = x if b.flat else ex.ix(_row_axis(e, scope, n)) if n != 1 else 0
        env |= dict(zip(q.inner, ex.unflatten(at, q.sizes), strict=True))
    value = e.cheap.get(q.node, q.value).substitute(env)
    index = ex.substitute(q.index, env, lambda x: x.substitute(env))
    return Placed(q.node, q.kind, q.row, q.inner, q.reduced, index, value, q.scanned)


def _stage(e: Emitter, scope: Scope, stage: Stage) -> None:
    n = _flat_points(stage)
    if e.blocks.flat or not e.blocks.looped(n):
        _members(e, scope, stage, scope)
        return
    _row_axis(e, scope, n)
    inner, after = Scope(scope, "r"), Scope(scope)
    _row_points(e, inner, n, "base")
    header = len(inner.body)
    _members(e, inner, stage, after)
    if any(not isinstance(x, Comment) for x in inner.body[header:]):
        e.note(n)
        scope.body.append(TileLoop("base", "0", n, e.blocks.name_of(n), tuple(inner.body)))
    scope.body.extend(after.body)


def _online(e: Emitter, scope: Scope, part: Online) -> None:
    """One pass for a maximum and the sums of exponentials below it.

    m' = max(m, max v);  s' = s exp(m - m') + sum exp(v - m'), where exp(-inf - -inf) counts as 0.
    """
    n, rank = _row_length(e, part.top), e.blocks.rank
    _row_axis(e, scope, n)
    inner, after = Scope(scope, "r"), Scope(scope)
    _row_points(e, inner, n, "base")
    for q in part.passed:
        e.writers[q.node.out] = _on_tile(e, inner, q)
    inner.body.append(Comment(provenance(part.top)))
    top = _on_tile(e, inner, part.top)
    axes = frozenset({"x"}) if e.blocks.tiled_x else frozenset()
    value = bind(e, inner, top.value)
    kind = value.dtype
    best, sums = _running(e, scope, "best", "max", kind, axes), []
    block = va.make("reduced", (_whole(e, inner, top, value, "max"),), kind, ("max", rank - 1, rank))
    new = _let(e, inner, va.make("combined", (best, _let(e, inner, block, axes)), kind, "max"), axes)
    floor = va.apply("where", va.apply("eq", new, identity("max", kind)), va.const(0.0, kind), new)
    floor = _let(e, inner, floor, axes)
    scale = _let(e, inner, _exp(e, va.apply("sub", best, floor)), axes)
    for q in part.sums:
        inner.body.append(Comment(provenance(q)))
        total = _running(e, scope, "sum", "sum", kind, axes)
        terms = _let(e, inner, _exp(e, va.apply("sub", value, floor)), axes | {"r"})
        held = va.make("reduced", (_whole(e, inner, top, terms, "sum"),), kind, ("sum", rank - 1, rank))
        grown = va.apply("add", va.apply("mul", total, scale), _let(e, inner, held, axes))
        inner.body.append(Let(total.attr, grown))
        sums.append(total)
    inner.body.append(Let(best.attr, new))
    e.note(n)
    scope.body.append(TileLoop("base", "0", n, e.blocks.name_of(n), tuple(inner.body)))
    for q, result in zip((part.top, *part.sums), (best, *sums), strict=True):
        placed = _on_tile(e, scope, q)
        e.results[q.node.out], e.writers[q.node.out] = result, placed
        if q.node.out in e.kernel.stored:
            _store(e, after, placed, result)
    scope.body.extend(after.body)


def _running(e: Emitter, scope: Scope, prefix: str, op: str, dtype: torch.dtype, axes: frozenset[str]) -> Value:
    """A number a row that a loop carries."""
    out = name(e.fresh(prefix), dtype)
    e.axes[out] = axes
    scope.body.append(Accumulator(out.attr, dtype, identity(op, dtype), _shape(e, axes, None)))
    return out


def _exp(e: Emitter, x: Value) -> Value:
    return va.make("fast_exp" if e.fast and x.dtype == torch.float32 else "exp", (x,), x.dtype)


def _members(e: Emitter, scope: Scope, stage: Stage, after: Scope) -> None:
    for q in stage.members:
        tile = _on_tile(e, scope, q)
        note = provenance(q)
        if note:
            scope.body.append(Comment(note))
        _member(e, scope, tile, after)
        e.writers[q.node.out] = tile


def provenance(q: Placed) -> str:
    """The operators that a member comes from. Names of nodes would make the kernels of equal layers differ."""
    return ", ".join(dict.fromkeys(o.target.removeprefix("aten.") for o in q.node.origins))


def _member(e: Emitter, scope: Scope, q: Placed, after: Scope) -> None:
    match q.kind:
        case "point":
            if q.node.out in e.kernel.stored:
                _store(e, scope, q, bind(e, scope, q.value))
        case "scatter":
            _scatter(e, scope, q)
        case "scan":
            _scan(e, scope, q)
        case "outer":
            _across_programs(e, scope, q)
        case _ if e.blocks.flat:
            _across_programs(e, scope, q)
        case _:
            _within_row(e, scope, q, after)


def _store(e: Emitter, scope: Scope, q: Placed, value: Value, op: str = "") -> None:
    at, guards = _resolved(e, scope, q.index, ())
    masks, axes = _masks(e, scope, q.index, (), guards)
    if e.blocks.flat and e.blocks.tiled_x:  # a store at a fixed place is one element's, not every program's
        axes |= {"x"}
        x = ex.var("x", _row_length(e, q))
        masks = tuple(dict.fromkeys((*masks, *((e.masks[x],) if x in e.masks else ()))))
    shape = _shape(e, axes, _row_length(e, q)) if axes != _plain_axes(e, at) else None
    scope.body.append(TileStore(e.param(q.node.out), at, value, masks, shape, op))


def _row_length(e: Emitter, q: Placed) -> Index:
    """Points of the row axis, or of all where there are no rows."""
    return e.blocks.cross[-1].args[1] if e.blocks.cross else ex.prod(q.sizes)


def _row_mask(e: Emitter, q: Placed) -> str | None:
    atom = e.rows.get(_row_length(e, q))
    return None if atom is None else e.masks.get(atom)


def _whole(e: Emitter, scope: Scope, q: Placed, value: Value, op: str) -> Value:
    """`value` on all points of the row's block, with the identity of `op` beyond the row's end."""
    mask = _row_mask(e, q)
    axes = _axes_of(e, value) | {"r"}
    if mask is not None:
        guarded = va.make("guarded", (value, name(mask, torch.bool), identity(op, value.dtype)), value.dtype, None)
        value = _let(e, scope, guarded, axes)
    if "r" not in _axes_of(e, value) or value.op == "const":
        value = _let(e, scope, va.make("broadcast", (value,), value.dtype, _shape(e, axes, _row_length(e, q))), axes)
    return value


def _within_row(e: Emitter, scope: Scope, q: Placed, after: Scope) -> None:
    """A reduction finished by the program that holds the row."""
    node = q.node
    assert isinstance(node, Reduction)
    value = bind(e, scope, q.value)
    n, rank = _row_length(e, q), e.blocks.rank
    if n == 1:
        e.results[node.out] = value
        if node.out in e.kernel.stored:
            _store(e, scope, q, value)
        return
    axes = _axes_of(e, value) - {"r"}
    if e.blocks.looped(n):
        total = _accumulate(e, scope, q, value, scope.parent or scope)
        axes = frozenset({"x"}) if e.blocks.tiled_x else frozenset()
    else:
        total = _whole(e, scope, q, value, node.op)
    result = _let(e, after, va.make("reduced", (total,), value.dtype, (node.op, rank - 1, rank)), axes, "total")
    e.results[node.out] = result
    if node.out in e.kernel.stored:
        _store(e, after, q, result)


def _accumulate(e: Emitter, scope: Scope, q: Placed, value: Value, before: Scope) -> Value:
    """A tile of running results, updated by every block of a long row."""
    node = q.node
    assert isinstance(node, Reduction)
    shape = _shape(e, frozenset({"x", "r"}), _row_length(e, q))
    label = e.fresh("sum" if node.op == "sum" else "best" if node.op in ("max", "min") else "part")
    before.body.append(Accumulator(label, value.dtype, identity(node.op, value.dtype), shape))
    mask = _row_mask(e, q)
    scope.body.append(Fold(label, node.op, value, () if mask is None else (mask,)))
    out = name(label, value.dtype)
    e.axes[out] = frozenset({"x", "r"})
    return out


def _across_programs(e: Emitter, scope: Scope, q: Placed) -> None:
    """A reduction over rows: every program folds its own rows and leaves a partial result in a workspace."""
    node = q.node
    assert isinstance(node, Reduction)
    assert scope.parent is not None
    value = bind(e, scope, q.value)
    b, n = e.blocks, _row_length(e, q)
    kept = 1 if b.flat or q.reduced else n
    x = ex.var("x", n if b.flat else b.points)
    shape = _shape(e, frozenset({"x"} if b.flat or n == 1 else {"x", "r"}), n)
    label = e.fresh("sum" if node.op == "sum" else "best" if node.op in ("max", "min") else "part")
    scope.parent.body.append(Accumulator(label, value.dtype, identity(node.op, value.dtype), shape))
    masks = [e.masks[x]] if x in e.masks else []
    if kept == 1 and not b.flat and (row := _row_mask(e, q)) is not None:
        masks.append(row)
    scope.body.append(Fold(label, node.op, value, tuple(masks)))
    slot = ex.var("i0", kept)
    where = ex.substitute(q.index, {v: ex.ix(slot) for v in ex.vars_of(q.index)})
    e.totals.append(Total(label, value.dtype, kept, shape, node.op, node.out, slot, where))


def _store_total(e: Emitter, top: Scope, t: Total) -> None:
    """What remains of the axes that the accumulator sums over, then one store of `numel` elements."""
    b = e.blocks
    value: Value = name(t.workspace, t.dtype)
    keeps_row = t.numel != 1
    for axis, block in enumerate(t.shape):
        if block == "1" or (keeps_row and axis == len(t.shape) - 1):
            continue
        value = _let(e, top, va.make("reduced", (value,), t.dtype, (t.op, axis, b.rank)), frozenset(), "total")
    at: Index = 0
    masks: Masks = ()
    if keeps_row:
        atom = e.rows[t.numel]
        at = ex.ix(atom)
        masks = (e.masks[atom],) if atom in e.masks else ()
    offset = ex.add(ex.mul(ex.sym("program"), t.numel), at)
    shape = ("1", "1") if b.rank == 2 and not keeps_row else None
    top.body.append(TileStore(parts_name(t), offset, value, masks, shape))


def parts_name(t: Total) -> str:
    """The workspace parameter of a total."""
    return f"{t.workspace}_parts"


def _scatter(e: Emitter, scope: Scope, q: Placed) -> None:
    """Stores to positions from data, atomic where they accumulate; which of several plain stores stays is open."""
    node = q.node
    assert isinstance(node, Scatter)
    if node.mode != "set" and q.value.dtype not in ATOMIC.get(node.mode, ()):
        raise refusal(node.out, f"no atomic {node.mode} of {str(q.value.dtype).removeprefix('torch.')}")
    value = bind(e, scope, q.value)
    _store(e, scope, q, value, "" if node.mode == "set" else node.mode)


def _scan(e: Emitter, scope: Scope, q: Placed) -> None:
    """A running result along the row; blocks of a long row carry it from one to the next."""
    node = q.node
    assert isinstance(node, Scan)
    value = bind(e, scope, q.value)
    n, b = _row_length(e, q), e.blocks
    if n != 1:
        value = _whole(e, scope, q, value, node.op)
        source = value
        value = _let(e, scope, va.make("scanned", (source,), value.dtype, (node.op, b.rank - 1)), _axes_of(e, source))
        if b.looped(n):
            value = _carried(e, scope, q, source, value, node.op)
        else:
            e.results[node.out] = value
    else:
        e.results[node.out] = value
    if node.out in e.kernel.stored:
        _store(e, scope, q, value)


def _carried(e: Emitter, scope: Scope, q: Placed, source: Value, scanned: Value, op: str) -> Value:
    assert scope.parent is not None
    carry = name(e.fresh("carry"), scanned.dtype)
    e.axes[carry] = frozenset({"x"})
    shape = _shape(e, frozenset({"x"}), None)
    scope.parent.body.append(Accumulator(carry.attr, carry.dtype, identity(op, carry.dtype), shape))
    out = _let(e, scope, va.make("combined", (carry, scanned), scanned.dtype, op), _axes_of(e, scanned))
    block = va.make("reduced", (source,), source.dtype, (op, e.blocks.rank - 1, e.blocks.rank))
    total = _let(e, scope, block, frozenset({"x"}), "total")
    scope.body.append(Fold(carry.attr, op, total, ()))
    return out
