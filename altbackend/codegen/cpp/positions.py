"""The statements of a kernel's body with those inside of its loops, and the positions in memory that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.value import Value
from .ast import Let, Loop, Stmt, Store, Update


def inside(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """Yield statements, each loop before those inside of it."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            yield from inside(s.body)


def loads(s: Stmt) -> list[Value]:
    """Return the loads in the value of a statement."""
    return [v for v in va.walk(s.value) if v.op == "load"] if isinstance(s, (Let, Store, Update)) else []


def positions(s: Stmt) -> list[Index]:
    """Return the positions that a statement reads and writes, in parameters and in memory of the row."""
    own = [s.index] if isinstance(s, (Store, Update)) and s.index is not None else []
    read = va.loads(s.value) if isinstance(s, (Let, Store, Update)) else ()
    return [index for _, index in read] + own


def row_variable(body: Sequence[Stmt]) -> Atom | None:
    """Return the variable that counts the rows of a kernel, None if no position depends on it."""
    return next((a for s in inside(body) for e in positions(s) for a in ex.vars_of(e) if a.args[0] == "o"), None)
