"""Index algebra: integer polynomials over loop variables and sizes, always in normal form.

The indices of a static graph are mostly ints. `atoms.py` holds the types and `arithmetic.py` the operations. This file
adds substitution and questions about expressions, and names everything that code outside this folder uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from .arithmetic import (
    add,
    exact_div,
    floordiv,
    known_less,
    known_nonnegative,
    maximum,
    minimum,
    mod,
    mul,
    prod,
    product,
    sub,
)
from .atoms import (
    UNBOUNDED,
    Atom,
    Division,
    Expr,
    Extremum,
    FloorDiv,
    Index,
    Lookup,
    Maximum,
    Minimum,
    Mod,
    Sym,
    Var,
    bounds,
    dim,
    from_atom,
    ix,
    lookup,
    numbers,
    rank_of,
    resized,
    show,
    size_of,
    sym,
    syms_of,
    var,
    vars_of,
)

if TYPE_CHECKING:  # values contain indices
    from .value import Value

__all__ = [
    "UNBOUNDED",
    "Atom",
    "Expr",
    "Extremum",
    "FloorDiv",
    "Index",
    "Lookup",
    "Maximum",
    "Minimum",
    "Mod",
    "Sym",
    "Var",
    "add",
    "bounds",
    "coefficient",
    "dim",
    "divisors",
    "exact_div",
    "flatten",
    "floordiv",
    "from_atom",
    "ix",
    "known_less",
    "known_nonnegative",
    "lookup",
    "lookups",
    "maximum",
    "minimum",
    "mod",
    "mul",
    "numbers",
    "prod",
    "rank_of",
    "resized",
    "show",
    "size_of",
    "stride",
    "strides_for",
    "sub",
    "substitute",
    "sym",
    "syms_of",
    "unflatten",
    "var",
    "vars_of",
]


def substitute(e: Index, env: Mapping[Atom, Index], on_value: Callable[[Value], Value] | None = None) -> Index:
    """Return `e` with variables and symbols replaced by expressions. `on_value` rewrites the values inside lookups."""
    if isinstance(e, int) or not (on_value or not env.keys().isdisjoint(e.vars) or not env.keys().isdisjoint(e.syms)):
        return e
    parts: list[Index] = [e.const]
    for m, c in e.terms:
        if len(m) == 1:
            atom = _substitute_atom(m[0], env, on_value)
            parts.append(atom if c == 1 else mul(c, atom))
        else:
            parts.append(mul(c, *(_substitute_atom(a, env, on_value) for a in m)))
    return add(*parts)


def _substitute_atom(a: Atom, env: Mapping[Atom, Index], on_value: Callable[[Value], Value] | None) -> Index:
    if a in env:
        return env[a]
    if isinstance(a, (Var, Sym)):
        return from_atom(a)
    if isinstance(a, Lookup):
        value = on_value(a.value) if on_value else a.value.substitute(env)
        return lookup(value, a.lo, a.hi)
    args = [substitute(x, env, on_value) for x in a.operands]
    if isinstance(a, FloorDiv):
        return floordiv(*args)
    if isinstance(a, Mod):
        return mod(*args)
    return maximum(*args) if isinstance(a, Maximum) else minimum(*args)


def coefficient(e: Index, v: Atom) -> Index | None:
    """Return `c` of `e = c*v + rest`, where `c` and `rest` are free of `v`, or None if `e` is not linear in `v`."""
    if isinstance(e, int) or v not in e.vars:
        return 0
    parts: list[Index] = []
    for m, c in e.terms:
        if len(m) == 1 and m[0] is v:
            parts.append(c)
            continue
        if not any(v in a.vars for a in m):
            continue
        if sum(v in a.vars for a in m) != 1 or v not in m:
            return None
        rest = list(m)
        rest.remove(v)
        parts.append(product(tuple(rest), c))
    return add(*parts)


def stride(e: Index, v: Atom) -> Index | None:
    """Return the coefficient of `v` in a place in memory, or the largest one of parts that depend on `v` alone.

    Such parts are the looked-up rows of an enlarged image, or the windows that tile one. They keep the order of the
    image's dimensions. None for other places.
    """
    c = coefficient(e, v)
    if c is not None or isinstance(e, int):
        return c
    parts = [(m, n) for m, n in e.terms if any(v in a.vars for a in m)]
    return max(n for _, n in parts) if all(len(m) == 1 and m[0].vars == {v} for m, _ in parts) else None


def without_lookups(e: Index) -> Index:
    """Return `e` without its data-dependent parts, except those that are multiplied by a loop variable."""
    if isinstance(e, int) or not lookups(e):
        return e
    rest: Index = e.const
    for m, c in e.terms:
        others = [a for a in m if not isinstance(a, Lookup)]
        if len(others) == len(m) or any(vars_of(from_atom(a)) for a in others):
            rest = add(rest, product(m, c))
    return rest


def divisors(e: Index, v: Atom) -> frozenset[int]:
    """Return the constants by which `e` divides the variable itself, for a quotient or a remainder."""
    if isinstance(e, int):
        return frozenset()
    divisions = [a for m, _ in e.terms for a in m if isinstance(a, Division)]
    own = {a.divisor for a in divisions if isinstance(a.divisor, int) and a.dividend is ix(v)}
    return frozenset(own).union(*(divisors(a.dividend, v) for a in divisions))


def lookups(e: Index) -> list[Value]:
    """Return the values of all data-dependent parts, outermost first."""
    values: list[Value] = []
    if isinstance(e, int):
        return values
    for m, _ in e.terms:
        for a in m:
            if isinstance(a, Lookup):
                values.append(a.value)
            for x in a.operands:
                values.extend(lookups(x))
    return values


def flatten(sizes: Iterable[Index], at: Iterable[Index]) -> Index:
    """Return the row-major linear position of the point `at` in a box of `sizes`."""
    linear: Index = 0
    for size, i in zip(sizes, at, strict=True):
        linear = add(mul(linear, size), i)
    return linear


def unflatten(linear: Index, sizes: tuple[Index, ...]) -> tuple[Index, ...]:
    """Return the coordinates of a row-major linear position; no remainder is taken of the first."""
    out: list[Index] = []
    stride: Index = 1
    for k in range(len(sizes) - 1, -1, -1):
        q = floordiv(linear, stride)
        out.append(0 if sizes[k] == 1 else (q if k == 0 else mod(q, sizes[k])))
        stride = mul(stride, sizes[k])
    return tuple(reversed(out))


def strides_for(sizes: tuple[Index, ...]) -> tuple[Index, ...]:
    """Return contiguous row-major strides, in elements; a dimension of size 0 counts as 1."""
    out: list[Index] = []
    stride: Index = 1
    for size in reversed(sizes):
        out.append(stride)
        stride = mul(stride, maximum(size, 1))
    return tuple(reversed(out))
