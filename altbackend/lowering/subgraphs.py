"""Subgraphs that control-flow operators call: their names, and the conditions for compiling one by itself."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from ..aten.mutates import writes
from ..aten.view import aliased_arguments, may_alias
from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.loops import Constant, Extern, Program, View, symbols_of, unbacked_symbols
from ..runtime import control_flow
from .context import Ctx

# Operators for which the index algebra is right for negative integers too. It takes operands of others for sizes.
_ANY_INTEGER = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.neg,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
}
_ANY_NUMBER = {
    torch.ops.aten.add,
    torch.ops.aten.sub,
    torch.ops.aten.mul,
    torch.ops.aten.div,
}  # a tensor and the integer


def called(p: Program, constants: dict[str, object]) -> dict[str, GraphModule]:
    """Return the graphs that a program calls through `runtime.control_flow`, by the names of the constants."""
    calls = [n for n in p.nodes if isinstance(n, Extern) and n.target in control_flow.FUNCTIONS.values()]
    names = dict.fromkeys(str(a) for n in calls for a in n.args if isinstance(a, Constant))
    return {name: gm for name in names if isinstance(gm := constants[name], GraphModule)}


def require_functional(gm: GraphModule) -> None:
    """Raise Unsupported for a subgraph that writes, or that has an integer input which is unsafe to use as a size."""
    for n in gm.graph.nodes:
        if writes(n):
            raise Unsupported(n, "a subgraph that writes")
        if n.op == "placeholder" and _below_zero(n) and (reader := _unsafe_reader(n)):
            raise Unsupported(n, f"an integer that may be negative, read by {reader}")


def require_closed(p: Program) -> None:
    """Raise Unsupported unless all symbols of a subgraph's program come from its operands."""
    defined = set(p.inputs) | unbacked_symbols(p)
    defined |= {ex.show(n) for b in p.inputs if b in p.buffers for n in p.buffers[b].sizes}
    used = {s for node in p.nodes for s in symbols_of(p, node)}
    for o in p.outputs:
        parts = (*o.sizes, *o.strides, o.offset) if isinstance(o, View) else (o,)
        used |= {a.key for x in parts if isinstance(x, ex.Expr) for a in ex.syms_of(x)}
    for b in p.inputs:
        if b in p.buffers:
            used |= {a.key for s in p.buffers[b].strides for a in ex.syms_of(s)}
    if used - defined:
        raise Unsupported("a subgraph", f"no operand gives {', '.join(sorted(used - defined))}")


def _below_zero(n: Node) -> bool:
    val = n.meta.get("val")
    if not isinstance(val, torch.SymInt) or val.node.shape_env is None:
        return False
    bound = val.node.shape_env.bound_sympy(val.node.expr)
    return bound is None or not bound.lower >= 0


def _unsafe_reader(n: Node) -> str:
    """Return the name of a reader of an integer that is not in `_ANY_INTEGER`, or ''.

    The readers of sums and products of the integer count too.
    """
    for user in n.users:
        if user.op == "output":
            continue
        if getattr(user.target, "overloadpacket", None) in _ANY_NUMBER:
            continue
        if user.target not in _ANY_INTEGER:
            return user.name
        if isinstance(user.meta.get("val"), torch.SymInt) and (reader := _unsafe_reader(user)):
            return reader
    return ""


def operands_in_results(ctx: Ctx, args: tuple[object, ...]) -> tuple[str, ...]:
    """Return the operand buffers that the subgraphs of a call may return, or return views of."""
    graphs = [gm for a in args if isinstance(a, Constant) and isinstance(gm := ctx.constants[a], GraphModule)]
    flat = [v.buffer for a in args for v in _views(a)]
    if any(isinstance(v, torch.Tensor) for gm in graphs for v in _returned_inputs(gm)):
        return tuple(dict.fromkeys(flat))
    return ()


def _views(x: object) -> list[View]:
    if isinstance(x, View):
        return [x]
    return [v for y in x for v in _views(y)] if isinstance(x, (tuple, list)) else []


def _returned_inputs(gm: GraphModule) -> Iterator[object]:
    """Yield the traced values of inputs that a graph returns, or that by operator schemas a result may be a view of."""
    seen: set[Node] = set()
    stack = list(torch.utils._pytree.tree_leaves(gm.graph.output_node().args))
    while stack:
        n = stack.pop()
        if not isinstance(n, Node) or n in seen:
            continue
        seen.add(n)
        if n.op == "placeholder":
            yield n.meta.get("val")
        elif n.op == "call_function" and may_alias(n):
            stack += aliased_arguments(n)
