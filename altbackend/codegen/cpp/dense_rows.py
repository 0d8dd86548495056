"""Copy elements that a vector loop would read or write at a wide stride through a row of neighbours.

Compilers vectorise no loop that reads 16 or 8 bits at a wide stride. Such elements are copied one by one, before the
loop or after it, so that the arithmetic runs as vectors. Without copies, a batch norm of bfloat16 that turns an image
channels-last took six times as long.

Compilers gather elements of 32 and 64 bits. Where the stride is a multiple of a cache line, all elements of a gather
lie in one bank of L1: `silu` of float32 took five times as long. At other strides gathers are faster than copies.

A loop without a known number of iterations that reads many such elements runs in blocks. A recurrence over 31 columns
of booleans took g++ 18 seconds without copies, and their own loop as long where g++ may vectorise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.ops import OPS
from .ast import Declare, Function, Let, Loop, Stmt, Store

NARROW, WIDEST, LINE = 2, 8, 64  # bytes of an element that no gather reads, of the widest element, of a cache line
FEWEST, MOST_BYTES = 8, 4096  # least iterations of a loop, and most bytes of its row
BLOCK = 64  # iterations of a block
MANY = 8  # elements that no gather reads: a loop of unknown length with so many runs in blocks
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
    """Return whether a loop computes something in vectors, and is not known to be short."""
    n = ex.size_of(s.var)
    long = not isinstance(n, int) or n >= FEWEST
    computes = any(isinstance(x, Let) and (x.value.op in OPS or x.value.op == "cast") for x in s.body)
    return s.simd and s.step == 1 and not s.vector and long and computes


def _vector_loop(s: Loop, rows: _Rows) -> list[Stmt]:
    """Return the loop with the copies before and after it."""
    n = ex.size_of(s.var)
    if isinstance(n, int) and (s.begin, s.end) == ("0", ""):
        return _with_copies(s, rows, n, ex.ix(s.var))
    count = sum(_is_narrow(x) and _is_strided(x, s.var, BLOCK) for x in s.body)
    if s.limit is not None or s.begin == "block" or count < MANY:
        return [s]
    inner = replace(s, begin="block", end="block_end")
    body = _with_copies(inner, rows, BLOCK, ex.sub(ex.ix(s.var), ex.ix(ex.var("block", n))))
    return [replace(s, body=tuple(body), simd=False, sums=(), step=BLOCK)]


def _with_copies(s: Loop, rows: _Rows, n: int, at: Index) -> list[Stmt]:
    """Return the loop of at most `n` iterations, which number `at` counts, with the copies before and after it."""
    before: list[Stmt] = []
    after: list[Stmt] = []
    body: list[Stmt] = []
    for x in s.body:
        if not _is_strided(x, s.var, n):
            body.append(x)
        elif isinstance(x, Let):
            row = rows.declare(x.value.dtype, n)
            before.append(Store(row, at, x.value))
            body.append(Let(x.name, va.load(row, at, x.value.dtype)))
        else:
            assert isinstance(x, Store)
            row = rows.declare(x.value.dtype, n)
            body.append(Store(row, at, x.value))
            after.append(Store(x.target, x.index, va.load(row, at, x.value.dtype)))
    copies = [[replace(s, body=tuple(c), simd=False, scalar=True, sums=())] if c else [] for c in (before, after)]
    return [*copies[0], replace(s, body=tuple(body)), *copies[1]]


def _is_narrow(s: Stmt) -> bool:
    return isinstance(s, (Let, Store)) and s.value.dtype.itemsize <= NARROW


def _is_strided(s: Stmt, v: Atom, n: int) -> bool:
    """Return whether a statement loads or stores at a wide stride of `v`, which no other scalar of the loop moves."""
    if isinstance(s, Let) and s.value.op == "load":
        x, index = s.value, s.value.attr[1]
    elif isinstance(s, Store) and s.index is not None and not s.guards:
        x, index = s.value, s.index
    else:
        return False
    fits = x.dtype.itemsize <= WIDEST and n * x.dtype.itemsize <= MOST_BYTES
    if not fits or ex.lookups(index) or v not in ex.vars_of(index):
        return False
    stride = ex.coefficient(index, v)
    if x.dtype.itemsize > NARROW and not (isinstance(stride, int) and stride * x.dtype.itemsize % LINE == 0):
        return False
    return not (isinstance(stride, int) and abs(stride) <= SHORT_STRIDES)
