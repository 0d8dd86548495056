"""SymInts of the traced graph as index expressions."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.expr import Index


def to_index(x: Any, memo: dict[sympy.Expr, Index]) -> Index:
    """An int, SymInt or sympy integer expression as an `Index`.

    Raises Unsupported for a form that the index algebra has no node for.
    """
    if isinstance(x, (int, ex.Expr)):
        return int(x) if isinstance(x, bool) else x
    if isinstance(x, torch.SymInt):
        if (known := x.node.maybe_as_int()) is not None:
            return int(known)
        shape_env = x.node.shape_env
        e = x.node.expr
        found = memo.get(e)
        if found is None:
            found = memo[e] = _convert(e, shape_env, memo)
        return found
    raise Unsupported(f"size {x!r}", f"a {type(x).__name__} is not an integer size")


def late_symbol(x: Any) -> str:
    """The name of a size that only data decides (an unbacked symbol, and nothing but it), or ''."""
    e = x.node.expr if isinstance(x, torch.SymInt) else None
    return str(e) if e is not None and e.is_Symbol and symbol_is_type(e, SymT.UNBACKED_INT) else ""


def _convert(e: sympy.Expr, shape_env: Any, memo: dict[sympy.Expr, Index]) -> Index:
    if e in memo:
        return memo[e]
    if e.is_Integer:
        return int(e)
    if e.is_Symbol:
        if symbol_is_type(e, SymT.UNBACKED_FLOAT):
            raise Unsupported(f"size {e}", "it is known only once other results of the graph are")
        lo, hi = _range(e, shape_env)
        memo[e] = ex.sym(str(e), lo, hi)
        return memo[e]
    if type(e).__name__ in ("TruncToInt", "FloorToInt"):
        return _scaled(e, shape_env, memo)
    args = [_convert(a, shape_env, memo) for a in e.args] if not e.is_Pow else []
    name = type(e).__name__
    if e.is_Add:
        return ex.add(*args)
    if e.is_Mul:
        return ex.mul(*args)
    if e.is_Pow and e.args[1].is_Integer and e.args[1] > 0:
        return ex.mul(*[_convert(e.args[0], shape_env, memo)] * int(e.args[1]))
    if name in ("FloorDiv", "CleanDiv"):
        return ex.floordiv(args[0], args[1])
    if name in ("Mod", "PythonMod"):
        return ex.mod(args[0], args[1])
    if name in ("Max", "Min"):
        out = args[0]
        for a in args[1:]:
            out = ex.maximum(out, a) if name == "Max" else ex.minimum(out, a)
        return out
    raise Unsupported(f"size expression {e}", f"the index algebra has no node for {name}")


MOST_SCALE = 1 << 20


def _scaled(e: sympy.Expr, shape_env: Any, memo: dict[sympy.Expr, Index]) -> Index:
    """floor(p/q * n) of a size n as n*p // q: for short fractions the float product is exact."""
    factors = sympy.Mul.make_args(e.args[0])
    numbers = [f for f in factors if f.is_number]
    sizes = [f for f in factors if not f.is_number]
    if len(sizes) == 1 and type(sizes[0]).__name__ == "ToFloat" and all(f.is_Float or f.is_Integer for f in numbers):
        p, q = float(sympy.Mul(*numbers)).as_integer_ratio()
        n = _convert(sizes[0].args[0], shape_env, memo)
        if 0 < p <= MOST_SCALE and q <= MOST_SCALE and ex.known_nonnegative(n):
            return ex.floordiv(ex.mul(p, n), q)
    raise Unsupported(f"size expression {e}", "only a size times a short binary fraction is rounded to a size")


def _range(s: sympy.Symbol, shape_env: Any) -> tuple[int, int]:
    bound = shape_env.bound_sympy(s) if shape_env is not None else None
    if bound is None:
        return 0, ex.UNBOUNDED
    lo = int(bound.lower) if bound.lower.is_Integer else 0
    hi = int(bound.upper) if bound.upper.is_Integer else ex.UNBOUNDED
    return max(lo, 0), min(hi, ex.UNBOUNDED)
