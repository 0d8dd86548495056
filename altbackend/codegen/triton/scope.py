"""Where the scalars of a kernel become tiles: each a name, defined in the outermost loop that knows its operands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ...errors import Unsupported
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.loops import Loop, Program
from ...ir.ops import OPS, triton_spelling
from ...ir.value import Value
from ...schedule.kernel import Kernel
from ...schedule.loop_mapping import MappedNode
from ...schedule.tiling.gpu.blocks import CROSSED, MATMUL, ROWS, Blocks
from ...schedule.tiling.gpu.fast_math import FAST_MATH
from ...schedule.tiling.gpu.sink_select import chosen_last
from ..cpp.ast import Let, Param, identity, name
from .tile_ast import Mask, Masks, Points, Shape, TileStmt, TileStore, Total

QUAD = 4  # words of a Philox block
DEEP = 150  # levels of operators that are bound by calls inside calls


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
    writers: dict[str, MappedNode] = field(default_factory=dict)
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
    own_numerics: bool = False
    normalisers: set[Value] = field(default_factory=set)
    last_reads: set[str] = field(default_factory=set)
    ahead: bool = False  # members are bound in order
    # masks without which a named tile is 0, as what is not loaded is
    zeros: dict[Value, frozenset[str]] = field(default_factory=dict)

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


def row_axis(e: Emitter, scope: Scope, n: Index) -> Atom:
    """The axis over the `n` points of a row; a row that is read in blocks has its own loops instead."""
    if n not in e.rows:
        e.rows[n] = ex.var(f"r{len(e.rows)}", n)
        if not e.blocks.looped(n):
            while scope.parent is not None:
                scope = scope.parent
            tiled = e.blocks.form in (CROSSED, MATMUL)
            row_points(e, scope, n, f"along * {e.blocks.name_of(n)}" if tiled else "0")
    return e.rows[n]


def row_points(e: Emitter, scope: Scope, n: Index, base: str, whole: bool = False) -> None:
    """The positions of a block that starts at `base`, and what masks those beyond the row unless it is `whole`."""
    b, atom = e.blocks, e.rows[n]
    e.place(scope, Points(atom.key, base, b.name_of(n), b.rank - 1, b.rank))
    e.masks.pop(atom, None)
    if not (whole or (isinstance(n, int) and n % b.rblocks[n] == 0)):
        e.masks[atom] = f"{atom.key}mask"
        e.note(n)
        scope.body.append(Mask(e.masks[atom], atom.key, n))


def axes_of(e: Emitter, v: Value) -> frozenset[str]:
    if v in e.axes:
        return e.axes[v]
    return frozenset("x" if a.key == "x" else "r" for a in v.vars)


def shape_of(e: Emitter, axes: frozenset[str], row: Index | None) -> Shape:
    """The shape of a tile that has `axes`; `row`: the length of its row axis."""
    b = e.blocks
    out: list[str] = []
    if b.tiled_x:
        out.append("XBLOCK" if "x" in axes else "1")
    if b.has_rows:
        out.append(b.name_of(row) if "r" in axes and row is not None else "1")
    return tuple(out) if any(n != "1" for n in out) else ()


def bind(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...] = ()) -> Value:
    """`v` as a name or constant, defined in the outermost scope where its operands are known.

    `conds`: conditions under which alone memory may be touched.
    """
    if v.op in ("const", "name"):
        return v
    if not any(x.op in ("load", "wrap_index") for x in va.walk(v)):
        conds = ()
    conds = tuple(c for c in conds if not (v.vars.isdisjoint(c.vars) and _holds_somewhere(c)))
    axes = frozenset().union(axes_of(e, v), *(axes_of(e, c) for c in conds))
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


def let(e: Emitter, scope: Scope, v: Value, axes: frozenset[str], prefix: str = "t") -> Value:
    label = name(e.fresh(prefix), v.dtype)
    e.axes[label] = axes
    e.zeros[label] = _zeros(e, v)
    scope.body.append(Let(label.attr, v))
    return label


def _zeros(e: Emitter, v: Value) -> frozenset[str]:
    """The masks where `v` of named operands is 0 if one of them does not hold. A product with 0 may be NaN."""
    if v.op == "tile_load":
        return frozenset(m.attr for m in v.args)
    if v.op == "cast" or v.op in ("add", "sub", "mul"):
        return frozenset[str].intersection(*(e.zeros.get(a, frozenset[str]()) for a in v.args))
    return frozenset()


def _is_zero(v: Value) -> bool:
    """Whether `v` is the number 0, and not -0."""
    return v.op == "const" and v.attr == 0 and (isinstance(v.attr, complex) or math.copysign(1, v.attr) == 1)


def _define(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...]) -> Value:
    axes = axes_of(e, v)
    match v.op:
        case "load":
            return _load(e, scope, v, conds)
        case "masked":
            cond = bind(e, scope, v.args[0], conds)
            if cond.op == "const":
                return bind(e, scope, v.args[1 if cond.attr else 2], conds)
            held = bind(e, scope, v.args[1], (*conds, v.args[0]))
            other = bind(e, scope, v.args[2], conds)
            if cond.attr in e.zeros.get(held, ()) and _is_zero(other):
                return held
            return let(e, scope, va.make("where", (cond, held, other), v.dtype), axes)
        case "index":
            at = _resolved(e, scope, v.attr, conds)[0]
            return let(e, scope, va.make("tile_index", (), v.dtype, at), axes)
        case "wrap_index":
            return _wrapped(e, scope, v, conds)
        case "cast":
            if (product := _unrounded(e, v)) is not None:
                return bind(e, scope, product)
            return let(e, scope, va.make("cast", (bind(e, scope, v.args[0], conds),), v.dtype), axes)
        case "philox_uniform" if (quads := _quads(e, v)) is not None:
            seed = bind(e, scope, v.args[0], conds)
            return let(e, scope, va.make("philox_quads", (seed,), v.dtype, quads), axes)
        case "narrowed":
            return let(e, scope, v, axes)
        case "eq" | "ne" if (pair := _narrow_position(e, v)) is not None:
            position, number = pair
            narrow = va.make("narrowed", (bind(e, scope, number, conds),), torch.int32, position.attr)
            e.axes[narrow] = axes_of(e, number)
            return let(e, scope, va.make(v.op, (position, bind(e, scope, narrow)), torch.bool), axes)
        case "truediv" if e.fast and (divisor := bind(e, scope, v.args[1], conds)) in e.normalisers:
            inverse = bind(e, scope, va.make("reciprocal", (divisor,), v.dtype))
            return let(e, scope, va.make("mul", (bind(e, scope, v.args[0], conds), inverse), v.dtype), axes)
    op, kind = v.op, v.args[0].dtype if v.op != "where" else v.dtype
    if op.startswith(FAST_MATH):
        pass
    elif not triton_spelling(op, kind):
        raise refusal(op, f"it has no Triton form for {str(kind).removeprefix('torch.')}")
    elif e.fast and kind == torch.float32 and OPS[op].triton_fast:
        op = FAST_MATH + op
    return let(e, scope, va.make(op, tuple(bind(e, scope, a, conds) for a in v.args), v.dtype, v.attr), axes)


def _unrounded(e: Emitter, v: Value) -> Value | None:
    """The float32 value of a product that the kernel itself rounds to its dtype, where `v` is its conversion back."""
    (x,) = v.args
    m = e.kernel.matmul
    if m is None or not e.own_numerics or x.op != "load" or x.attr[0] != m.out or m.out not in e.writers:
        return None
    held = e.writers[m.out].value
    return held.args[0] if held.op == "cast" and held.args[0].dtype == v.dtype else None


def _narrow_position(e: Emitter, v: Value) -> tuple[Value, Value] | None:
    """A position with 32 bits and the number of 64 bits with which `v` compares it, where only the position varies."""
    for at, number in (v.args, v.args[::-1]):
        if (
            at.op == "index"
            and not e.blocks.wide
            and not axes_of(e, at) <= axes_of(e, number)
            and not ex.lookups(at.attr)
        ):
            low, high = ex.bounds(at.attr)
            if low >= 0 and high < 2**31 - 1:
                e.note(at.attr)
                return va.make("tile_scalar", (), torch.int32, at.attr), number
    return None


def _quads(e: Emitter, v: Value) -> Index | None:
    """The number of the block of four, where neighbours of a tile's last axis draw from one; else None."""
    if v.args[1].op != "index" or e.kernel.matmul is not None:
        return None
    counter: Index = v.args[1].attr
    for a in ex.vars_of(counter):
        scope, points = e.points.get(a.key, (None, None))
        if scope is None or points is None or points.axis != points.rank - 1 or ex.coefficient(counter, a) != 1:
            continue
        block = e.blocks.xblock if a.key == "x" else e.blocks.rblocks[ex.size_of(a)]
        rest = ex.substitute(counter, {a: 0})
        if block % QUAD or ex.mod(rest, QUAD) != 0:
            continue
        quad = ex.var(f"{a.key}q", ex.size_of(a))
        if quad.key not in scope.quads:
            scope.quads.add(quad.key)
            base = "0" if points.base == "0" else f"{points.base} // {QUAD}"
            scope.body.append(Points(quad.key, base, f"{points.block} // {QUAD}", points.axis, points.rank))
        return ex.add(ex.floordiv(rest, QUAD), ex.ix(quad))
    return None


def _bind_chain(e: Emitter, scope: Scope, b: str) -> None:
    """Bind what a member of the kernel is computed from, the first member first, where one call inside another for
    every operator of a long chain of members would be too many."""
    if e.ahead:
        return
    chain, depth = _chain(e, b)
    if depth <= DEEP:
        return
    e.ahead = True
    try:
        for member in chain:
            bind(e, scope, e.writers[member].value)
    finally:
        e.ahead = False


def _chain(e: Emitter, b: str) -> tuple[list[str], int]:
    """Members that are computed again for `b`, each after those that it reads, and the depth of all.

    A member that writes in place reads what it stands for; that is another value of the same name, and no step of the
    chain.
    """
    depths: dict[str, int] = {}
    begun: set[str] = set()
    stack = [b]
    while stack:
        at = stack[-1]
        if at in depths:
            stack.pop()
            continue
        begun.add(at)
        value = e.writers[at].value
        below = [
            r for r, _ in va.loads(value) if r not in e.results and r in e.writers and e.writers[r].kind == "point"
        ]
        waiting = [r for r in below if r not in depths and r not in begun]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        depths[at] = value.depth + max((depths.get(r, 0) for r in below), default=0)
    return list(depths), depths[b]


def _load(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...]) -> Value:
    b, index = v.attr
    if b in e.results:
        return e.results[b]
    if b in e.writers and e.writers[b].kind == "point":
        _bind_chain(e, scope, b)
        return bind(e, scope, e.writers[b].value)
    at, guards = _resolved(e, scope, index, conds)
    masks, axes = _masks(e, scope, index, conds, guards)
    row = next((ex.size_of(a) for x in (v, *conds) for a in x.vars if a.key != "x"), None)
    if axes == {"r"} and e.blocks.form == ROWS and e.blocks.tiled_x:
        # a tensor of one row gets a layout of its own, and Triton then brings whole tiles into it, by shared memory
        axes = frozenset({"x", "r"})
    shape = shape_of(e, axes, row) if axes != _plain_axes(e, at) else None
    policy = "evict_first" if _read_once(e, axes) or _read_last(e, b, index) else ""
    load = va.make("tile_load", tuple(name(m, torch.bool) for m in masks), v.dtype, (e.param(b), at, shape, policy))
    return let(e, scope, load, axes)


def _read_once(e: Emitter, axes: frozenset[str]) -> bool:
    """Rows in registers are read once; what all rows share (weights) stays in the cache."""
    return e.blocks.streams and axes == {"x", "r"}


def _read_last(e: Emitter, b: str, index: Index) -> bool:
    """Whether a pass over a long row is the last of several that read it, so that the cache need not keep it."""
    keys = {a.key for a in ex.vars_of(index)}
    return b in e.last_reads and "x" in keys and len(keys) > 1


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
    axes = frozenset().union(axes_of(e, v), *(axes_of(e, c) for c in conds))
    position = bind(e, scope, v.args[0], conds)
    at = let(e, scope, va.make("wrapped", (position,), torch.int64, size), axes_of(e, v))
    inside = let(e, scope, va.make("inside", (at,), torch.bool, size), axes_of(e, v), "inside")
    e.guards[at] = inside
    e.checks = True
    atoms = set(v.vars).union(*(c.vars for c in conds))
    masks = [e.masks[a] for a in sorted(atoms, key=lambda a: a.key) if a in e.masks]
    masks += [n.attr for c in conds if (n := bind(e, scope, c)).op == "name"]
    row = next((ex.size_of(a) for a in atoms if a.key != "x"), None)
    outside = va.make("logical_not", (inside,), torch.bool)
    flag = let(e, scope, outside, axes_of(e, v), "outside")
    scope.body.append(TileStore("error", 0, va.const(1, torch.int32), (*masks, flag.attr), shape_of(e, axes, row)))
    return at


def on_tile(e: Emitter, scope: Scope, q: MappedNode) -> MappedNode:
    """`q` with its loops replaced by the axes of the tile."""
    b, n = e.blocks, row_length(e, q)
    x = ex.ix(ex.var("x", n if b.flat else b.points))
    env: dict[Atom, Index] = {} if b.flat else {q.row: x}
    if b.form == CROSSED:
        *rows, column = b.cross
        env = {column: ex.ix(row_axis(e, scope, n))}
        env |= dict(zip(rows, ex.unflatten(x, tuple(ex.size_of(v) for v in rows)), strict=True))
    else:
        at = x if b.flat else ex.ix(row_axis(e, scope, n)) if n != 1 else 0
        env |= dict(zip(q.inner, ex.unflatten(at, q.sizes), strict=True))
    value = chosen_last(e.cheap.get(q.node, q.value).substitute(env), lambda v: axes_of(e, v))
    index = ex.substitute(q.index, env, lambda x: x.substitute(env))
    return MappedNode(q.node, q.kind, q.row, q.inner, q.reduced, index, value, q.scanned)


def store(e: Emitter, scope: Scope, q: MappedNode, value: Value, op: str = "") -> None:
    at, guards = _resolved(e, scope, q.index, ())
    masks, axes = _masks(e, scope, q.index, (), guards)
    if e.blocks.flat and e.blocks.tiled_x:  # a store at a fixed place is one element's, not every program's
        axes |= {"x"}
        x = ex.var("x", row_length(e, q))
        masks = tuple(dict.fromkeys((*masks, *((e.masks[x],) if x in e.masks else ()))))
    shape = shape_of(e, axes, row_length(e, q)) if axes != _plain_axes(e, at) else None
    scope.body.append(TileStore(e.param(q.node.out), at, value, masks, shape, op))


def row_length(e: Emitter, q: MappedNode) -> Index:
    """Points of the row axis, or of all where there are no rows."""
    return ex.size_of(e.blocks.cross[-1]) if e.blocks.cross else ex.prod(q.sizes)


def row_mask(e: Emitter, q: MappedNode) -> str | None:
    atom = e.rows.get(row_length(e, q))
    return None if atom is None else e.masks.get(atom)


def needed(e: Emitter, mask: str | None, value: Value, op: str) -> str | None:
    """`mask`, or None where `value` is 0 without it and `op` sums."""
    return None if op == "sum" and mask in e.zeros.get(value, ()) else mask


def whole(e: Emitter, scope: Scope, q: MappedNode, value: Value, op: str) -> Value:
    """`value` on all points of the row's block, with the identity of `op` beyond the row's end."""
    mask = needed(e, row_mask(e, q), value, op)
    axes = axes_of(e, value) | {"r"}
    if mask is not None:
        guarded = va.make("guarded", (value, name(mask, torch.bool), identity(op, value.dtype)), value.dtype, None)
        value = let(e, scope, guarded, axes)
    if "r" not in axes_of(e, value) or value.op == "const":
        value = let(e, scope, va.make("broadcast", (value,), value.dtype, shape_of(e, axes, row_length(e, q))), axes)
    return value
