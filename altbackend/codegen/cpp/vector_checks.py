"""Check positions that data decides, and read what lies there, in loops of their own, so that the rest runs in vectors.

A loop that may report an error in each iteration runs element by element, and so do its exponentials and logarithms.
It becomes three: the first computes the positions, their minimum and their maximum, and stores 0 for a position out of
range; the second copies the elements at the positions into a row; the last is the loop without any checks. Errors are
reported between them. GCC 12 also vectorises no loop that reads both booleans and elements at computed positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.value import Value
from .ast import Declare, Let, Loop, Stmt, Store, Update, name
from .scope import Emitter

COSTLY = 8  # float additions of an iteration, from which vectors gain more than the rows cost
BLOCK, MOST = 512, 1024  # iterations whose rows fit in L1: of a block of a longer loop, of a whole loop
_INT = torch.int64


def with_vector_checks(e: Emitter, loop: Loop) -> list[Stmt]:
    """Return a vector loop, its checks in loops before it; a cheap one as a loop that runs element by element."""
    checked = {x.name: x.value for x in loop.body if isinstance(x, Let) and x.value.op == "wrap_index"}
    if not checked:
        return [loop]
    flops = sum(va.flops(x.value) for x in loop.body if isinstance(x, (Let, Store, Update)))
    if loop.limit is not None or flops < COSTLY:
        return [replace(loop, simd=False)]
    n = ex.size_of(loop.var)
    if loop.begin == "block":
        return _loops(e, loop, checked)
    if isinstance(n, int) and n <= MOST and (loop.begin, loop.end) == ("0", ""):
        return _loops(e, loop, checked)
    inner = replace(loop, begin="block", end="block_end")
    return [replace(loop, body=tuple(_loops(e, inner, checked)), simd=False, sums=(), step=BLOCK)]


def _loops(e: Emitter, loop: Loop, checked: Mapping[str, Value]) -> list[Stmt]:
    n = ex.size_of(loop.var)
    size, at = (n, ex.ix(loop.var)) if isinstance(n, int) and loop.begin == "0" else (BLOCK, _in_block(loop))
    before: list[Stmt] = []
    stores: list[Stmt] = []
    reports: list[Stmt] = []
    rows: dict[str, Value] = {}
    for label, v in checked.items():
        least, most = e.fresh("r"), e.fresh("r")
        before += [Declare(least, _INT, va.identity("min", _INT)), Declare(most, _INT, va.identity("max", _INT))]
        position = _row(e, _INT, size)
        rows[label] = va.load(position, at, _INT)
        stores += [Store(position, at, name(label, _INT))]
        stores += [Update(least, None, "least", v.args[0]), Update(most, None, "most", v.args[0])]
        ends = (name(least, _INT), name(most, _INT))
        reports.append(Let(e.fresh("t"), va.make("check_range", (*ends, *v.args[1:]), _INT, v.attr)))
    sums = tuple((u.op, u.target) for u in stores if isinstance(u, Update))
    positions = replace(loop, body=(*_operands(loop.body, [*checked]), *stores), sums=sums)
    read, body = _read(e, loop, rows, size, at)
    copies = [replace(loop, body=read, sums=())] if read else []
    return [*before, positions, *reports, *copies, replace(loop, body=body)]


def _in_block(loop: Loop) -> Index:
    return ex.sub(ex.ix(loop.var), ex.ix(ex.var("block", ex.size_of(loop.var))))


def _row(e: Emitter, dtype: torch.dtype, size: int) -> str:
    label = e.fresh("w")
    e.scratch[f"checked.{label}"] = Declare(label, dtype, None, size)
    return label


def _operands(body: Sequence[Stmt], names: Sequence[str]) -> list[Stmt]:
    """Return the statements of a loop that compute `names`, with 0 for positions out of range."""
    needed, statements = set(names), list[Stmt]()
    for x in reversed(body):
        if isinstance(x, Let) and x.name in needed:
            v = x.value
            statements.append(replace(x, value=_with_op(v, "clamp_index")) if v.op == "wrap_index" else x)
            needed |= {a.attr for a in va.walk(v) if a.op == "name"}
    return statements[::-1]


def _with_op(v: Value, op: str) -> Value:
    """Return a value with another operator."""
    return va.make(op, v.args, v.dtype, v.attr)


def _read(
    e: Emitter, loop: Loop, rows: Mapping[str, Value], size: int, at: Index
) -> tuple[tuple[Stmt, ...], tuple[Stmt, ...]]:
    """Return the copies of elements at checked positions, and the loop's statements that read the copies."""
    inner = {x.name for x in loop.body if isinstance(x, Let)} - rows.keys()
    read: list[Stmt] = [Let(label, row) for label, row in rows.items()]
    body: list[Stmt] = []
    for x in loop.body:
        if not isinstance(x, Let):
            body.append(x)
        elif x.name in rows:
            body.append(Let(x.name, rows[x.name]))
        elif x.value.op == "load" and _is_at(x.value, rows, inner):
            copy = _row(e, x.value.dtype, size)
            read.append(Store(copy, at, x.value))
            body.append(Let(x.name, va.load(copy, at, x.value.dtype)))
        else:
            body.append(x)
    return tuple(read) if len(read) > len(rows) else (), tuple(body)


def _is_at(v: Value, rows: Mapping[str, Value], inner: Set[str]) -> bool:
    """Return whether a load's address depends on checked positions, and on none of the loop's other values."""
    names = {x.attr for x in ex.lookups(v.attr[1]) if x.op == "name"}
    return len(names & rows.keys()) > 0 and names.isdisjoint(inner)
