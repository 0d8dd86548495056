"""Arithmetic of index expressions in normal form: sums, products, divisions, comparisons.

The operations fold into each other: a sum joins a quotient and its remainder, and a quotient splits sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from .atoms import (
    Atom,
    Expr,
    FloorDiv,
    Index,
    Maximum,
    Minimum,
    Mod,
    Monomial,
    Sym,
    Var,
    bounds,
    from_atom,
    from_terms,
    interned,
    scaled,
)


def add(*items: Index) -> Index:
    """Return the sum; folds `c*k*(x//k) + c*(x%k)` to `c*x`, and `c*k*((x//k)%j) + c*(x%k)` to `c*(x%(k*j))`."""
    const = 0
    terms: dict[Monomial, int] | None = None
    single: Expr | None = None
    for item in items:
        if isinstance(item, int):
            const += item
            continue
        if terms is None:
            if single is None:
                single = item
                continue
            terms = dict(single.terms)
            const += single.const
        const += item.const
        for m, c in item.terms:
            terms[m] = terms.get(m, 0) + c
    if terms is None:
        if single is None:
            return const
        return single if const == 0 else from_terms(dict(single.terms), single.const + const)
    return _join_divmod(terms, const)


def _join_divmod(terms: dict[Monomial, int], const: int) -> Index:
    mods = [(m, a) for m in terms for a in m if isinstance(a, Mod) and terms[m]]
    for m, a in mods:
        x, k = a.dividend, a.divisor
        quotient = floordiv(x, k)
        c, rest = terms.get(m, 0), _without(m, a)
        for higher, b in mods:
            above = isinstance(k, int) and b.dividend == quotient and terms.get(higher) == c * k != 0
            if above and _without(higher, b) == rest:
                left = {n: t for n, t in terms.items() if n not in (m, higher)}
                return add(from_terms(left, const), mul(product(rest, c), mod(x, mul(k, b.divisor))))
        if isinstance(quotient, int) or len(quotient.terms) != 1 or quotient.const:
            continue
        qm, qc = quotient.terms[0]
        if not c or qc != 1:
            continue
        multiple = mul(product(rest, c), k, product(qm, 1))
        if isinstance(multiple, int) or len(multiple.terms) != 1 or multiple.const:
            continue
        (sm, sc) = multiple.terms[0]
        if terms.get(sm, 0) == sc:
            left = dict(terms)
            del left[sm], left[m]
            return add(from_terms(left, const), mul(product(rest, c), x))
    return from_terms(terms, const)


def _without(m: Monomial, a: Atom) -> Monomial:
    rest = list(m)
    rest.remove(a)
    return tuple(rest)


def product(atoms: Monomial, coef: int) -> Index:
    """Return a number times a product of atoms."""
    return coef if not atoms else from_terms({atoms: coef}, 0)


def sub(a: Index, b: Index) -> Index:
    """Return `a - b`."""
    return add(a, mul(b, -1))


def mul(*items: Index) -> Index:
    """Return the product, multiplied out."""
    coef = 1
    rest: list[Expr] = []
    for item in items:
        if isinstance(item, int):
            coef *= item
        else:
            rest.append(item)
    if coef == 0 or not rest:
        return coef
    first = scaled(rest[0], coef)
    if len(rest) == 1:
        return first
    assert isinstance(first, Expr)
    result = first
    for other in rest[1:]:
        so_far = _times(result, other)
        if isinstance(so_far, int):
            return mul(so_far, *rest[rest.index(other) + 1 :])
        result = so_far
    return result


def _times(a: Expr, b: Expr) -> Index:
    terms: dict[Monomial, int] = {}
    left = (*a.terms, ((), a.const))
    right = (*b.terms, ((), b.const))
    for ma, ca in left:
        for mb, cb in right:
            if ca and cb:
                m = tuple(sorted((*ma, *mb), key=lambda x: x.key))
                terms[m] = terms.get(m, 0) + ca * cb
    const = terms.pop((), 0)
    return _join_divmod(terms, const)


def known_nonnegative(e: Index) -> bool:
    """Return whether the ranges of the variables and symbols prove `e >= 0`."""
    if bounds(e)[0] >= 0:
        return True
    if isinstance(e, int) or not e.syms:
        return False
    return bounds(_extreme(e))[0] >= 0


def _extreme(e: Expr) -> Index:
    """Return a lower bound of `e`: every loop variable is replaced by the end of its range that makes `e` smallest."""
    out: Index = e.const
    for m, c in e.terms:
        factors: list[Index] = [c]
        for a in m:
            if isinstance(a, Var) and all(b is a or b.lo >= 0 for b in m):
                factors.append(0 if c > 0 else sub(a.size, 1))
            elif isinstance(a, Mod) and c < 0 and known_nonnegative(a.dividend):
                factors.append(sub(a.divisor, 1))
            else:
                factors.append(from_atom(a))
        out = add(out, mul(*factors))
    return out


def known_less(a: Index, b: Index) -> bool:
    """Return whether the ranges prove `a < b`."""
    return known_nonnegative(sub(sub(b, a), 1))


def _divide_term(m: Monomial, c: int, d: Index) -> Index | None:
    """Return `c*m / d` if the division is exact, else None. `d` is an int or a single monomial."""
    if isinstance(d, int):
        return product(m, c // d) if c % d == 0 else None
    if len(d.terms) != 1 or d.const:
        return None
    dm, dc = d.terms[0]
    if c % dc:
        return None
    rest = list(m)
    for a in dm:
        if a not in rest:
            return None
        rest.remove(a)
    return product(tuple(rest), c // dc)


def _split_by(a: Index, d: Index) -> tuple[Index, Index]:
    """Return `(quotient, rest)` of `a = quotient * d + rest`; the quotient takes every term that `d` divides."""
    if isinstance(a, int):
        a_terms: Iterable[tuple[Monomial, int]] = ()
        const = a
    else:
        a_terms, const = a.terms, a.const
    if not isinstance(d, int) and (len(d.terms) != 1 or d.const):
        return (1, 0) if a is d else (0, a)
    quotient: list[Index] = []
    rest: dict[Monomial, int] = {}
    for m, c in a_terms:
        q = _divide_term(m, c, d)
        if q is None:
            rest[m] = c
        else:
            quotient.append(q)
    if isinstance(d, int):
        q0, const = divmod(const, d)
        quotient.append(q0)
    return add(*quotient), from_terms(rest, const)


def exact_div(a: Index, d: Index) -> Index | None:
    """Return `a / d` if `d` divides every term exactly, else None."""
    if d == 0:
        return None
    if a is d or a == d:
        return 1
    q, r = _split_by(a, d)
    return q if r == 0 else None


@functools.lru_cache(maxsize=1 << 14)
def floordiv(a: Index, d: Index) -> Index:
    """Return `a // d` for `d > 0`."""
    if isinstance(a, int) and isinstance(d, int):
        return a // d
    if d == 1:
        return a
    quotient, rest = _split_by(a, d)
    if rest == 0 or (known_nonnegative(rest) and known_less(rest, d)):
        return quotient
    return add(quotient, _floordiv_rest(rest, d))


def _floordiv_rest(rest: Index, d: Index) -> Index:
    if isinstance(rest, int):
        return from_atom(interned(FloorDiv, (rest, d), *_div_bounds(rest, d)))
    if isinstance(d, int):
        g = math.gcd(d, *(c for _, c in rest.terms))
        if g > 1:
            inner = from_terms({m: c // g for m, c in rest.terms}, rest.const // g)
            return floordiv(inner, d // g)
    if (coarse := _coarsen(rest, d)) is not None:
        return floordiv(coarse[1], coarse[2])
    if len(rest.terms) == 1 and rest.const == 0 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        atom = rest.terms[0][0][0]
        if isinstance(atom, FloorDiv):
            return floordiv(atom.dividend, mul(atom.divisor, d))
        if isinstance(atom, Mod) and (n := exact_div(atom.divisor, d)) is not None:
            return mod(floordiv(atom.dividend, d), n)
    return from_atom(interned(FloorDiv, (rest, d), *_div_bounds(rest, d)))


def _coarsen(rest: Expr, d: Index) -> tuple[Index, Index, Index, Index] | None:
    """Return `(g, x, k, r)` with `rest = g*x + r`, `d = g*k` and `0 <= r < g`, or None if no such factor is found.

    Then `rest // d = x // k`.
    """
    for m, c in rest.terms:
        g = product(tuple(a for a in m if isinstance(a, Sym)), abs(c))
        if g == 1 or (k := exact_div(d, g)) is None:
            continue
        x, r = _split_by(rest, g)
        if x != 0 and known_nonnegative(r) and known_less(r, g):
            return g, x, k, r
    return None


def _div_bounds(a: Index, d: Index) -> tuple[int, int]:
    (lo, hi), (dlo, dhi) = bounds(a), bounds(d)
    dlo = max(dlo, 1)
    dhi = max(dhi, dlo)
    return min(lo // dlo, lo // dhi), max(hi // dlo, hi // dhi)


@functools.lru_cache(maxsize=1 << 14)
def mod(a: Index, d: Index) -> Index:
    """Return `a % d`, which is not negative, for `d > 0`."""
    if isinstance(a, int) and isinstance(d, int):
        return a % d
    if d == 1:
        return 0
    _, rest = _split_by(a, d)
    if rest == 0 or (known_nonnegative(rest) and known_less(rest, d)):
        return rest
    if isinstance(rest, int):
        return from_atom(interned(Mod, (rest, d), 0, max(bounds(d)[1] - 1, 0)))
    if isinstance(d, int) and rest.const == 0:
        g = math.gcd(d, *(c for _, c in rest.terms))
        if g > 1:
            return mul(g, mod(from_terms({m: c // g for m, c in rest.terms}, 0), d // g))
    if (coarse := _coarsen(rest, d)) is not None:
        unit, units, limit, residue = coarse
        return add(mul(unit, mod(units, limit)), residue)
    if len(rest.terms) == 1 and rest.const == 0 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        atom = rest.terms[0][0][0]
        if isinstance(atom, Mod) and exact_div(atom.divisor, d) is not None:
            return mod(atom.dividend, d)
    return from_atom(interned(Mod, (rest, d), 0, max(bounds(d)[1] - 1, 0)))


def maximum(a: Index, b: Index) -> Index:
    """Return the larger of two expressions; folded if their ranges decide."""
    if known_nonnegative(sub(a, b)):
        return a
    if known_nonnegative(sub(b, a)):
        return b
    (alo, ahi), (blo, bhi) = bounds(a), bounds(b)
    return from_atom(interned(Maximum, (a, b), max(alo, blo), max(ahi, bhi)))


def minimum(a: Index, b: Index) -> Index:
    """Return the smaller of two expressions; folded if their ranges decide."""
    if known_nonnegative(sub(b, a)):
        return a
    if known_nonnegative(sub(a, b)):
        return b
    (alo, ahi), (blo, bhi) = bounds(a), bounds(b)
    return from_atom(interned(Minimum, (a, b), min(alo, blo), min(ahi, bhi)))


def prod(items: Iterable[Index]) -> Index:
    """Return the product of `items`, 1 for none."""
    return mul(1, *items)
