"""Compute costly values of columns once, not in each iteration of the loop around the columns.

The logarithm of a total belongs to a point of an image. A log-softmax over channels, whose loops run over all points
for each channel, computed it once for each channel and point. A row of memory now holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom
from .ast import Declare, Function, Let, Loop, Stmt, Store, Update, name
from .positions import inside, loads

COSTLY = 6  # float additions of a value that takes longer than a load from L1
FEWEST, MOST_BYTES = 4, 1 << 14  # iterations around the columns, and bytes of a row


@dataclass
class _Rows:
    """The rows of values that a function declares."""

    declared: list[Declare] = field(default_factory=list)

    def declare(self, x: Let, size: int) -> str:
        """Return the name of a new row of `size` values like that of `x`."""
        label = f"h{len(self.declared)}"
        self.declared.append(Declare(label, x.value.dtype, None, size))
        return label


def with_column_values(f: Function) -> Function:
    """Return `f` with rows of the costly values that depend on a column alone."""
    if f.flat is not None or f.short or f.template:
        return f
    rows = _Rows()
    body = [part for s in f.body for part in (_nest(s, rows) if isinstance(s, Loop) else [s])]
    return replace(f, body=tuple(body), scratch=(*f.scratch, *rows.declared)) if rows.declared else f


def _nest(s: Loop, rows: _Rows) -> list[Stmt]:
    """Return a loop over loops over columns, after the loop that computes values of columns, if it has any."""
    *outer, columns = s.body
    count, size = ex.size_of(s.var), ex.size_of(columns.var) if isinstance(columns, Loop) else None
    if not isinstance(columns, Loop) or not columns.simd or columns.sums or not isinstance(size, int):
        return [s]
    if s.step != 1 or s.limit is not None or columns.limit is not None or (columns.begin, columns.end) != ("0", ""):
        return [s]
    if not isinstance(count, int) or count < FEWEST or not all(isinstance(x, Let) for x in outer):
        return [s]
    names = {x.name for x in outer if isinstance(x, Let)}
    alone = _of_columns(columns.body, s.var, names)
    stored = [x for x in _used_outside(columns.body, alone) if size * x.value.dtype.itemsize <= MOST_BYTES]
    needed = _needed(alone, stored)
    if not stored or sum(va.flops(x.value) for x in needed) < COSTLY * len(stored):
        return [s]
    places = {x.name: rows.declare(x, size) for x in stored}
    at = ex.ix(columns.var)
    stores = [Store(places[x.name], at, name(x.name, x.value.dtype)) for x in stored]
    before = replace(columns, body=(*needed, *stores))
    body = tuple(_loaded(x, places, columns.var) for x in columns.body)  # the compiler drops what nothing uses
    return [before, replace(s, body=(*outer, replace(columns, body=body)))]


def _loaded(x: Stmt, places: dict[str, str], v: Atom) -> Stmt:
    """Return a statement of the loop, with a load in place of a value that a row holds."""
    if not isinstance(x, Let) or x.name not in places:
        return x
    return Let(x.name, va.load(places[x.name], ex.ix(v), x.value.dtype))


def _needed(alone: Sequence[Let], stored: Sequence[Let]) -> list[Let]:
    """Return the values on which `stored` depend, and these, in order."""
    names = {x.name for x in stored}
    needed = list[Let]()
    for x in reversed(alone):
        if x.name in names:
            needed.append(x)
            names.update(v.attr for v in va.walk(x.value) if v.op == "name")
    return needed[::-1]


def _of_columns(body: Sequence[Stmt], outer: Atom, names: set[str]) -> list[Let]:
    """Return the values that do not depend on `outer`, on `names`, or on memory that the loop writes, in order.

    None of them checks a position: a check says which of the loop's iterations fails.
    """
    written = {x.target for x in inside(body) if isinstance(x, (Store, Update))}
    depends, alone = set(names), list[Let]()
    for x in body:
        if not isinstance(x, Let):
            continue
        values = list(va.walk(x.value))
        places = [v.attr[1] for v in loads(x)] + [v.attr for v in values if v.op == "index"]
        fixed = all(outer not in ex.vars_of(e) and not ex.lookups(e) for e in places)
        used = {v.attr for v in values if v.op == "name"}
        reads = {v.attr[0] for v in loads(x)}
        if fixed and not used & depends and not reads & written and not any(v.op == "wrap_index" for v in values):
            alone.append(x)
        else:
            depends.add(x.name)
    return alone


def _used_outside(body: Sequence[Stmt], alone: Sequence[Let]) -> list[Let]:
    """Return those of the values `alone` that take arithmetic and that the other statements use."""
    chosen = set(alone)
    others = [x for x in body if not (isinstance(x, Let) and x in chosen)]
    values = [x.value for x in others if isinstance(x, (Let, Store, Update))]
    values += [g for x in others if isinstance(x, (Store, Update)) for g in x.guards]
    used = {v.attr for value in values for v in va.walk(value) if v.op == "name"}
    return [x for x in alone if x.name in used and va.flops(x.value)]
