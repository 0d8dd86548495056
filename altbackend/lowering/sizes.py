"""SymInts of the traced graph as index expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.expr import Index

# What stands for an expression without a node in the index algebra. Raises Unsupported where nothing does.
Other = Callable[[sympy.Expr, Any], Index]


def refuse(e: sympy.Expr, shape_env: Any) -> Index:
    """Raise Unsupported: the index algebra has no node for `e`."""
    raise Unsupported(f"size expression {e}", f"the index algebra has no node for {type(e).__name__}")


def to_index(x: Any, memo: dict[sympy.Expr, Index], other: Other = refuse) -> Index:
    """An int, SymInt or sympy integer expression as an `Index`.

    Raises Unsupported for a form that neither the index algebra has a node for nor `other` has a symbol.
    """
    if isinstance(x, (int, ex.Expr)):
        return int(x) if isinstance(x, bool) else x
    if isinstance(x, torch.SymInt):
        if (known := x.node.maybe_as_int()) is not None:
            return int(known)
        e = x.node.expr
        found = memo.get(e)
        if found is None:
            found = memo[e] = _convert(e, x.node.shape_env, memo, other)
        return found
    raise Unsupported(f"size {x!r}", f"a {type(x).__name__} is not an integer size")


def late_symbol(x: Any) -> str:
    """The name of a size that only data decides (an unbacked symbol, and nothing but it), or ''."""
    e = x.node.expr if isinstance(x, torch.SymInt) else None
    return str(e) if e is not None and e.is_Symbol and symbol_is_type(e, SymT.UNBACKED_INT) else ""


def _convert(e: sympy.Expr, shape_env: Any, memo: dict[sympy.Expr, Index], other: Other) -> Index:
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
    if name in ("TruncToInt", "FloorToInt") and (scaled := _scaled(e, shape_env, memo, other)) is not None:
        return scaled
    power = e.is_Pow and e.args[1].is_Integer and e.args[1] > 0
    if not (e.is_Add or e.is_Mul or power or name in _DIVISIONS or name in ("Max", "Min")):
        found = memo[e] = other(e, shape_env)
        return found
    args = [_convert(a, shape_env, memo, other) for a in (e.args[:1] if power else e.args)]
    if e.is_Add:
        return ex.add(*args)
    if e.is_Mul:
        return ex.mul(*args)
    if power:
        return ex.mul(*args * int(e.args[1]))
    if name in _DIVISIONS:
        if ex.bounds(args[1])[0] < 1 and (name not in ("FloorDiv", "CleanDiv") or ex.exact_div(*args) is None):
            found = memo[e] = other(e, shape_env)  # zero raises, and below zero other rules hold
            return found
        return ex.floordiv(*args) if name in ("FloorDiv", "CleanDiv") else ex.mod(*args)
    out = args[0]
    for a in args[1:]:
        out = ex.maximum(out, a) if name == "Max" else ex.minimum(out, a)
    return out


_DIVISIONS = ("FloorDiv", "CleanDiv", "Mod", "PythonMod")
MOST_SCALE = 1 << 20


def _scaled(e: sympy.Expr, shape_env: Any, memo: dict[sympy.Expr, Index], other: Other) -> Index | None:
    """floor(p/q * n) of a size n as n*p // q: for short fractions the float product is exact. None for the rest."""
    factors = sympy.Mul.make_args(e.args[0])
    numbers = [f for f in factors if f.is_number]
    sizes = [f for f in factors if not f.is_number]
    if len(sizes) == 1 and type(sizes[0]).__name__ == "ToFloat" and all(f.is_Float or f.is_Integer for f in numbers):
        p, q = float(sympy.Mul(*numbers)).as_integer_ratio()
        n = _convert(sizes[0].args[0], shape_env, memo, other)
        if 0 < p <= MOST_SCALE and q <= MOST_SCALE and ex.known_nonnegative(n):
            return ex.floordiv(ex.mul(p, n), q)
    return None


def bounds(e: sympy.Expr, shape_env: Any) -> tuple[int, int]:
    """The least and the greatest value that tracing knows of an integer expression, within +-UNBOUNDED."""
    try:
        bound = shape_env.bound_sympy(e) if shape_env is not None else None
    except RecursionError:  # of torch, for a power of two symbols
        bound = None
    if bound is None:
        return -ex.UNBOUNDED, ex.UNBOUNDED
    lo = int(bound.lower) if bound.lower.is_Integer else -ex.UNBOUNDED
    hi = int(bound.upper) if bound.upper.is_Integer else ex.UNBOUNDED
    return max(lo, -ex.UNBOUNDED), min(hi, ex.UNBOUNDED)
