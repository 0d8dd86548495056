"""Translate the numbers of a host program, which the plan holds as Python text, into C++ (`aot/numbers.h`)."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Literal

from ...errors import Unsupported
from ...ir.host_functions import FUNCTIONS

Kind = Literal["int", "float", "bool", "tensor"]
Typed = tuple[str, Kind]  # C++ text and its type
Types = Mapping[str, Kind]

CTYPES: Mapping[Kind, str] = {"int": "int64_t", "float": "double", "bool": "bool"}
_COMPARISONS: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_BITS: Mapping[type[ast.operator], str] = {
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_SUMS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
_DIVISIONS: Mapping[type[ast.operator], str] = {ast.FloorDiv: "floordiv", ast.Mod: "mod"}
_TO_INTEGER = {"floor": "std::floor", "ceil": "std::ceil", "trunc": "std::trunc"}
_METHODS: Mapping[str, str] = {"size": "size_of", "stride": "stride_of", "storage_offset": "storage_offset_of"}
MOST_POWER = 16


def translate(text: str, types: Types) -> Typed:
    """Return Python text as C++ with its type. `types`: those of the names. Raise Unsupported with the text."""
    try:
        return _Translator(types, text).of(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, KeyError) as cause:
        raise Unsupported(None, f"the host number `{text}` has no C++ form: {cause}") from cause


def arithmetic(kind: Kind) -> Kind:
    """Return the type of a sum with an operand of a type; Python adds bools as integers."""
    return "float" if kind == "float" else "int"


class _Translator:
    """Translates one expression."""

    def __init__(self, types: Types, text: str) -> None:
        self.types, self.text = types, text

    def of(self, n: ast.expr) -> Typed:
        """Return the C++ text and the type of a node."""
        rules: dict[type[ast.expr], Callable[..., Typed]] = {
            ast.Constant: self.constant,
            ast.Name: self.name,
            ast.BinOp: self.binary,
            ast.UnaryOp: self.unary,
            ast.BoolOp: self.logical,
            ast.Compare: self.compare,
            ast.IfExp: self.choose,
            ast.Call: self.call,
        }
        rule = rules.get(type(n), self.refuse)
        return rule(n)

    def refuse(self, n: ast.expr) -> Typed:
        """Raise Unsupported for a node."""
        raise Unsupported(None, f"the host number `{self.text}` has no C++ form: {ast.unparse(n)}")

    def constant(self, n: ast.Constant) -> Typed:
        """Return a number of the text."""
        if isinstance(n.value, bool):
            return ("true" if n.value else "false"), "bool"
        if isinstance(n.value, int) and -(2**63) < n.value < 2**63:
            return f"int64_t({n.value}LL)", "int"
        return (real(n.value), "float") if isinstance(n.value, float) else self.refuse(n)

    def name(self, n: ast.Name) -> Typed:
        """Return a number of the program."""
        return n.id, self.types[n.id]

    def binary(self, n: ast.BinOp) -> Typed:
        """Return an operation on two numbers, with Python's rules for division."""
        (a, ta), (b, tb), op = self.of(n.left), self.of(n.right), type(n.op)
        common: Kind = "float" if "float" in (ta, tb) else "int"
        if op in _SUMS:
            cast = CTYPES[common]
            return f"({cast}({a}) {_SUMS[op]} {cast}({b}))", common
        if op in _DIVISIONS:
            return f"py::{_DIVISIONS[op]}({a}, {b})", common
        if op is ast.Div:
            return f"py::truediv({a}, {b})", "float"
        if op in _BITS and common == "int":
            kind: Kind = "bool" if ta == tb == "bool" and op not in (ast.LShift, ast.RShift) else "int"
            return f"{CTYPES[kind]}({CTYPES[kind]}({a}) {_BITS[op]} {CTYPES[kind]}({b}))", kind
        if op is ast.Pow:
            return self.power(n, a, ta, b, common)
        return self.refuse(n)

    def power(self, n: ast.BinOp, a: str, base: Kind, b: str, common: Kind) -> Typed:
        """Return a power: of an integer only to a small constant, since Python's integers have no limit."""
        if common == "float":
            return f"std::pow(double({a}), double({b}))", "float"
        exponent = n.right.value if isinstance(n.right, ast.Constant) else None
        if base == "int" and isinstance(exponent, int) and 0 <= exponent <= MOST_POWER:
            return f"py::power({a}, {exponent})", "int"
        return self.refuse(n)

    def unary(self, n: ast.UnaryOp) -> Typed:
        """Return an operation on one number."""
        a, kind = self.of(n.operand)
        match n.op:
            case ast.Not():
                return f"!({a})", "bool"
            case ast.USub():
                return f"(-{CTYPES[arithmetic(kind)]}({a}))", arithmetic(kind)
            case ast.UAdd():
                return f"{CTYPES[arithmetic(kind)]}({a})", arithmetic(kind)
            case _:
                return (f"(~int64_t({a}))", "int") if kind != "float" else self.refuse(n)

    def logical(self, n: ast.BoolOp) -> Typed:
        """Return `and` or `or` of bools; of other numbers Python returns an operand."""
        parts = [self.of(v) for v in n.values]
        if any(kind != "bool" for _, kind in parts):
            return self.refuse(n)
        return "(" + (" && " if isinstance(n.op, ast.And) else " || ").join(t for t, _ in parts) + ")", "bool"

    def compare(self, n: ast.Compare) -> Typed:
        """Return a chain of comparisons."""
        operands = [self.of(x)[0] for x in (n.left, *n.comparators)]
        if any(type(op) not in _COMPARISONS for op in n.ops):
            return self.refuse(n)
        pairs = zip(operands, n.ops, operands[1:], strict=False)
        return "(" + " && ".join(f"({a} {_COMPARISONS[type(op)]} {b})" for a, op, b in pairs) + ")", "bool"

    def choose(self, n: ast.IfExp) -> Typed:
        """Return `a if condition else b` of numbers of one type."""
        (c, _), (a, ta), (b, tb) = self.of(n.test), self.of(n.body), self.of(n.orelse)
        return (f"({c} ? {a} : {b})", ta) if ta == tb else self.refuse(n)

    def call(self, n: ast.Call) -> Typed:
        """Return a call of a function of Python, of `math` or of this package, or of a tensor's method."""
        if n.keywords:
            return self.refuse(n)
        if isinstance(n.func, ast.Attribute):
            owner = n.func.value
            if isinstance(owner, ast.Name) and owner.id == "math":
                return self.of_math(n, n.func.attr)
            return self.method(n, n.func)
        return self.function(n, n.func.id) if isinstance(n.func, ast.Name) else self.refuse(n)

    def method(self, n: ast.Call, f: ast.Attribute) -> Typed:
        """Return a size, a stride or the offset of a result of a library call."""
        if not isinstance(f.value, ast.Name) or f.attr not in _METHODS:
            return self.refuse(n)
        arguments = "".join(f", {self.of(a)[0]}" for a in n.args)
        return f"{_METHODS[f.attr]}({tensor(f.value.id)}{arguments})", "int"

    def of_math(self, n: ast.Call, name: str) -> Typed:
        """Return a call of a function of `math`; floor, ceil and trunc give integers."""
        args = [self.of(a)[0] for a in n.args]
        if name in _TO_INTEGER and len(args) == 1:
            return f"py::to_int({_TO_INTEGER[name]}(double({args[0]})))", "int"
        functions = ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh")
        if name in (*functions, "tanh", "pow", "atan2", "fabs", "fmod", "copysign"):
            return f"std::{name}({', '.join(f'double({a})' for a in args)})", "float"
        return self.refuse(n)

    def function(self, n: ast.Call, name: str) -> Typed:
        """Return a call of a built-in function or of `ir/host_functions.py`."""
        if name == "float" and isinstance(n.args[0], ast.Constant) and isinstance(n.args[0].value, str):
            return real(float(n.args[0].value)), "float"
        given = n.args
        if name in ("sum", "max", "min") and len(given) == 1 and isinstance(given[0], (ast.Tuple, ast.List)):
            given = given[0].elts
        args = [self.of(a) for a in given]
        if name in FUNCTIONS:
            return f"py::{name}({', '.join(t for t, _ in args)})", "int"
        match name, args:
            case "float", [(a, _)]:
                return f"double({a})", "float"
            case "bool", [(a, _)]:
                return f"(({a}) != 0)", "bool"
            case "int", [(a, _)]:
                return f"py::to_int({a})", "int"
            case "abs", [(a, kind)]:
                return (f"std::fabs({a})", "float") if kind == "float" else (f"std::llabs({a})", "int")
            case "round", [(a, kind)]:
                return (f"py::to_int(py::round({a}))", "int") if kind == "float" else (a, arithmetic(kind))
            case (("max" | "min" | "sum"), [first, *rest]):
                return self.fold(name, first, rest)
            case _:
                return self.refuse(n)

    def fold(self, name: str, first: Typed, rest: list[Typed]) -> Typed:
        """Return a sum, maximum or minimum of several numbers."""
        out, kind = first[0], arithmetic(first[1])
        for text, other in rest:
            kind = "float" if "float" in (kind, other) else "int"
            combined = {"max": "py::maximum({0}, {1})", "min": "py::minimum({0}, {1})"}
            out = combined[name].format(out, text) if name in combined else f"({out} + {CTYPES[kind]}({text}))"
        return out, kind


def real(x: float) -> str:
    """Return a float that the compiler reads back exactly."""
    if math.isnan(x):
        return "NAN"
    if math.isinf(x):
        return "HUGE_VAL" if x > 0 else "(-HUGE_VAL)"
    return x.hex() if x >= 0 and math.copysign(1.0, x) > 0 else f"({x.hex()})"


def tensor(buffer: str) -> str:
    """Return the C++ expression of the handle of a buffer."""
    return f"t_{buffer}.get()"
