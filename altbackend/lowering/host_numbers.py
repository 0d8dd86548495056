"""Numbers that only data decides: sizes where the index algebra has a node, else Python text of the host program."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.expr import Index
from ..ir.loops import HostNumber
from ..ir.value import Value
from .context import Ctx

_TEXT: dict[Any, str] = {
    operator.add: "({} + {})",
    operator.sub: "({} - {})",
    operator.mul: "({} * {})",
    operator.truediv: "({} / {})",
    operator.floordiv: "({} // {})",
    operator.mod: "({} % {})",
    operator.pow: "({} ** {})",
    operator.neg: "(-{})",
    operator.lt: "({} < {})",
    operator.le: "({} <= {})",
    operator.gt: "({} > {})",
    operator.ge: "({} >= {})",
    operator.eq: "({} == {})",
    operator.ne: "({} != {})",
    operator.and_: "({} & {})",
    operator.or_: "({} | {})",
    torch.sym_ite: "({1} if {0} else {2})",
    torch.sym_not: "(not {})",
    torch.sym_max: "max({}, {})",
    torch.sym_min: "min({}, {})",
    torch.sym_float: "float({})",
    torch.sym_int: "int({})",
}


def integer(ctx: Ctx, node: torch.fx.Node, args: tuple[Any, ...]) -> Index | HostNumber:
    """The value of a node of size arithmetic. Raises Unsupported if it has no form here."""
    try:
        return ctx.index(node.meta["val"])
    except Unsupported:
        if node.target not in _TEXT:
            raise
        return text(ctx, node, args)


def text(ctx: Ctx, node: torch.fx.Node, args: tuple[Any, ...]) -> HostNumber:
    """A node of arithmetic on numbers, as Python. Raises Unsupported for an operator that is not in the table."""
    form = _TEXT.get(node.target)
    if form is None:
        raise Unsupported(node, f"{type(node.meta['val']).__name__} arithmetic")
    return HostNumber(form.format(*(_operand(ctx, node, a) for a in args)))


def _operand(ctx: Ctx, node: torch.fx.Node, a: Any) -> str:
    if isinstance(a, HostNumber):
        return str(a)
    if isinstance(a, ex.Expr):
        return f"({ex.show(a)})"
    if isinstance(a, (bool, int, float)):
        return repr(a)
    if isinstance(a, Value) and a in ctx.numbers:
        return str(ctx.numbers[a])
    raise Unsupported(node, f"arithmetic on {type(a).__name__}")
