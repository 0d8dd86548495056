"""Arithmetic on numbers of the host program: index expressions if the algebra has the operator, else Python text.

The text of a node follows its traced operator, as eager computes it, because an expression that tracing has simplified
may round differently. Only a value without an FX node is spelled from its sympy expression.
"""

from __future__ import annotations

import builtins
import math
import operator

import sympy
import torch

from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.expr import Index
from ..ir.loops import HostNumber
from ..ir.value import Value
from . import sizes as sz
from .context import Ctx
from .python_text import python_text

_TEXT: dict[object, str] = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.truediv: "({} / {})",
    operator.floordiv: "({} // {})",
    operator.mod: "({} % {})",
    operator.pow: "({} ** {})",
    builtins.pow: "({} ** {})",
    operator.lshift: "({} << {})",
    operator.rshift: "({} >> {})",
    operator.neg: "(-{})",
    operator.pos: "(+{})",
    operator.abs: "abs({})",
    builtins.abs: "abs({})",
    operator.invert: "(~{})",
    operator.lt: "({} < {})",
    operator.le: "({} <= {})",
    operator.gt: "({} > {})",
    operator.ge: "({} >= {})",
    operator.eq: "({} == {})",
    operator.ne: "({} != {})",
    operator.and_: "({} & {})",
    operator.or_: "({} | {})",
    operator.xor: "({} ^ {})",
    operator.not_: "(not {})",
    torch.sym_ite: "({1} if {0} else {2})",
    torch.sym_not: "(not {})",
    torch.sym_max: "max({}, {})",
    torch.sym_min: "min({}, {})",
    torch.sym_float: "float({})",
    torch.sym_int: "int({})",
}
_ANY_NUMBER = {torch.sym_sum: "sum({})", builtins.round: "round({})", builtins.max: "max({})", builtins.min: "min({})"}
_SYM = "_sym_"  # torch's names for functions of the module `math`


def integer(ctx: Ctx, node: torch.fx.Node, args: tuple[object, ...]) -> Index:
    """Return the value of a node of integer arithmetic. Raises Unsupported for an operator that has no spelling."""
    val = node.meta["val"]
    try:
        return sz.to_index(val, ctx.shape_memo)
    except Unsupported:
        form = _form(node, args)
    if form is None:
        return ctx.index(val)
    e = val.node.expr
    name = ctx.number(_filled(ctx, node, form, args))
    ctx.shape_memo[e] = ex.sym(name, *sz.bounds(e, val.node.shape_env))
    return ctx.shape_memo[e]


def text(ctx: Ctx, node: torch.fx.Node, args: tuple[object, ...]) -> HostNumber:
    """Return the float or bool of a node as Python text. Raises Unsupported for an operator that has no spelling."""
    val = node.meta["val"]
    form = _form(node, args)
    if form is not None:
        code = _filled(ctx, node, form, args)
        return HostNumber(f"float({code})" if isinstance(val, torch.SymFloat) and node.target in _KEEP_TYPE else code)
    e = val.node.expr
    missing = {str(s) for s in e.free_symbols} - ctx.defined
    if missing:
        raise Unsupported(node, f"{type(val).__name__} arithmetic on {', '.join(sorted(missing))}")
    return HostNumber(python_text(e))


# Of an integer and a float, torch first converts both to float; Python returns one of them.
_KEEP_TYPE = {torch.sym_max, torch.sym_min, torch.sym_ite, builtins.max, builtins.min}


def real(ctx: Ctx, node: torch.fx.Node, args: tuple[object, ...]) -> Value:
    """Return the float of a node as a scalar for kernels. Raises Unsupported for an operator that has no spelling."""
    return ctx.real(text(ctx, node, args))


def constant(val: torch.SymBool | torch.SymFloat) -> bool | float | None:
    """Return the value of a symbolic bool or float that is a constant, else None."""
    e = val.node.expr
    if e in (sympy.true, sympy.false):
        return bool(e)
    return float(e) if isinstance(val, torch.SymFloat) and e.is_number else None


def _form(node: torch.fx.Node, args: tuple[object, ...]) -> str | None:
    """Return the Python spelling of a node's operator, with `{}` for each argument, or None if there is none."""
    target: object = node.target
    name = getattr(target, "__name__", "")
    if target in _TEXT:
        return _TEXT[target]
    if target is builtins.round and args[1:] in ((), (None,)):
        return "round({})"
    if target in _ANY_NUMBER:
        return _ANY_NUMBER[target].format(", ".join("{}" for _ in args))
    if getattr(target, "__module__", "") == "math" or (name.startswith(_SYM) and hasattr(torch, name)):
        function = name.removeprefix(_SYM)
        return f"math.{function}({', '.join('{}' for _ in args)})" if hasattr(math, function) else None
    return None


def _filled(ctx: Ctx, node: torch.fx.Node, form: str, args: tuple[object, ...]) -> str:
    holes = len(args) if "{1}" in form else form.count("{}")  # the form has no place for trailing optional arguments
    return form.format(*(operand(ctx, node, a) for a in args[:holes]))


def operand(ctx: Ctx, node: torch.fx.Node, a: object) -> str:
    """Return an operand of arithmetic as Python text. Raises Unsupported for an operand that is not a number."""
    if isinstance(a, HostNumber):
        return str(a)
    if isinstance(a, ex.Expr):
        return f"({ex.show(a)})"
    if isinstance(a, float) and not math.isfinite(a):
        return f"float('{a}')"
    if isinstance(a, (bool, int, float)):
        return repr(a) if a >= 0 else f"({a!r})"
    if isinstance(a, Value) and a in ctx.numbers:
        return str(ctx.numbers[a])
    if isinstance(a, (tuple, list)):
        return "(" + "".join(f"{operand(ctx, node, x)}, " for x in a) + ")"
    raise Unsupported(node, f"arithmetic on {type(a).__name__}")
