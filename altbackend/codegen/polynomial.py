"""Spell an index, which is a polynomial of atoms, in the syntax that C++ and Triton share."""

from __future__ import annotations

from collections.abc import Callable

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir.expr import Atom, Index
from ..ir.value import Value


@dataclass(frozen=True)
class Spelling:
    """The parts in which the two languages differ.

    `scalar` spells a value that an index is read from. `quotient` and `remainder` are the forms of a division, for
    dividends that are not negative and for others. `extremum` is the form of a maximum or minimum, `{name}` its name.
    `coefficient_first`: `2 * x` instead of `x * 2`.
    """

    scalar: Callable[[Value], str]
    quotient: tuple[str, str]
    remainder: tuple[str, str]
    extremum: str
    number: Callable[[int], str] = str
    coefficient_first: bool = True

    def index(self, e: Index) -> str:
        """Return a sum of products as an expression: `2 * x * y - z + 3`."""
        if isinstance(e, int):
            return self.number(e)
        parts = [f"{_sign(c)} {self._product([self.atom(a) for a in atoms], abs(c))}" for atoms, c in e.terms]
        if e.const:
            parts.append(f"{_sign(e.const)} {self.number(abs(e.const))}")
        text = " ".join(parts)
        return text[2:] if text.startswith("+ ") else "-" + text[2:]

    def operand(self, e: Index) -> str:
        """Return the index in parentheses unless it is one name or number."""
        text = self.index(e)
        return text if text.isalnum() else f"({text})"

    def atom(self, a: Atom) -> str:
        """Return an atom of an index as an expression."""
        if isinstance(a, ex.Lookup):
            return self.scalar(a.value)
        if not a.operands:
            return a.key
        x, y = (self.operand(b) for b in a.operands)
        negative = not ex.known_nonnegative(a.operands[0])
        match a:
            case ex.FloorDiv():
                return self.quotient[negative].format(x, y)
            case ex.Mod():
                return self.remainder[negative].format(x, y)
            case ex.Extremum():
                return self.extremum.format(x, y, name=a.name)
        raise AssertionError(a)

    def _product(self, factors: list[str], coefficient: int) -> str:
        if coefficient != 1:
            factors.insert(0 if self.coefficient_first else len(factors), self.number(coefficient))
        return " * ".join(factors)


def _sign(number: int) -> str:
    return "-" if number < 0 else "+"
