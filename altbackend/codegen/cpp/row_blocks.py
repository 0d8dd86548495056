"""Copy elements for a block of rows at once where neighbours in memory belong to neighbouring rows, not to one row.

A row of a permuted tensor has one element in each of many cache lines, and its neighbours share the lines. With rows of
1,024 elements, all lines of a row fill L1, so that each line is loaded once for every row. The first row of a block
copies the elements of all of its rows into a buffer, line by line; the last row copies what they wrote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.value import Value
from .ast import BlockRead, BlockRow, BlockWrite, Declare, Function, Let, Loop, Stmt, Store, Update
from .positions import inside, loads, positions, row_variable

LINE, PAGE, MOST_BYTES = 64, 4096, 1 << 17  # bytes of a cache line, of a way of L1, of a block (half of a small L2)
SHARE = 0.75  # part of the lines of L1 that rows may use before they evict each other
FEWEST_ROWS, FEWEST = 8, 8  # rows of a block, and iterations of a loop: copies for fewer do not pay
SHORT_STRIDES = 4  # strides up to which vectors of neighbours contain the elements


@dataclass
class _Blocks:
    """The blocks of a function; loops that read the same share one. `read`: names of parameters that it loads."""

    row: Atom
    read: frozenset[str]
    written: frozenset[str]
    l1: int
    streams: int = 1
    declared: list[Declare] = field(default_factory=list)
    names: dict[tuple[Value, Atom], str] = field(default_factory=dict)

    def declare(self, x: Value, v: Atom, rows: int, period: int) -> BlockRow:
        """Return the row of a new block for elements like `x` along `v`."""
        number, n = len(self.declared), ex.size_of(v)
        assert isinstance(n, int)
        # an odd number of lines: rows that lie a power of two apart would meet in few sets of the cache
        pitch = (-(-n * x.dtype.itemsize // LINE) | 1) * LINE // x.dtype.itemsize
        self.declared.append(Declare(f"b{number}", x.dtype, None, pitch * rows))
        return BlockRow(f"q{number}", f"b{number}", x.dtype, v, rows, period, pitch)


def with_row_blocks(f: Function, l1: int) -> Function:
    """Return `f` with blocks for reads and writes whose neighbours in memory belong to neighbouring rows.

    `l1`: bytes of the first cache. Rows whose lines fit into it need no blocks: neighbouring rows find them there.
    """
    if f.flat is not None or f.short or f.row_counters or f.template:
        return f
    row = row_variable(f.body)
    if row is None:
        return f
    loops = [s for s in f.body if isinstance(s, Loop)]
    read = frozenset(v.attr[0] for s in inside(f.body) for v in loads(s))
    stored = frozenset(s.target for s in inside(f.body) if isinstance(s, (Store, Update)))
    blocks = _Blocks(row, read, stored, l1, _streams(loops, row))
    body = [part for s in f.body for part in (_loop(s, blocks) if isinstance(s, Loop) else [s])]
    return replace(f, body=tuple(body), scratch=(*f.scratch, *blocks.declared)) if blocks.declared else f


def _streams(loops: Sequence[Loop], row: Atom) -> int:
    """Return the number of different places that the loops read or write across rows."""
    places = {(e, s.var) for s in loops for x in inside(s.body) for e in positions(x) if _across(e, 4, s.var, row)[0]}
    return max(len(places), 1)


def _loop(s: Loop, blocks: _Blocks) -> list[Stmt]:
    """Return a loop of the rows with the copies before and after it."""
    n = ex.size_of(s.var)
    if not isinstance(n, int) or n < FEWEST or s.limit is not None or (s.begin, s.end) != ("0", ""):
        return [s]
    before: list[Stmt] = []
    after: list[Stmt] = []
    body = _statements(s, s.body, blocks, before, after)
    return [*before, replace(s, body=body), *after]


def _statements(
    loop: Loop, body: Sequence[Stmt], blocks: _Blocks, before: list[Stmt], after: list[Stmt]
) -> tuple[Stmt, ...]:
    v, out = loop.var, list[Stmt]()
    for x in body:
        if isinstance(x, Loop) and x.var == v:
            out.append(replace(x, body=_statements(loop, x.body, blocks, before, after)))
        elif isinstance(x, Let) and x.value.op == "load":
            out.append(replace(x, value=_read(x.value, v, blocks, before)))
        elif isinstance(x, Store) and x.index is not None and not x.guards:
            out.append(_write(x, x.index, v, blocks, before, after))
        else:
            out.append(x)
    return tuple(out)


def _read(x: Value, v: Atom, blocks: _Blocks, before: list[Stmt]) -> Value:
    source, index = x.attr
    rows, period = _across(index, x.dtype.itemsize, v, blocks.row)
    if not rows or source in blocks.written or _stays(index, x.dtype.itemsize, v, blocks):
        return x
    if (x, v) not in blocks.names:
        row = blocks.declare(x, v, rows, period)
        blocks.names[x, v] = row.name
        before += [BlockRead(row, x), row]
    return va.load(blocks.names[x, v], ex.ix(v), x.dtype)


def _write(x: Store, index: Index, v: Atom, blocks: _Blocks, before: list[Stmt], after: list[Stmt]) -> Store:
    rows, period = _across(index, x.value.dtype.itemsize, v, blocks.row)
    if not rows or x.target in blocks.read or _stays(index, x.value.dtype.itemsize, v, blocks):
        return x
    row = blocks.declare(x.value, v, rows, period)
    before.append(row)
    after.append(BlockWrite(row, x.target, index))
    return Store(row.name, ex.ix(v), x.value)


def _across(index: Index, itemsize: int, v: Atom, row: Atom) -> tuple[int, int]:
    """Return the rows of a block, 0 for none, and the rows after which an index jumps."""
    n, stride = ex.size_of(v), ex.coefficient(index, v)
    near = isinstance(stride, int) and abs(stride) <= SHORT_STRIDES
    if ex.lookups(index) or stride is None or near or not isinstance(n, int) or not ex.vars_of(index) <= {v, row}:
        return 0, 0
    period = _period(index, row)
    step = ex.sub(ex.substitute(index, {row: 1}), ex.substitute(index, {row: 0}))
    rows = LINE // itemsize
    while rows * n * itemsize > MOST_BYTES:
        rows //= 2
    return (rows, period) if period >= FEWEST_ROWS and step == 1 and rows >= FEWEST_ROWS else (0, 0)


def _stays(index: Index, itemsize: int, v: Atom, blocks: _Blocks) -> bool:
    """Return whether the lines of a row are still in L1 when the next row needs them.

    A line lies in the set (address / LINE) mod (PAGE / LINE), so that some strides use few of the sets.
    """
    n, stride = ex.size_of(v), ex.coefficient(index, v)
    if not isinstance(n, int) or not isinstance(stride, int):
        return False
    apart, sets = abs(stride) * itemsize, PAGE // LINE
    used = sets // math.gcd(sets, apart // LINE) if apart % LINE == 0 else sets
    return n * blocks.streams <= SHARE * used * (blocks.l1 // PAGE)


def _period(index: Index, row: Atom) -> int:
    """Return the number of rows between which an index is linear in the row's number; 0 if that is not known."""
    if isinstance(index, int):
        return 0
    size = ex.size_of(row)
    periods = [size if isinstance(size, int) else 1 << 62]
    for a in (a for m, _ in index.terms for a in m if row in a.vars and a != row):
        if not isinstance(a, (ex.FloorDiv, ex.Mod)) or not isinstance(a.divisor, int):
            return 0
        if a.dividend is not ex.ix(row) and not _is_quotient(a.dividend, row):
            return 0
        periods.append(a.divisor if a.dividend is ex.ix(row) else _period(a.dividend, row))
    least = min(periods)
    return least if all(n % least == 0 or n == periods[0] for n in periods) else 0


def _is_quotient(e: Index, row: Atom) -> bool:
    """Return whether an index is the quotient of the row's number by a constant."""
    if isinstance(e, int) or len(e.terms) != 1 or e.const:
        return False
    (((atoms, factor)),) = e.terms
    return factor == 1 and len(atoms) == 1 and isinstance(atoms[0], ex.FloorDiv) and atoms[0].dividend is ex.ix(row)
