"""Store the terms of short totals in a row, and total the row in a tree of vectors.

A vector loop with an OpenMP reduction adds the lanes of its accumulators one after the other. For a row of 32 float32
numbers and registers of 16 lanes, these are 16 dependent additions, longer than all the rest of the row. A layer norm
over 32 elements took 57 ns a row, and 36 with its terms in a row of memory.

Where a short loop is the innermost of several that one total runs over, its row collects the terms of all of them, and
is totalled once: means over windows of 8x8 elements in bfloat16 took five times as long with a total for each line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import NamedTuple

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from .ast import Declare, Function, Let, Loop, Stmt, Store, Update

SHORT_LINE = 64  # terms of a loop whose row collects the terms of the loops around it
MOST_TERMS = 1024  # terms of a row; beside more of them, the additions of lanes take little time
DTYPES = (torch.float32, torch.float64)
OPS = ("sum", "max", "min")


@dataclass
class _Rows:
    """The rows of terms that a function declares, by dtype; loops one after the other share them."""

    declared: dict[tuple[torch.dtype, int], Declare] = field(default_factory=dict)

    def declare(self, dtype: torch.dtype, number: int, size: int) -> str:
        """Return the name of row `number` of a loop, with at least `size` elements."""
        key = dtype, number
        old = self.declared.get(key)
        label = old.name if old else f"v{len(self.declared)}"
        most = max(size, old.numel if old and isinstance(old.numel, int) else 0)
        self.declared[key] = Declare(label, dtype, None, most)
        return label


def with_row_totals(f: Function) -> Function:
    """Return `f` with the terms of short totals in rows of memory."""
    if f.flat is not None:
        return f
    rows = _Rows()
    body = _statements(f.body, rows, 0)
    return replace(f, body=body, scratch=(*f.scratch, *rows.declared.values())) if rows.declared else f


def _statements(body: Sequence[Stmt], rows: _Rows, block: int) -> tuple[Stmt, ...]:
    """Return the statements with totals of rows. `block`: iterations of the blocked loop around them, 0 without."""
    out: list[Stmt] = []
    for s in body:
        if not isinstance(s, Loop):
            out.append(s)
        elif s.sums:
            out += _totals(s, rows, block)
        elif (line := _short_line(s)) is not None:
            out += _collected(s, line, rows)
        else:
            out.append(replace(s, body=_statements(s.body, rows, s.step if s.step > 1 else 0)))
    return tuple(out)


def _short_line(s: Loop) -> Loop | None:
    """Return the short total at the end of a nest of loops that hold nothing else but values; None for other loops."""
    while not s.sums:
        *values, last = s.body
        if (
            s.step != 1
            or s.limit is not None
            or not isinstance(last, Loop)
            or not all(isinstance(x, Let) for x in values)
        ):
            return None
        s = last
    size, _, _ = _extent(s, 0)
    return s if 0 < size <= SHORT_LINE and all(_suits(s, op, acc) for op, acc in s.sums) else None


def _collected(nest: Loop, line: Loop, rows: _Rows) -> list[Stmt]:
    """Return the nest with the terms of all its lines combined in a row, whose total follows."""
    size = ex.size_of(line.var)
    assert isinstance(size, int)
    at = ex.ix(line.var)
    combining = _in_rows(line, rows, size, size, lambda row, x: Update(row, at, x.op, x.value))
    first = tuple(Store(row, at, va.identity(x.op, x.value.dtype)) for row, x in combining.terms)
    return [replace(combining.loop, body=first), _with_line(nest, combining.loop), *combining.totals]


def _with_line(nest: Loop, line: Loop) -> Loop:
    """Return a nest of loops with `line` in place of its innermost loop."""
    *values, inner = nest.body
    assert isinstance(inner, Loop)
    return replace(nest, body=(*values, line if inner.sums else _with_line(inner, line)))


def _totals(s: Loop, rows: _Rows, block: int) -> list[Stmt]:
    """Return a vector loop that stores its terms, and the totals after it; or the loop as it is."""
    size, first, count = _extent(s, block)
    if not 0 < size <= MOST_TERMS or not all(_suits(s, op, acc) for op, acc in s.sums):
        return [s]
    at = ex.sub(ex.ix(s.var), first)
    storing = _in_rows(s, rows, size, count, lambda row, x: Store(row, at, x.value))
    return [storing.loop, *storing.totals]


class _InRows(NamedTuple):
    """A loop whose terms go into rows, the row of each former update, and the updates by the totals of the rows."""

    loop: Loop
    terms: list[tuple[str, Update]]
    totals: list[Stmt]


def _in_rows(s: Loop, rows: _Rows, size: int, count: Index, put: Callable[[str, Update], Stmt]) -> _InRows:
    """Return `s` with `put(row, update)` for each update of a total. Rows have `size` elements, `count` in use."""
    names = {acc for _, acc in s.sums}
    body: list[Stmt] = []
    terms: list[tuple[str, Update]] = []
    for x in s.body:
        if not isinstance(x, Update) or x.target not in names:
            body.append(x)
            continue
        row = rows.declare(x.value.dtype, len(terms), size)
        body.append(put(row, x))
        terms.append((row, x))
    totals = [
        Update(x.target, None, x.op, va.make("row_total", (), x.value.dtype, (x.op, row, count))) for row, x in terms
    ]
    return _InRows(replace(s, body=tuple(body), sums=()), terms, [*totals])


def _extent(s: Loop, block: int) -> tuple[int, Index, Index]:
    """Return the most iterations of a loop, its first value, and how many there are; 0 iterations: not known."""
    n = ex.size_of(s.var)
    if s.limit is not None or s.step != 1 or not s.simd:
        return 0, 0, 0
    if (s.begin, s.end) == ("0", ""):
        return (n, 0, n) if isinstance(n, int) else (0, 0, 0)
    if (s.begin, s.end) != ("block", "block_end") or not block:
        return 0, 0, 0
    first, end = (ex.ix(ex.var(text, n)) for text in (s.begin, s.end))
    return block, first, ex.sub(end, first)


def _suits(s: Loop, op: str, acc: str) -> bool:
    """Return whether a reduction of the loop is one update of a scalar by floats."""
    updates = [x for x in s.body if isinstance(x, Update) and x.target == acc]
    if op not in OPS or len(updates) != 1:
        return False
    (update,) = updates
    return update.index is None and not update.guards and update.value.dtype in DTYPES
