"""SymInts of the traced graph as index expressions."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.expr import Index

# Returns a symbol for an expression that the index algebra cannot express, or raises Unsupported.
SymbolFor = Callable[[sympy.Expr, "ShapeEnv | None"], Index]


def refuse(e: sympy.Expr, shape_env: ShapeEnv | None) -> Index:
    """Raise Unsupported: the index algebra has no node for `e`."""
    raise Unsupported(f"size expression {e}", f"the index algebra has no node for {type(e).__name__}")


def to_index(x: object, memo: dict[sympy.Expr, Index], symbol_for: SymbolFor = refuse) -> Index:
    """Return an int or SymInt as an `Index`.

    `symbol_for` returns a symbol for an expression that the index algebra cannot express. Raises Unsupported if it does
    not, and for a value that is not an integer.
    """
    if isinstance(x, (int, ex.Expr)):
        return int(x) if isinstance(x, bool) else x
    if isinstance(x, torch.SymInt):
        if (number := x.node.maybe_as_int()) is not None:
            return int(number)
        e = x.node.expr
        converted = memo.get(e)
        if converted is None:
            converted = memo[e] = _convert(e, x.node.shape_env, memo, symbol_for)
        return converted
    raise Unsupported(f"size {x!r}", f"a {type(x).__name__} is not an integer size")


def of_expression(e: sympy.Expr, shape_env: ShapeEnv | None, memo: dict[sympy.Expr, Index]) -> Index:
    """Return an integer expression as an `Index`. Raises Unsupported if the index algebra cannot express it."""
    return _convert(e, shape_env, memo, refuse)


def unbacked_symbol(x: object) -> str:
    """Return the name of a size that is a single unbacked symbol, one that data decides, or ''."""
    e = x.node.expr if isinstance(x, torch.SymInt) else None
    return str(e) if e is not None and e.is_Symbol and symbol_is_type(e, SymT.UNBACKED_INT) else ""


def _convert(e: sympy.Expr, shape_env: ShapeEnv | None, memo: dict[sympy.Expr, Index], symbol_for: SymbolFor) -> Index:
    if e in memo:
        return memo[e]
    if e.is_Integer:
        return int(e)
    if e.is_Symbol:
        if not e.is_integer:
            raise Unsupported(f"size {e}", "a float is no size")
        memo[e] = ex.sym(str(e), *bounds(e, shape_env))
        return memo[e]
    name = type(e).__name__
    if name in ("TruncToInt", "FloorToInt") and (scaled := _scaled(e, shape_env, memo, symbol_for)) is not None:
        return scaled
    power = e.is_Pow and e.args[1].is_Integer and e.args[1] > 0
    if not (e.is_Add or e.is_Mul or power or name in _DIVISIONS or name in ("Max", "Min")):
        symbol = memo[e] = symbol_for(e, shape_env)
        return symbol
    args = [_convert(a, shape_env, memo, symbol_for) for a in (e.args[:1] if power else e.args)]
    if e.is_Add:
        return ex.add(*args)
    if e.is_Mul:
        return ex.mul(*args)
    if power:
        return ex.mul(*args * int(e.args[1]))
    if name in _DIVISIONS:
        if ex.bounds(args[1])[0] < 1 and (name not in ("FloorDiv", "CleanDiv") or ex.exact_div(*args) is None):
            symbol = memo[e] = symbol_for(e, shape_env)  # the algebra requires a divisor > 0
            return symbol
        return ex.floordiv(*args) if name in ("FloorDiv", "CleanDiv") else ex.mod(*args)
    out = args[0]
    for a in args[1:]:
        out = ex.maximum(out, a) if name == "Max" else ex.minimum(out, a)
    return out


_DIVISIONS = ("FloorDiv", "CleanDiv", "Mod", "PythonMod")
MOST_SCALE = 1 << 20


def _scaled(
    e: sympy.Expr, shape_env: ShapeEnv | None, memo: dict[sympy.Expr, Index], symbol_for: SymbolFor
) -> Index | None:
    """Return floor(p/q * n) of a size n as n*p // q, or None if the float product may be inexact.

    For p and q up to MOST_SCALE the float product is exact.
    """
    factors = sympy.Mul.make_args(e.args[0])
    numbers = [f for f in factors if f.is_number]
    sizes = [f for f in factors if not f.is_number]
    if len(sizes) == 1 and type(sizes[0]).__name__ == "ToFloat" and all(f.is_Float or f.is_Integer for f in numbers):
        p, q = float(sympy.Mul(*numbers)).as_integer_ratio()
        n = _convert(sizes[0].args[0], shape_env, memo, symbol_for)
        if 0 < p <= MOST_SCALE and q <= MOST_SCALE and ex.known_nonnegative(n):
            return ex.floordiv(ex.mul(p, n), q)
    return None


def bounds(e: sympy.Expr, shape_env: ShapeEnv | None) -> tuple[int, int]:
    """Return the inclusive range that tracing has proved for an integer expression, within +-UNBOUNDED."""
    try:
        bound = shape_env.bound_sympy(e) if shape_env is not None else None
    except RecursionError:  # torch recurses without end for a symbol to the power of a symbol
        bound = None
    if bound is None:
        return -ex.UNBOUNDED, ex.UNBOUNDED
    lo = int(bound.lower) if bound.lower.is_Integer else -ex.UNBOUNDED
    hi = int(bound.upper) if bound.upper.is_Integer else ex.UNBOUNDED
    return max(lo, -ex.UNBOUNDED), min(hi, ex.UNBOUNDED)
