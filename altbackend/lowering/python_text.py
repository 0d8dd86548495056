"""Sympy expressions over sizes and numbers, as tracing records them, as Python text for the host program."""

from __future__ import annotations

from collections.abc import Callable

import sympy

from ..errors import Unsupported

# By the name of the expression's type; `{}` stands for each operand in turn.
_FORMS: dict[str, str] = {
    "FloorDiv": "({} // {})",
    "CleanDiv": "({} // {})",
    "CeilDiv": "(-(-{} // {}))",
    "Mod": "({} % {})",
    "PythonMod": "({} % {})",
    "ModularIndexing": "(({} // {}) % {})",
    "IntTrueDiv": "({} / {})",
    "FloatTrueDiv": "({} / {})",
    "Pow": "({} ** {})",
    "FloatPow": "({} ** {})",
    "PowByNatural": "({} ** {})",
    "LShift": "({} << {})",
    "RShift": "({} >> {})",
    "BitwiseFn_bitwise_and": "({} & {})",
    "BitwiseFn_bitwise_or": "({} | {})",
    "BitwiseFn_bitwise_xor": "({} ^ {})",
    "ToFloat": "float({})",
    "TruncToInt": "math.trunc({})",
    "TruncToFloat": "float(math.trunc({}))",
    "FloorToInt": "math.floor({})",
    "CeilToInt": "math.ceil({})",
    "floor": "math.floor({})",
    "ceiling": "math.ceil({})",
    "RoundToInt": "round({})",
    "RoundDecimal": "round({}, {})",
    "Abs": "abs({})",
    "Where": "({1} if {0} else {2})",
    "Identity": "{}",
    "Not": "(not {})",
    "Equality": "({} == {})",
    "Unequality": "({} != {})",
    "StrictLessThan": "({} < {})",
    "LessThan": "({} <= {})",
    "StrictGreaterThan": "({} > {})",
    "GreaterThan": "({} >= {})",
}
_SEPARATORS = {"Add": " + ", "Mul": " * ", "And": " and ", "Or": " or "}
_UNARY = "OpaqueUnaryFn_"  # a function of the module `math`


def python_text(e: sympy.Basic) -> str:
    """Return `e` as a Python expression over its symbols. Raises Unsupported for a form without a spelling."""
    if (plain := _leaf(e)) is not None:
        return plain
    name, args = type(e).__name__, [python_text(a) for a in e.args]
    if name in _FORMS:
        return _FORMS[name].format(*args)
    if name in _SEPARATORS:
        return f"({_SEPARATORS[name].join(args)})"
    if name in ("Max", "Min"):
        return f"{name.lower()}({', '.join(args)})"
    if name.startswith(_UNARY):
        return f"math.{name.removeprefix(_UNARY)}({args[0]})"
    raise Unsupported(f"expression {e}", f"{name} has no spelling in Python")


def _leaf(e: sympy.Basic) -> str | None:
    """Return the text of a symbol or a number, in brackets if it has a sign, or None for other expressions."""
    if isinstance(e, sympy.Symbol):
        return str(e)
    if e in (sympy.true, sympy.false):
        return str(bool(e))
    if isinstance(e, sympy.Number):
        return _number(e)
    if type(e).__name__ in ("IntInfinity", "NegativeIntInfinity"):
        return "math.inf" if type(e).__name__ == "IntInfinity" else "(-math.inf)"
    return None


def _number(e: sympy.Number) -> str:
    if e in (sympy.oo, -sympy.oo):
        return "math.inf" if e == sympy.oo else "(-math.inf)"
    if e is sympy.nan:
        return "math.nan"
    spelled: Callable[[], str] = (lambda: str(int(e))) if e.is_Integer else (lambda: repr(float(e)))
    if isinstance(e, sympy.Rational) and not e.is_Integer:
        return f"({int(e.p)} / {int(e.q)})"
    text = spelled()
    return f"({text})" if text.startswith("-") else text
