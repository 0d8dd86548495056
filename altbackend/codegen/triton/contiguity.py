"""Tell Triton along which axis of a tile neighbours are neighbours in memory.

Triton lets neighbouring threads read along the axis that it finds contiguous. It sees that `x % n` counts by one only
within the largest power of two that divides `n`. For an odd `n` it finds nothing, and threads read along the last axis:
a kernel over columns of images of 505x505 elements took 1,552 us where reads of neighbours would take 200.

A hint cannot make an access wrong. Triton widens an access to `k` elements only where `k` divides every term of the
position. Such groups of `k` elements never cross a multiple of `n`.

Triton 3.6 lets neighbouring threads read different rows where it finds neither axis contiguous, and 3.7 points of a
row. So do strided windows of rows, reversed rows and rows of images of 49 points. No hint fits: points are not
neighbours in memory, only near. Such tiles are accessed as tensors of one dimension, in the order of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir import expr as ex
from ...ir.expr import Atom, Expr, Index
from ...ir.value import Value

SEEN = 16  # Triton itself sees runs of so many elements, a power of two, where it divides all divisors
LEAST_RUN = 4  # neighbours along rows that are worth a hint
UNKNOWN_RUN = 16  # the run that a symbolic divisor is taken to give
UNKNOWN_SIZE = 1024  # what a symbolic size is taken to be
NEIGHBOURS = 8  # of an axis, whose places are compared


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


def blocks_of_neighbours(index: Index, lookups: Mapping[Value, frozenset[str]], size: int) -> tuple[int, int] | None:
    """Return how many blocks of `size` elements eight neighbouring points of a row touch, and eight neighbouring rows.

    `lookups`: the tile axes of looked-up parts, which are taken to count by one along these. None where Triton may see
    neighbours itself, and where nobody can tell.
    """
    if isinstance(index, int) or any(_is_seen(index, v) for v in ex.vars_of(index)):
        return None
    rows = _places(index, lookups, "x")
    points = _places(index, lookups, "r")
    return None if rows is None or points is None else (_blocks(points, size), _blocks(rows, size))


def _places(index: Expr, lookups: Mapping[Value, frozenset[str]], axis: str) -> list[int] | None:
    """Return the first positions along an axis of the tile, 0 on the other one; None: they are not numbers."""
    variables = [v for v in ex.vars_of(index) if v.key.startswith(axis)]
    others = dict.fromkeys((v for v in ex.vars_of(index) if v not in variables), 0)
    sizes = dict.fromkeys(ex.syms_of(index), UNKNOWN_SIZE)
    plain = ex.substitute(ex.without_lookups(index), others | sizes)
    looked_up = [(a, c) for m, c in index.terms if len(m) == 1 for a in m if isinstance(a, ex.Lookup)]
    if len(looked_up) != len(ex.lookups(index)):
        return None
    step = sum(c for a, c in looked_up if axis in lookups.get(a.value, frozenset()))
    places = [ex.add(ex.substitute(plain, dict.fromkeys(variables, n)), step * n) for n in range(NEIGHBOURS)]
    numbers = [n for n in places if isinstance(n, int)]
    return numbers if len(numbers) == len(places) else None


def _blocks(places: Sequence[int], size: int) -> int:
    return len({(n - min(places)) // size for n in places})


def _is_seen(index: Expr, v: Atom) -> bool:
    """Return whether Triton may see that `index` counts by one along `v`; every doubt counts as yes."""
    for monomial, coefficient in index.terms:
        if coefficient != 1 or len(monomial) != 1:
            continue
        (atom,) = monomial
        if atom is v and all(n % 2 == 0 for n in ex.divisors(index, v)):
            return True
        if isinstance(atom, ex.Mod) and v in atom.vars and not (isinstance(atom.divisor, int) and atom.divisor % 2):
            return True
    return False
