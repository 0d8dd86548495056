"""The parts of index expressions: atoms, polynomials over them, their ranges and their text.

An `Index` is a Python int or an `Expr`. An `Expr` is a sum of integer coefficients times products of atoms. An atom is
a loop variable, a symbolic size, a division, a maximum or minimum of two expressions, or an integer read from data.
Atoms and expressions are interned: equal ones are the same object, compared by identity. `arithmetic.py` brings
expressions to normal form. Code outside this folder uses `expr.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, Union
from weakref import WeakValueDictionary

if TYPE_CHECKING:  # values contain indices, and indices that are read from data contain values
    from .value import Value

Index = Union[int, "Expr"]
Monomial = tuple["Atom", ...]
UNBOUNDED = 2**62


class Atom:
    """An indivisible factor of a product: interned, compared by identity, ordered by `key`, with its inclusive range.

    Every atom is of one of the subclasses, which give names to `args`.
    """

    __slots__ = ("__weakref__", "args", "hi", "key", "lo", "syms", "vars")
    args: tuple[Any, ...]
    key: str
    vars: frozenset[Atom]
    syms: frozenset[Atom]
    lo: int
    hi: int

    def __repr__(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[object, ...]:
        return interned, (type(self), self.args, self.lo, self.hi)

    @property
    def operands(self) -> tuple[Index, ...]:
        """The index expressions that a division, a maximum or a minimum combines."""
        return ()

    def text(self) -> str:
        """Return the text of the atom, which is its key."""
        return str(self.args[0])

    def depends_on(self) -> tuple[frozenset[Atom], frozenset[Atom]]:
        """Return the loop variables and the symbolic sizes inside the atom."""
        vars_, syms = (vars_of(x) for x in self.operands), (syms_of(x) for x in self.operands)
        return _NO_ATOMS.union(*vars_), _NO_ATOMS.union(*syms)


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

    def depends_on(self) -> tuple[frozenset[Atom], frozenset[Atom]]:
        """Return the variable itself and the sizes of its extent."""
        return frozenset((self,)), syms_of(self.size)


class Sym(Atom):
    """A size that only the call decides."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name of the symbol in the host program and in kernels."""
        return str(self.args[0])

    def depends_on(self) -> tuple[frozenset[Atom], frozenset[Atom]]:
        """Return no variable and the symbol itself."""
        return _NO_ATOMS, frozenset((self,))


class _Binary(Atom):
    __slots__ = ()

    @property
    def operands(self) -> tuple[Index, ...]:
        """The left and the right operand."""
        return self.args


class Division(_Binary):
    """A quotient or a remainder."""

    __slots__ = ()
    sign = ""

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

    def text(self) -> str:
        """Return the text in brackets."""
        return f"({_operand(self.dividend)} {self.sign} {_operand(self.divisor)})"


class FloorDiv(Division):
    """The floor division `dividend // divisor`."""

    __slots__ = ()
    sign = "//"


class Mod(Division):
    """The remainder `dividend % divisor`, which is not negative."""

    __slots__ = ()
    sign = "%"


class Extremum(_Binary):
    """The maximum or the minimum of two expressions."""

    __slots__ = ()
    name = ""

    def text(self) -> str:
        """Return the text as a call."""
        return f"{self.name}({', '.join(show(x) for x in self.operands)})"


class Maximum(Extremum):
    """The larger of two expressions."""

    __slots__ = ()
    name = "max"


class Minimum(Extremum):
    """The smaller of two expressions."""

    __slots__ = ()
    name = "min"


class Lookup(Atom):
    """An integer that is read from data."""

    __slots__ = ()

    @property
    def value(self) -> Value:
        """The value that computes the integer."""
        value: Value = self.args[0]
        return value

    def text(self) -> str:
        """Return the text of the value in square brackets."""
        return f"[{self.value}]"

    def depends_on(self) -> tuple[frozenset[Atom], frozenset[Atom]]:
        """Return the variables and sizes of the value."""
        return self.value.vars, self.value.syms


AnyAtom = TypeVar("AnyAtom", bound=Atom)
_atoms: WeakValueDictionary[tuple[type[Atom], tuple[object, ...], int, int], Atom] = WeakValueDictionary()
_exprs: WeakValueDictionary[tuple[tuple[tuple[Monomial, int], ...], int], Expr] = WeakValueDictionary()
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

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_expr, (self.terms, self.const)


def _rebuild_expr(terms: tuple[tuple[Monomial, int], ...], const: int) -> Index:
    return from_terms(dict(terms), const)


def interned(cls: type[AnyAtom], args: tuple[object, ...], lo: int, hi: int) -> AnyAtom:
    """Return the atom of a class with these arguments and this inclusive range; equal atoms are the same object."""
    existing = _atoms.get((cls, args, lo, hi))
    if isinstance(existing, cls):
        return existing
    atom = cls()
    atom.args, atom.lo, atom.hi = args, lo, hi
    atom.key = atom.text()
    atom.vars, atom.syms = atom.depends_on()
    _atoms[(cls, args, lo, hi)] = atom
    return atom


def _operand(e: Index) -> str:
    """Return the text of `e` as an operand, in brackets unless it is one atom or a number.

    In Python, // and % bind tighter than sums and as tight as products.
    """
    text = show(e)
    atom = isinstance(e, int) or (len(e.terms) == 1 and not e.const and e.terms[0][1] == 1 and len(e.terms[0][0]) == 1)
    return text if atom else f"({text})"


def from_terms(terms: dict[Monomial, int], const: int) -> Index:
    """Return the sum of products: `terms` gives the coefficient of each."""
    live = [(m, c) for m, c in terms.items() if c]
    if not live:
        return const
    if len(live) > 1:
        live.sort(key=_monomial_order)
    return _in_order(tuple(live), const)


def scaled(e: Expr, factor: int) -> Index:
    """Return a number times an expression."""
    if factor == 0:
        return 0
    # the order of the products is by the size of their coefficients, so that it stays
    return e if factor == 1 else _in_order(tuple([(m, c * factor) for m, c in e.terms]), e.const * factor)


def _in_order(ordered: tuple[tuple[Monomial, int], ...], const: int) -> Expr:
    """Return the expression of products in normal order, at least one."""
    key = (ordered, const)
    existing = _exprs.get(key)
    if existing is not None:
        return existing
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


def from_atom(atom: Atom) -> Index:
    """Return an atom as an index expression."""
    return _in_order((((atom,), 1),), 0)


def var(name: str, size: Index, rank: int = 0) -> Var:
    """Return the loop variable `name`, which runs over `0 <= v < size`; `rank`: the position of its loop."""
    top = bounds(size)[1]
    return interned(Var, (name, size, rank), 0, max(top - 1, 0))


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
    return from_atom(v)


def sym(name: str, lo: int = 0, hi: int = UNBOUNDED) -> Index:
    """Return the symbol of a size that only the call decides; `lo` and `hi` are its inclusive range."""
    return from_atom(interned(Sym, (name,), lo, hi))


def lookup(value: Value, lo: int, hi: int) -> Index:
    """Return an index that is read from data: the integer `value`, which lies in `[lo, hi]`."""
    return from_atom(interned(Lookup, (value,), lo, hi))


def vars_of(e: Index) -> frozenset[Atom]:
    """Return the loop variables of an index expression."""
    return _NO_ATOMS if isinstance(e, int) else e.vars


def syms_of(e: Index) -> frozenset[Atom]:
    """Return the symbolic sizes of an index expression."""
    return _NO_ATOMS if isinstance(e, int) else e.syms


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
