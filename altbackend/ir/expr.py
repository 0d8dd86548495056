"""Index algebra: integer polynomials over loop variables and sizes, always in normal form.

An `Index` is a Python int or an `Expr`; the indices of a static graph are mostly ints. An `Expr` is a sum of integer
coefficients times products of atoms. An atom is a loop variable, a symbolic size, a floor division, a remainder, a
maximum or minimum of two expressions, or an integer that is read from data. Expressions are interned, so equal
expressions are the same object and are compared by identity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union
from weakref import WeakValueDictionary

Index = Union[int, "Expr"]
Monomial = tuple["Atom", ...]
UNBOUNDED = 2**62


class Atom:
    """An indivisible factor of a product: interned, compared by identity, ordered by `key`, with its inclusive range.

    Every atom is of one of the subclasses, which `kind` names and which give names to `args`.
    """

    __slots__ = ("__weakref__", "args", "hi", "key", "kind", "lo", "syms", "vars")
    kind: str
    args: tuple[Any, ...]
    key: str
    vars: frozenset[Atom]
    syms: frozenset[Atom]
    lo: int
    hi: int

    def __repr__(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_atom, (self.kind, self.args, self.lo, self.hi)


class Var(Atom):
    """A loop variable, `0 <= v < size`. `rank`: the position of its loop, for variables that `dim` makes."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name, which is unique in a loop nest."""
        return str(self.args[0])

    @property
    def size(self) -> Index:
        """The extent of the loop."""
        size: Index = self.args[1]
        return size

    @property
    def rank(self) -> int:
        """The position of the loop in its nest, from the slowest."""
        rank: int = self.args[2]
        return rank


class Sym(Atom):
    """A size that only the call decides."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name of the symbol in the host program and in kernels."""
        return str(self.args[0])


class _Division(Atom):
    __slots__ = ()

    @property
    def dividend(self) -> Index:
        """The left operand."""
        dividend: Index = self.args[0]
        return dividend

    @property
    def divisor(self) -> Index:
        """The right operand, which is positive."""
        divisor: Index = self.args[1]
        return divisor


class FloorDiv(_Division):
    """The floor division `dividend // divisor`."""

    __slots__ = ()


class Mod(_Division):
    """The remainder `dividend % divisor`, which is not negative."""

    __slots__ = ()


class Extremum(Atom):
    """The maximum or minimum (`kind`) of two expressions."""

    __slots__ = ()


class Lookup(Atom):
    """An integer that is read from data."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The `ir.value.Value` that computes the integer."""
        return self.args[0]


_CLASSES: dict[str, type[Atom]] = {
    "var": Var,
    "sym": Sym,
    "floordiv": FloorDiv,
    "mod": Mod,
    "max": Extremum,
    "min": Extremum,
    "lookup": Lookup,
}
_atoms: WeakValueDictionary[Any, Atom] = WeakValueDictionary()
_exprs: WeakValueDictionary[Any, Expr] = WeakValueDictionary()
_NO_ATOMS: frozenset[Atom] = frozenset()


class Expr:
    """The sum `const + sum(coef * product(atoms))`; immutable and interned."""

    __slots__ = ("__weakref__", "_bounds", "_text", "const", "syms", "terms", "vars")
    terms: tuple[tuple[Monomial, int], ...]
    const: int
    vars: frozenset[Atom]
    syms: frozenset[Atom]
    _bounds: tuple[int, int] | None
    _text: str | None

    def __repr__(self) -> str:
        return show(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_expr, (self.terms, self.const)


def _rebuild_expr(terms: tuple[tuple[Monomial, int], ...], const: int) -> Index:
    return _make(dict(terms), const)


def _rebuild_atom(kind: str, args: tuple[Any, ...], lo: int, hi: int) -> Atom:
    return _atom(kind, args, lo, hi)


def _atom(kind: str, args: tuple[Any, ...], lo: int, hi: int) -> Atom:
    interned = _atoms.get((kind, args, lo, hi))
    if interned is not None:
        return interned
    atom = _CLASSES[kind]()
    atom.kind, atom.args, atom.lo, atom.hi = kind, args, lo, hi
    atom.key = _atom_text(kind, args)
    if kind == "var":
        atom.vars, atom.syms = frozenset((atom,)), syms_of(args[1])
    elif kind == "sym":
        atom.vars, atom.syms = _NO_ATOMS, frozenset((atom,))
    elif kind == "lookup":
        atom.vars, atom.syms = args[0].vars, args[0].syms
    else:
        atom.vars = _NO_ATOMS.union(*(vars_of(a) for a in args))
        atom.syms = _NO_ATOMS.union(*(syms_of(a) for a in args))
    _atoms[(kind, args, lo, hi)] = atom
    return atom


def _atom_text(kind: str, args: tuple[Any, ...]) -> str:
    if kind in ("var", "sym"):
        return str(args[0])
    if kind == "floordiv":
        return f"({_operand(args[0])} // {_operand(args[1])})"
    if kind == "mod":
        return f"({_operand(args[0])} % {_operand(args[1])})"
    if kind == "lookup":
        return f"[{args[0]}]"
    return f"{kind}({', '.join(show(a) for a in args)})"


def _operand(e: Index) -> str:
    """Return the text of `e` as an operand, in brackets unless it is one atom or a number.

    In Python, // and % bind tighter than sums and as tight as products.
    """
    text = show(e)
    atom = isinstance(e, int) or (len(e.terms) == 1 and not e.const and e.terms[0][1] == 1 and len(e.terms[0][0]) == 1)
    return text if atom else f"({text})"


def _make(terms: dict[Monomial, int], const: int) -> Index:
    live = {m: c for m, c in terms.items() if c}
    if not live:
        return const
    ordered = tuple(sorted(live.items(), key=_monomial_order)) if len(live) > 1 else tuple(live.items())
    key = (ordered, const)
    interned = _exprs.get(key)
    if interned is not None:
        return interned
    expr = Expr()
    expr.terms, expr.const = key
    expr._bounds = expr._text = None
    if len(ordered) == 1 and len(ordered[0][0]) == 1:
        expr.vars, expr.syms = ordered[0][0][0].vars, ordered[0][0][0].syms
    else:
        expr.vars = _NO_ATOMS.union(*(a.vars for m, _ in ordered for a in m))
        expr.syms = _NO_ATOMS.union(*(a.syms for m, _ in ordered for a in m))
    _exprs[key] = expr
    return expr


def _monomial_order(item: tuple[Monomial, int]) -> tuple[int, list[str]]:
    return -abs(item[1]), [a.key for a in item[0]]


def _of(atom: Atom) -> Index:
    return _make({(atom,): 1}, 0)


def var(name: str, size: Index, rank: int = 0) -> Var:
    """Return the loop variable `name`, which runs over `0 <= v < size`; `rank`: the position of its loop."""
    top = bounds(size)[1]
    atom = _atom("var", (name, size, rank), 0, max(top - 1, 0))
    assert isinstance(atom, Var)
    return atom


def dim(rank: int, size: Index) -> Var:
    """Return the canonical loop variable of the dimension `rank`, whose extent is `size`."""
    return var(f"d{rank}", size, rank)


def resized(v: Atom, size: Index) -> Var:
    """Return a loop variable of the same name and rank with another extent."""
    assert isinstance(v, Var)
    return var(v.name, size, v.rank)


def numbers(indices: Iterable[Index]) -> list[int]:
    """Return indices that are all known numbers."""
    out = []
    for i in indices:
        assert isinstance(i, int), f"{i} is not a known number"
        out.append(i)
    return out


def size_of(v: Atom) -> Index:
    """Return the extent of a loop variable."""
    size: Index = v.args[1]
    return size


def rank_of(v: Atom) -> int:
    """Return the position of the loop of a loop variable, from the slowest."""
    rank: int = v.args[2]
    return rank


def ix(v: Atom) -> Index:
    """Return a loop variable or symbol as an index expression; a variable of extent 1 is 0."""
    if isinstance(v, Var) and v.size == 1:
        return 0
    return _of(v)


def sym(name: str, lo: int = 0, hi: int = UNBOUNDED) -> Index:
    """Return the symbol of a size that only the call decides; `lo` and `hi` are its inclusive range."""
    return _of(_atom("sym", (name,), lo, hi))


def lookup(value: Any, lo: int, hi: int) -> Index:
    """Return an index that is read from data: the integer `ir.value.Value` `value`, which lies in `[lo, hi]`."""
    return _of(_atom("lookup", (value,), lo, hi))


def vars_of(e: Index) -> frozenset[Atom]:
    """Return the loop variables of an index expression."""
    return _NO_ATOMS if isinstance(e, int) else e.vars


def syms_of(e: Index) -> frozenset[Atom]:
    """Return the symbolic sizes of an index expression."""
    return _NO_ATOMS if isinstance(e, int) else e.syms


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
        return single if const == 0 else _make(dict(single.terms), single.const + const)
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
                return add(_make(left, const), mul(_product(rest, c), mod(x, mul(k, b.divisor))))
        if isinstance(quotient, int) or len(quotient.terms) != 1 or quotient.const:
            continue
        qm, qc = quotient.terms[0]
        if not c or qc != 1:
            continue
        scaled = mul(_product(rest, c), k, _product(qm, 1))
        if isinstance(scaled, int) or len(scaled.terms) != 1 or scaled.const:
            continue
        (sm, sc) = scaled.terms[0]
        if terms.get(sm, 0) == sc:
            left = dict(terms)
            del left[sm], left[m]
            return add(_make(left, const), mul(_product(rest, c), x))
    return _make(terms, const)


def _without(m: Monomial, a: Atom) -> Monomial:
    rest = list(m)
    rest.remove(a)
    return tuple(rest)


def _product(atoms: Monomial, coef: int) -> Index:
    return coef if not atoms else _make({atoms: coef}, 0)


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
    result = rest[0]
    if coef != 1:
        scaled = _make({m: c * coef for m, c in result.terms}, result.const * coef)
        assert isinstance(scaled, Expr)
        result = scaled
    for other in rest[1:]:
        result = _times(result, other)  # type: ignore[assignment]
        if isinstance(result, int):
            return mul(result, *rest[rest.index(other) + 1 :])
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


def bounds(e: Index) -> tuple[int, int]:
    """Return the inclusive numeric range of an expression, saturated at +-UNBOUNDED."""
    if isinstance(e, int):
        return e, e
    if e._bounds is None:
        lo = hi = e.const
        for m, c in e.terms:
            mlo, mhi = 1, 1
            for a in m:
                corners = [mlo * a.lo, mlo * a.hi, mhi * a.lo, mhi * a.hi]
                mlo, mhi = min(corners), max(corners)
            lo += min(c * mlo, c * mhi)
            hi += max(c * mlo, c * mhi)
        e._bounds = max(lo, -UNBOUNDED), min(hi, UNBOUNDED)
    return e._bounds


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
                factors.append(_of(a))
        out = add(out, mul(*factors))
    return out


def known_less(a: Index, b: Index) -> bool:
    """Return whether the ranges prove `a < b`."""
    return known_nonnegative(sub(sub(b, a), 1))


def _divide_term(m: Monomial, c: int, d: Index) -> Index | None:
    """Return `c*m / d` if the division is exact, else None. `d` is an int or a single monomial."""
    if isinstance(d, int):
        return _product(m, c // d) if c % d == 0 else None
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
    return _product(tuple(rest), c // dc)


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
    return add(*quotient), _make(rest, const)


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
        return _of(_atom("floordiv", (rest, d), *_div_bounds(rest, d)))
    if isinstance(d, int):
        g = math.gcd(d, *(c for _, c in rest.terms))
        if g > 1:
            inner = _make({m: c // g for m, c in rest.terms}, rest.const // g)
            return floordiv(inner, d // g)
    if (coarse := _coarsen(rest, d)) is not None:
        return floordiv(coarse[1], coarse[2])
    if len(rest.terms) == 1 and rest.const == 0 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        atom = rest.terms[0][0][0]
        if isinstance(atom, FloorDiv):
            return floordiv(atom.dividend, mul(atom.divisor, d))
        if isinstance(atom, Mod) and (n := exact_div(atom.divisor, d)) is not None:
            return mod(floordiv(atom.dividend, d), n)
    return _of(_atom("floordiv", (rest, d), *_div_bounds(rest, d)))


def _coarsen(rest: Expr, d: Index) -> tuple[Index, Index, Index, Index] | None:
    """Return `(g, x, k, r)` with `rest = g*x + r`, `d = g*k` and `0 <= r < g`, or None if no such factor is found.

    Then `rest // d = x // k`.
    """
    for m, c in rest.terms:
        g = _product(tuple(a for a in m if isinstance(a, Sym)), abs(c))
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
        return _of(_atom("mod", (rest, d), 0, max(bounds(d)[1] - 1, 0)))
    if isinstance(d, int) and rest.const == 0:
        g = math.gcd(d, *(c for _, c in rest.terms))
        if g > 1:
            return mul(g, mod(_make({m: c // g for m, c in rest.terms}, 0), d // g))
    if (coarse := _coarsen(rest, d)) is not None:
        unit, units, limit, residue = coarse
        return add(mul(unit, mod(units, limit)), residue)
    if len(rest.terms) == 1 and rest.const == 0 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        atom = rest.terms[0][0][0]
        if isinstance(atom, Mod) and exact_div(atom.divisor, d) is not None:
            return mod(atom.dividend, d)
    return _of(_atom("mod", (rest, d), 0, max(bounds(d)[1] - 1, 0)))


def maximum(a: Index, b: Index) -> Index:
    """Return the larger of two expressions; folded if their ranges decide."""
    if known_nonnegative(sub(a, b)):
        return a
    if known_nonnegative(sub(b, a)):
        return b
    (alo, ahi), (blo, bhi) = bounds(a), bounds(b)
    return _of(_atom("max", (a, b), max(alo, blo), max(ahi, bhi)))


def minimum(a: Index, b: Index) -> Index:
    """Return the smaller of two expressions; folded if their ranges decide."""
    if known_nonnegative(sub(b, a)):
        return a
    if known_nonnegative(sub(a, b)):
        return b
    (alo, ahi), (blo, bhi) = bounds(a), bounds(b)
    return _of(_atom("min", (a, b), min(alo, blo), min(ahi, bhi)))


def prod(items: Iterable[Index]) -> Index:
    """Return the product of `items`, 1 for none."""
    return mul(1, *items)


def substitute(e: Index, env: Mapping[Atom, Index], on_value: Callable[[Any], Any] | None = None) -> Index:
    """Return `e` with variables and symbols replaced by expressions. `on_value` rewrites the values inside lookups."""
    if isinstance(e, int) or not (any(v in env for v in e.vars) or any(s in env for s in e.syms) or on_value):
        return e
    parts: list[Index] = [e.const]
    for m, c in e.terms:
        factors: list[Index] = [c]
        factors.extend(_substitute_atom(a, env, on_value) for a in m)
        parts.append(mul(*factors))
    return add(*parts)


def _substitute_atom(a: Atom, env: Mapping[Atom, Index], on_value: Callable[[Any], Any] | None) -> Index:
    if isinstance(a, (Var, Sym)):
        return env[a] if a in env else _of(a)
    if isinstance(a, Lookup):
        value = on_value(a.value) if on_value else a.value.substitute(env)
        return lookup(value, a.lo, a.hi)
    args = [substitute(x, env, on_value) for x in a.args]
    if isinstance(a, FloorDiv):
        return floordiv(*args)
    if isinstance(a, Mod):
        return mod(*args)
    return maximum(*args) if a.kind == "max" else minimum(*args)


def coefficient(e: Index, v: Atom) -> Index | None:
    """Return `c` of `e = c*v + rest`, where `c` and `rest` are free of `v`, or None if `e` is not linear in `v`."""
    if isinstance(e, int) or v not in e.vars:
        return 0
    parts: list[Index] = []
    for m, c in e.terms:
        if not any(v in a.vars for a in m):
            continue
        if sum(v in a.vars for a in m) != 1 or v not in m:
            return None
        rest = list(m)
        rest.remove(v)
        parts.append(_product(tuple(rest), c))
    return add(*parts)


def divisors(e: Index, v: Atom) -> frozenset[int]:
    """Return the constants by which `e` divides the variable itself, for a quotient or a remainder."""
    if isinstance(e, int):
        return frozenset()
    divisions = [a for m, _ in e.terms for a in m if isinstance(a, _Division)]
    own = {a.divisor for a in divisions if isinstance(a.divisor, int) and a.dividend is ix(v)}
    return frozenset(own).union(*(divisors(a.dividend, v) for a in divisions))


def lookups(e: Index) -> list[Any]:
    """Return the values of all data-dependent parts, outermost first."""
    values: list[Any] = []
    if isinstance(e, int):
        return values
    for m, _ in e.terms:
        for a in m:
            if isinstance(a, Lookup):
                values.append(a.value)
            elif not isinstance(a, (Var, Sym)):
                for x in a.args:
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


def show(e: Index) -> str:
    """Return the text of an expression, largest coefficients first; equal expressions have equal text."""
    if isinstance(e, int):
        return str(e)
    if e._text is None:
        parts = []
        for m, c in e.terms:
            text = "*".join(a.key for a in m)
            parts.append(text if c == 1 else f"-{text}" if c == -1 else f"{c}*{text}")
        if e.const:
            parts.append(str(e.const))
        joined = " + ".join(parts).replace("+ -", "- ")
        e._text = joined
    return e._text
