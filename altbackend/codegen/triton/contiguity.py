"""Tell Triton along which axis of a tile neighbours are neighbours in memory.

Triton lets neighbouring threads read along the axis that it finds contiguous. It sees that `x % n` counts by one only
within the largest power of two that divides `n`. For an odd `n` it finds nothing, and threads read along the last axis:
a kernel over columns of images of 505x505 elements took 1,552 us where reads of neighbours would take 200.

A hint cannot make an access wrong. Triton widens an access to `k` elements only where `k` divides every term of the
position. Such groups of `k` elements never cross a multiple of `n`.
"""

from __future__ import annotations

from ...ir import expr as ex
from ...ir.expr import Atom, Index

SEEN = 16  # Triton itself sees runs of so many elements, a power of two, where it divides all divisors
LEAST_RUN = 4  # neighbours along rows that are worth a hint
UNKNOWN_RUN = 16  # the run that a symbolic divisor is taken to give


def hidden_run(index: Index, block: int) -> int:
    """Return how many consecutive rows of a tile with `block` of them are neighbours at `index`; 0: Triton sees it.

    `index` has the tile's rows as `x` and the points of a row as another variable.
    """
    if isinstance(index, int) or len(variables := ex.vars_of(index)) != 2:
        return 0
    x = next((v for v in variables if v.key == "x"), None)
    if x is None or any(ex.coefficient(index, v) == 1 for v in variables if v is not x) or not _is_hidden(index, x):
        return 0
    run = min(_run(index, x, block), block)
    return 1 << (run.bit_length() - 1) if run >= LEAST_RUN else 0


def is_along_x(index: Index, block: int) -> bool:
    """Return whether rows of a tile with `block` of them that follow each other are neighbours at `index`."""
    x = next((v for v in ex.vars_of(index) if v.key == "x"), None)
    return x is not None and not isinstance(index, int) and _run(index, x, block) >= LEAST_RUN


def _is_hidden(index: Index, x: Atom) -> bool:
    return bool(ex.syms_of(index)) or any(n % SEEN for n in ex.divisors(index, x))


def _run(index: Index, x: Atom, block: int) -> int:
    """Return after how many rows the position no longer grows by one."""
    assert not isinstance(index, int)
    for monomial, coefficient in index.terms:
        if coefficient != 1 or len(monomial) != 1:
            continue
        (atom,) = monomial
        if atom is x:
            return block
        if isinstance(atom, ex.Mod) and atom.dividend is ex.ix(x):
            return atom.divisor if isinstance(atom.divisor, int) else UNKNOWN_RUN
    return 1
