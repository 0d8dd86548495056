"""Copy elements that a vector loop would read or write at a wide stride through a row of neighbours.

Compilers vectorise no loop that reads 16 or 8 bits at a wide stride. Such elements are copied one by one, before the
loop or after it, so that the arithmetic runs as vectors. Without copies, a batch norm of bfloat16 that turns an image
channels-last took six times as long.

Compilers gather elements of 32 and 64 bits. Where the stride is a multiple of a cache line, all elements of a gather
lie in one bank of L1: `silu` of float32 took five times as long. At other strides gathers are faster than copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.ops import OPS
from ...ir.value import Value
from .ast import Declare, Function, Let, Loop, Stmt, Store

NARROW, WIDEST, LINE = 2, 8, 64  # bytes of an element that no gather reads, of the widest element, of a cache line
FEWEST, MOST_BYTES = 8, 4096  # least iterations of a loop, and most bytes of its row
SHORT_STRIDES = 4  # strides up to which vectors of neighbours contain the elements


@dataclass
class _Rows:
    """The rows of neighbours that a function declares."""

    declared: list[Declare] = field(default_factory=list)

    def declare(self, dtype: torch.dtype, size: int) -> str:
        name = f"n{len(self.declared)}"
        self.declared.append(Declare(name, dtype, None, size))
        return name


def with_dense_rows(f: Function) -> Function:
    """Return `f` with elements at wide strides copied outside of its vector loops."""
    if f.flat is not None:
        return f
    rows = _Rows()
    body = _statements(f.body, rows)
    return replace(f, body=body, scratch=(*f.scratch, *rows.declared)) if rows.declared else f


def _statements(body: Sequence[Stmt], rows: _Rows) -> tuple[Stmt, ...]:
    out: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop):
            out += _vector_loop(s, rows) if _suits(s) else [replace(s, body=_statements(s.body, rows))]
        else:
            out.append(s)
    return tuple(out)


def _suits(s: Loop) -> bool:
    """Return whether a loop of known length computes something in vectors."""
    n = ex.size_of(s.var)
    has_static_length = isinstance(n, int) and n >= FEWEST and s.begin == "0" and not s.end
    computes = any(isinstance(x, Let) and (x.value.op in OPS or x.value.op == "cast") for x in s.body)
    return s.simd and s.step == 1 and has_static_length and computes


def _vector_loop(s: Loop, rows: _Rows) -> list[Stmt]:
    """Return the loop with the copies before and after it."""
    n = ex.size_of(s.var)
    assert isinstance(n, int)
    before: list[Stmt] = []
    after: list[Stmt] = []
    body: list[Stmt] = []
    for x in s.body:
        if isinstance(x, Let) and x.value.op == "load" and _is_strided(x.value, x.value.attr[1], s.var, n):
            row = rows.declare(x.value.dtype, n)
            before.append(Store(row, ex.ix(s.var), x.value))
            body.append(Let(x.name, va.load(row, ex.ix(s.var), x.value.dtype)))
        elif isinstance(x, Store) and x.index is not None and not x.guards and _is_strided(x.value, x.index, s.var, n):
            row = rows.declare(x.value.dtype, n)
            body.append(Store(row, ex.ix(s.var), x.value))
            after.append(Store(x.target, x.index, va.load(row, ex.ix(s.var), x.value.dtype)))
        else:
            body.append(x)
    copies = [[Loop(s.var, "0", "", tuple(c), limit=s.limit)] if c else [] for c in (before, after)]
    return [*copies[0], replace(s, body=tuple(body)), *copies[1]]


def _is_strided(x: Value, index: Index, v: Atom, n: int) -> bool:
    """Return whether `index` is a wide stride of `v`, which depends on no other scalar of the loop."""
    fits = x.dtype.itemsize <= WIDEST and n * x.dtype.itemsize <= MOST_BYTES
    if not fits or ex.lookups(index) or v not in ex.vars_of(index):
        return False
    stride = ex.coefficient(index, v)
    if x.dtype.itemsize > NARROW and not (isinstance(stride, int) and stride * x.dtype.itemsize % LINE == 0):
        return False
    return not (isinstance(stride, int) and abs(stride) <= SHORT_STRIDES)
