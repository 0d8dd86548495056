"""Turn the scalars of a kernel into tiles: each is a name, defined in the outermost loop that has its operands."""

from __future__ import annotations

import math

import torch

from ...errors import Unsupported
from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.ops import OPS, triton_spelling
from ...ir.value import Value
from ...schedule.loop_mapping import Kind, MappedNode
from ...schedule.tiling.gpu.blocks import Form
from ...schedule.tiling.gpu.fast_math import FAST_MATH
from ...schedule.tiling.gpu.program_rows import program_rows
from ...schedule.tiling.gpu.sink_select import sink_selects
from ..cpp.ast import Let, name
from .access import (
    is_last_read,
    is_only_read,
    line_shape,
    mask_names,
    ordered_load,
    ordered_store,
    plain_axes,
    run_of,
    without_end_mask,
)
from .conditions import is_within, needed
from .emitter import Emitter, Scope
from .tile_ast import Mask, Masks, Points, Shape, TileStore

QUAD = 4  # words of a Philox block
FLOAT_EXPONENTS = 125  # of powers of two whose inverse is a normal float32
MOST_NESTED = 150  # levels of operators that `bind` follows by recursion


def unsupported(node: object, reason: str) -> Unsupported:
    """Return the error for an operator that tiles cannot express."""
    return Unsupported(node, reason, todo="leave it to a library call, or split the kernel")


def row_axis(e: Emitter, scope: Scope, n: Index) -> Atom:
    """Return the axis over the `n` points of a row, and define it unless loops over blocks of the row will."""
    if n not in e.rows:
        e.rows[n] = ex.var(f"r{len(e.rows)}", n)
        if not e.blocks.looped(n):
            while scope.parent is not None:
                scope = scope.parent
            tiled = e.blocks.form in (Form.TRANSPOSE, Form.MATMUL)
            row_points(e, scope, n, f"along * {e.blocks.name_of(n)}" if tiled else "0")
    return e.rows[n]


def row_points(e: Emitter, scope: Scope, n: Index, base: str, full: bool = False) -> None:
    """Define the positions of a block that starts at `base`, and unless it is `full` a mask for the row's end."""
    b, atom = e.blocks, e.rows[n]
    e.define_axis(scope, Points(atom.key, base, b.name_of(n), b.rank - 1, b.rank))
    e.masks.pop(atom, None)
    if not (full or (isinstance(n, int) and n % b.rblocks[n] == 0)):
        e.masks[atom] = f"{atom.key}mask"
        e.note(n)
        scope.body.append(Mask(e.masks[atom], atom.key, n))


def axes_of(e: Emitter, v: Value) -> frozenset[str]:
    """Return the tile axes along which a value differs."""
    if v in e.axes:
        return e.axes[v]
    return frozenset("x" if a.key == "x" else "r" for a in v.vars)


def shape_of(e: Emitter, axes: frozenset[str], row: Index | None) -> Shape:
    """Return the shape of a tile that has `axes`; `row`: the length of its row axis."""
    b = e.blocks
    shape: list[str] = []
    if b.tiled_x:
        shape.append("XBLOCK" if "x" in axes else "1")
    if b.has_rows:
        shape.append(b.name_of(row) if "r" in axes and row is not None else "1")
    return tuple(shape) if any(n != "1" for n in shape) else ()


def bind(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...] = ()) -> Value:
    """Return `v` as a name or constant, defined in the outermost scope that has its operands.

    `conds`: the program may access memory only where these conditions hold.
    """
    if v.op in ("const", "name"):
        return v
    if not any(x.op in ("load", "wrap_index") for x in va.walk(v)):
        conds = ()
    conds = needed(v, conds)
    if conds and v.op == "load" and is_within(e.program, v):
        conds = ()
    axes = frozenset().union(axes_of(e, v), *(axes_of(e, c) for c in conds))
    while scope.parent is not None and scope.axis not in axes:
        scope = scope.parent
    bound = scope.bound.get((v, conds))
    if bound is None:
        bound = _define(e, scope, v, conds)
        scope.bound[v, conds] = bound
    return bound


def let(e: Emitter, scope: Scope, v: Value, axes: frozenset[str], prefix: str = "t") -> Value:
    """Define a new name for `v`, a tile that has `axes`, and return it."""
    label = name(e.fresh(prefix), v.dtype)
    e.axes[label] = axes
    e.zeros[label] = _zeros(e, v)
    scope.body.append(Let(label.attr, v))
    return label


def _broadcast_let(e: Emitter, scope: Scope, v: Value, axes: frozenset[str], prefix: str = "t") -> Value:
    """Define a new name for `v`, whose tile has `axes` and those of its operands: loads may be broadcast."""
    return let(e, scope, v, axes.union(*(e.axes.get(a, frozenset()) for a in v.args)), prefix)


def _zeros(e: Emitter, v: Value) -> frozenset[str]:
    """Return the masks outside of which `v` is 0, whatever its other masks. A product with 0 may be NaN."""
    if v.op in ("tile_load", "line_load", "ordered_load"):
        return frozenset(m.attr for m in v.args)
    if v.op == "cast" or v.op in ("add", "sub", "mul"):
        return frozenset[str].intersection(*(e.zeros.get(a, frozenset[str]()) for a in v.args))
    return frozenset()


def _is_zero(v: Value) -> bool:
    """Return whether `v` is the number 0, and not -0."""
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
            if v.args[0] in conds:  # it holds here
                return bind(e, scope, v.args[1], conds)
            inside = bind(e, scope, v.args[1], (*conds, v.args[0]))
            other = bind(e, scope, v.args[2], conds)
            if cond.attr in e.zeros.get(inside, ()) and _is_zero(other):
                return inside
            return _broadcast_let(e, scope, va.make("where", (cond, inside, other), v.dtype), axes)
        case "index":
            position = _resolved(e, scope, v.attr, conds)[0]
            return _broadcast_let(e, scope, va.make("tile_index", (), v.dtype, position), axes)
        case "wrap_index":
            return _checked_position(e, scope, v, conds)
        case "cast":
            if (product := _unrounded(e, v)) is not None:
                return bind(e, scope, product)
            return _broadcast_let(e, scope, va.make("cast", (bind(e, scope, v.args[0], conds),), v.dtype), axes)
        case "philox_uniform" if (quads := _quads(e, v)) is not None:
            seed = bind(e, scope, v.args[0], conds)
            return _broadcast_let(e, scope, va.make("philox_quads", (seed,), v.dtype, quads), axes)
        case "narrowed":
            return _broadcast_let(e, scope, v, axes)
        case "eq" | "ne" if (pair := _narrow_position(e, v)) is not None:
            compared, number = pair
            narrow = va.make("narrowed", (bind(e, scope, number, conds),), torch.int32, compared.attr)
            e.axes[narrow] = axes_of(e, number)
            return _broadcast_let(e, scope, va.make(v.op, (compared, bind(e, scope, narrow)), torch.bool), axes)
        case "lt" | "le" | "gt" | "ge" | "eq" | "ne" if (narrow_v := _narrow_comparison(e, v)) is not None:
            return _broadcast_let(e, scope, narrow_v, axes)
        case "truediv" if e.tiled.low_precision and (divisor := bind(e, scope, v.args[1], conds)) in e.normalisers:
            inverse = bind(e, scope, va.make("reciprocal", (divisor,), v.dtype))
            return _broadcast_let(e, scope, va.make("mul", (bind(e, scope, v.args[0], conds), inverse), v.dtype), axes)
        case "truediv" if _has_shared_divisor(e, v):
            dividend, divisor = (bind(e, scope, a, conds) for a in v.args)
            if (factor := _exact_inverse(divisor)) is not None:
                return _broadcast_let(e, scope, va.make("mul", (dividend, factor), v.dtype), axes)
            return _broadcast_let(e, scope, va.make("helper", (dividend, divisor), v.dtype, "quotient"), axes)
    op, kind = v.op, v.args[0].dtype if v.op != "where" else v.dtype
    if op.startswith(FAST_MATH):
        pass
    elif not triton_spelling(op, kind):
        raise unsupported(op, f"it has no Triton form for {str(kind).removeprefix('torch.')}")
    elif e.tiled.low_precision and kind == torch.float32 and OPS[op].triton_fast:
        op = FAST_MATH + op
    return _broadcast_let(e, scope, va.make(op, tuple(bind(e, scope, a, conds) for a in v.args), v.dtype, v.attr), axes)


def _has_shared_divisor(e: Emitter, v: Value) -> bool:
    """Return whether many elements of a float32 tile have the divisor of `v`: its inverse is computed once then."""
    if v.dtype != torch.float32 or not e.tiled.fast_math or e.tiled.low_precision:
        return False
    dividend, divisor = (axes_of(e, a) for a in v.args)
    return divisor < dividend


def _exact_inverse(divisor: Value) -> Value | None:
    """Return 1 / divisor for a power of two: the product rounds as the quotient does."""
    number = divisor.attr if divisor.op == "const" else 0
    mantissa, exponent = math.frexp(number)
    is_power = abs(mantissa) == 0.5 and abs(exponent) < FLOAT_EXPONENTS
    return va.const(1 / number, divisor.dtype) if is_power else None


def _unrounded(e: Emitter, v: Value) -> Value | None:
    """Return the float32 value of the kernel's product where `v` converts the rounded product back; else None."""
    (x,) = v.args
    m = e.kernel.matmul
    if m is None or not e.tiled.fast_math or x.op != "load" or x.attr[0] != m.out or m.out not in e.writers:
        return None
    product = e.writers[m.out].value
    return product.args[0] if product.op == "cast" and product.args[0].dtype == v.dtype else None


def _narrow_comparison(e: Emitter, v: Value) -> Value | None:
    """Return a comparison of positions with each other or with constants in 32 bits; None for other operands."""
    sides: list[Value] = []
    for x in v.args:
        low, high = (x.attr, x.attr) if x.op == "const" else ex.bounds(x.attr) if x.op == "index" else (0, 1 << 32)
        is_wide = e.blocks.wide or not isinstance(low, int) or not -(2**31) < low <= high < 2**31 - 1
        if is_wide or (x.op == "index" and ex.lookups(x.attr)):
            return None
        e.note(*([x.attr] if x.op == "index" else []))
        sides.append(
            va.make("tile_scalar", (), torch.int32, x.attr) if x.op == "index" else va.const(x.attr, torch.int32)
        )
    return va.make(v.op, tuple(sides), torch.bool) if any(x.op == "index" for x in v.args) else None


def _narrow_position(e: Emitter, v: Value) -> tuple[Value, Value] | None:
    """Return a 32-bit position and the 64-bit number with which `v` compares it, where only the position varies."""
    for position, number in (v.args, v.args[::-1]):
        if (
            position.op == "index"
            and not e.blocks.wide
            and not axes_of(e, position) <= axes_of(e, number)
            and not ex.lookups(position.attr)
        ):
            low, high = ex.bounds(position.attr)
            if low >= 0 and high < 2**31 - 1:
                e.note(position.attr)
                return va.make("tile_scalar", (), torch.int32, position.attr), number
    return None


def _quads(e: Emitter, v: Value) -> Index | None:
    """Return the number of the Philox block from which four neighbours of a tile's last axis draw; None if none do."""
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
    """Bind the nodes from which `b` is computed, first to last, where their chain is too deep for recursion."""
    if e.binding_chain:
        return
    chain, depth = _chain(e, b)
    if depth <= MOST_NESTED:
        return
    e.binding_chain = True
    try:
        for out in chain:
            bind(e, scope, e.writers[out].value)
    finally:
        e.binding_chain = False


def _chain(e: Emitter, b: str) -> tuple[list[str], int]:
    """Return the nodes that are computed again for `b`, each after those that it reads, and the depth of all.

    A node that writes in place reads a buffer of its own name. That is the older value, and no step of the chain.
    """
    depths: dict[str, int] = {}
    begun: set[str] = set()
    stack = [b]
    while stack:
        out = stack[-1]
        if out in depths:
            stack.pop()
            continue
        begun.add(out)
        value = e.writers[out].value
        read = [r for r, _ in va.loads(value) if r not in e.results and _is_point(e, r)]
        waiting = [r for r in read if r not in depths and r not in begun]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        depths[out] = value.depth + max((depths.get(r, 0) for r in read), default=0)
    return list(depths), depths[b]


def _is_point(e: Emitter, b: str) -> bool:
    """Return whether a pointwise node emitted so far writes `b`."""
    return b in e.writers and e.writers[b].kind is Kind.POINT


def _load(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...]) -> Value:
    b, index = v.attr
    if b in e.results:
        assert b not in e.passed, f"{b} is read after the pass that scans it"
        return e.results[b]
    if _is_point(e, b):
        _bind_chain(e, scope, b)
        return bind(e, scope, e.writers[b].value)
    position, guards = _resolved(e, scope, index, conds)
    masks, axes = _masks(e, scope, index, conds, guards)
    position, masks = without_end_mask(e, position, masks)
    row = next((ex.size_of(a) for x in (v, *conds) for a in x.vars if a.key != "x"), None)
    once = axes == {"x", "r"} and is_only_read(e, b, position, row)
    policy = "evict_first" if once or is_last_read(e, b, index) else ""
    if (line := line_shape(e, position, axes, masks, row)) is not None:
        of_line = (e.param(b), position, line, policy, run_of(e, position))
        return let(e, scope, va.make("line_load", mask_names(masks), v.dtype, of_line), axes)
    if (tile := ordered_load(e, position, masks, row, v.dtype)) is not None:
        of_tile = (e.param(b), position, tile, policy)
        return let(e, scope, va.make("ordered_load", mask_names(masks), v.dtype, of_tile), axes)
    if axes == {"r"} and e.blocks.form is Form.ROWS and e.blocks.tiled_x and not e.blocks.run:
        # Triton gives a tensor of one row a layout of its own, and converts full tiles to it through shared memory
        axes = frozenset({"x", "r"})
    shape = shape_of(e, axes, row) if axes != plain_axes(e, position) else None
    attributes = (e.param(b), position, shape, policy, run_of(e, position))
    return let(e, scope, va.make("tile_load", mask_names(masks), v.dtype, attributes), axes)


def _resolved(e: Emitter, scope: Scope, index: Index, conds: tuple[Value, ...]) -> tuple[Index, tuple[str, ...]]:
    """Return an index whose data-dependent parts are names, and the names that say whether these are in range."""
    e.note(index)
    lookups = ex.lookups(index)
    if not lookups:
        return index, ()
    bound = {x: bind(e, scope, x, conds) for x in lookups}
    guards = tuple(dict.fromkeys(e.guards[n].attr for n in bound.values() if n in e.guards))
    return ex.substitute(index, {}, lambda x: bound[x]), guards


def _masks(
    e: Emitter, scope: Scope, index: Index, conds: tuple[Value, ...], guards: tuple[str, ...]
) -> tuple[Masks, frozenset[str]]:
    """Return the masks of an access, and the axes of index and masks together."""
    atoms = set(ex.vars_of(index)).union(*(c.vars for c in conds))
    named = [bind(e, scope, c, conds[:n]) for n, c in enumerate(conds)]
    masks = [e.masks[a] for a in sorted(atoms, key=lambda a: a.key) if a in e.masks]
    texts = [n.attr for n in named if n.op == "name"]
    if any(n.op == "const" and not n.attr for n in named):
        raise unsupported("masked value", "its mask never holds")
    axes = frozenset("x" if a.key == "x" else "r" for a in atoms)
    return tuple(dict.fromkeys((*masks, *texts, *guards))), axes


def _checked_position(e: Emitter, scope: Scope, v: Value, conds: tuple[Value, ...]) -> Value:
    """Return a position read from data; where it is out of range, nothing is accessed and the error flag is set.

    A program cannot stop its kernel, and clamping would give a wrong result silently. So the program masks accesses at
    such a position, and the host program, which reads the flag after the launch, raises IndexError.
    """
    size, _ = _resolved(e, scope, v.attr, conds)
    axes = frozenset().union(axes_of(e, v), *(axes_of(e, c) for c in conds))
    position = bind(e, scope, v.args[0], conds)
    wrapped = _broadcast_let(e, scope, va.make("wrapped", (position,), torch.int64, size), axes_of(e, v))
    inside = _broadcast_let(e, scope, va.make("inside", (wrapped,), torch.bool, size), axes_of(e, v), "inside")
    e.guards[wrapped] = inside
    e.checks = True
    atoms = set(v.vars).union(*(c.vars for c in conds))
    masks = [e.masks[a] for a in sorted(atoms, key=lambda a: a.key) if a in e.masks]
    masks += [n.attr for c in conds if (n := bind(e, scope, c)).op == "name"]
    row = next((ex.size_of(a) for a in atoms if a.key != "x"), None)
    outside = va.make("logical_not", (inside,), torch.bool)
    flag = _broadcast_let(e, scope, outside, axes_of(e, v), "outside")
    shape = shape_of(e, axes | e.axes[flag], row)
    scope.body.append(TileStore("error", 0, va.const(1, torch.int32), (*masks, flag.attr), shape))
    return wrapped


def _replaced(value: Value, index: Index, env: dict[Atom, Index]) -> tuple[Value, Index]:
    """Return a value and an index with variables replaced."""
    return value.substitute(env), ex.substitute(index, env, lambda x: x.substitute(env))


def on_tile(e: Emitter, scope: Scope, q: MappedNode) -> MappedNode:
    """Return `q` with the axes of the tile in place of its loops."""
    b, n = e.blocks, row_length(e, q)
    axis = ex.var("x", n if b.flat else b.points)
    x = ex.ix(axis)
    env: dict[Atom, Index] = {} if b.flat or b.form is Form.TRANSPOSE else {q.row: x}
    if b.form is Form.TRANSPOSE:
        column = ex.ix(row_axis(e, scope, n))
        for loops, position in ((b.columns, column), (b.axis_loops[: -b.row_loops], x)):
            env |= dict(zip(loops, ex.unflatten(position, tuple(map(ex.size_of, loops))), strict=True))
    else:
        point = x if b.flat else ex.ix(row_axis(e, scope, n)) if n != 1 else 0
        point = ex.sub(ex.sub(n, 1), point) if b.backwards else point
        env |= dict(zip(q.inner, ex.unflatten(point, q.sizes), strict=True))
    value, index = e.tiled.fast_values.get(q.node, q.value), q.index
    if b.run:
        rows = program_rows(b.xblock, axis)
        value, index = _replaced(value, index, {q.row: rows.split})
        env |= rows.written
    value, index = _replaced(value, index, env)
    value = sink_selects(value, lambda v: axes_of(e, v))
    return MappedNode(q.node, q.kind, q.row, q.inner, q.reduced, index, value, q.scanned)


def store(e: Emitter, scope: Scope, q: MappedNode, value: Value, op: str = "") -> None:
    """Emit the store of a node's `value`, or the atomic `op`."""
    position, guards = _resolved(e, scope, q.index, ())
    masks, axes = _masks(e, scope, q.index, (), guards)
    if e.blocks.flat and e.blocks.tiled_x:  # only the program of the one element stores at a constant position
        axes |= {"x"}
        x = ex.var("x", row_length(e, q))
        masks = tuple(dict.fromkeys((*masks, *((e.masks[x],) if x in e.masks else ()))))
    shape = shape_of(e, axes, row_length(e, q)) if axes != plain_axes(e, position) else None
    dtype = e.program.buffers[q.node.out].dtype
    ordered = ordered_store(e, position, row_length(e, q), dtype) if not op and value.op != "const" else None
    run = run_of(e, position)
    scope.body.append(TileStore(e.param(q.node.out), position, value, masks, ordered or shape, op, run, bool(ordered)))


def row_length(e: Emitter, q: MappedNode) -> Index:
    """Return the points of the row axis, or all points where there are no rows."""
    return ex.prod(map(ex.size_of, e.blocks.columns)) if e.blocks.axis_loops else q.points


def row_mask(e: Emitter, q: MappedNode) -> str | None:
    """Return the mask of the row axis, or None where no block exceeds the row."""
    atom = e.rows.get(row_length(e, q))
    return None if atom is None else e.masks.get(atom)


def needed_mask(e: Emitter, mask: str | None, value: Value, op: str) -> str | None:
    """Return `mask`, or None where `value` is 0 without it and `op` sums."""
    return None if op == "sum" and mask in e.zeros.get(value, ()) else mask


def fill_block(e: Emitter, scope: Scope, q: MappedNode, value: Value, op: str) -> Value:
    """Return `value` on all points of the row's block, with the identity of `op` beyond the row's end."""
    mask = needed_mask(e, row_mask(e, q), value, op)
    axes = axes_of(e, value) | {"r"}
    if mask is not None:
        guarded = va.make("guarded", (value, name(mask, torch.bool), va.identity(op, value.dtype)), value.dtype, None)
        value = let(e, scope, guarded, axes)
    if "r" not in axes_of(e, value) or value.op == "const":
        value = let(e, scope, va.make("broadcast", (value,), value.dtype, shape_of(e, axes, row_length(e, q))), axes)
    return value
