"""Write what all rows of a tile share as a number of the program.

A tile of R rows begins at a multiple of R. So a row of program p is x = R p + l with 0 <= l < R. Where R divides d:

    x // d = p // (d / R)        x % d = R (p % (d / R)) + l

An operand of the points of an image, for rows that are its columns, is one row of elements then. Otherwise each of R
rows loads it anew, and the tile moves through shared memory, since its threads lie along points.
"""

from __future__ import annotations

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir.expr import Atom, Index

PROGRAM = ex.sym("program")  # every kernel defines it, so that it is no argument


@dataclass(frozen=True)
class ProgramRows:
    """The rows of a program: `split` into the program's number and a `rest`, and the numbers `written` for these."""

    split: Index
    rest: Atom
    written: dict[Atom, Index]


def program_rows(xblock: int, x: Atom) -> ProgramRows:
    """Return the rows `x` of programs that take `xblock` each. Positions are exact, for additions of 32 bits wrap."""
    program, rest = ex.var("p", ex.floordiv(ex.add(ex.size_of(x), xblock - 1), xblock)), ex.var("l", xblock)
    split = ex.add(ex.mul(xblock, ex.ix(program)), ex.ix(rest))
    return ProgramRows(split, rest, {program: PROGRAM, rest: ex.sub(ex.ix(x), ex.mul(xblock, PROGRAM))})


def is_shared(index: Index, xblock: int, x: Atom) -> bool:
    """Return whether an access is at the same place for all rows `x` of a program."""
    rows = program_rows(xblock, x)
    return rows.rest not in ex.vars_of(ex.substitute(index, {x: rows.split}))
