"""Graphs that a graph's operators call: which there are, and what keeps one from being compiled apart."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.loops import Constant, Extern, Program, View, symbols_of, unbacked_symbols
from ..runtime import control_flow
from .context import Ctx

# What is right for integers below zero too: the index algebra takes other operands for sizes.
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
_ANY_NUMBER = {torch.ops.aten.add, torch.ops.aten.sub, torch.ops.aten.mul, torch.ops.aten.div}  # of a tensor with it


def called(p: Program, constants: dict[str, Any]) -> dict[str, GraphModule]:
    """Graphs that a program calls through `runtime.control_flow`, by the names of the constants."""
    calls = [n for n in p.nodes if isinstance(n, Extern) and n.target in control_flow.FUNCTIONS.values()]
    names = dict.fromkeys(str(a) for n in calls for a in n.args if isinstance(a, Constant))
    return {name: held for name in names if isinstance(held := constants[name], GraphModule)}


def require_functional(gm: GraphModule) -> None:
    """Raises Unsupported for a body that writes, or whose integers the index algebra would take for sizes wrongly."""
    for n in gm.graph.nodes:
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            raise Unsupported(n, "a body that writes")
        if n.op == "placeholder" and _below_zero(n) and (other := _other_use(n)):
            raise Unsupported(n, f"an integer that may be below zero, read by {other}")


def require_closed(p: Program) -> None:
    """Raises Unsupported unless a body's program needs nothing but its operands."""
    given = set(p.inputs) | unbacked_symbols(p)
    given |= {ex.show(n) for b in p.inputs if b in p.buffers for n in p.buffers[b].sizes}
    used = {s for node in p.nodes for s in symbols_of(p, node)}
    for o in p.outputs:
        parts = (*o.sizes, *o.strides, o.offset) if isinstance(o, View) else (o,)
        used |= {a.key for x in parts if isinstance(x, ex.Expr) for a in ex.syms_of(x)}
    for b in p.inputs:
        if b in p.buffers:
            used |= {a.key for s in p.buffers[b].strides for a in ex.syms_of(s)}
    if used - given:
        raise Unsupported("a body", f"no operand gives {', '.join(sorted(used - given))}")


def _below_zero(n: Node) -> bool:
    val = n.meta.get("val")
    if not isinstance(val, torch.SymInt) or val.node.shape_env is None:
        return False
    bound = val.node.shape_env.bound_sympy(val.node.expr)
    return bound is None or not bound.lower >= 0


def _other_use(n: Node) -> str:
    """A reader of an integer, or of what sums and products make of it, that is neither those nor a comparison."""
    for user in n.users:
        if user.op == "output":
            continue
        if getattr(user.target, "overloadpacket", None) in _ANY_NUMBER:
            continue
        if user.target not in _ANY_INTEGER:
            return user.name
        if isinstance(user.meta.get("val"), torch.SymInt) and (found := _other_use(user)):
            return found
    return ""


def operands_in_results(ctx: Ctx, args: tuple[Any, ...]) -> tuple[str, ...]:
    """Buffers of a call's operands that its bodies may give back, whole or as views."""
    graphs = [held for a in args if isinstance(a, Constant) and isinstance(held := ctx.constants[a], GraphModule)]
    flat = [v.buffer for a in args for v in _views(a)]
    if any(isinstance(v, torch.Tensor) for gm in graphs for v in _returned_inputs(gm)):
        return tuple(dict.fromkeys(flat))
    return ()


def _views(x: Any) -> list[View]:
    if isinstance(x, View):
        return [x]
    return [v for y in x for v in _views(y)] if isinstance(x, (tuple, list)) else []


def _returned_inputs(gm: GraphModule) -> Iterator[Any]:
    """Traced values of the inputs that a graph's results are, or may be views of by the operators' schemas."""
    seen: set[Node] = set()
    stack = list(torch.utils._pytree.tree_leaves(gm.graph.output_node().args))
    while stack:
        n = stack.pop()
        if not isinstance(n, Node) or n in seen:
            continue
        seen.add(n)
        if n.op == "placeholder":
            yield n.meta.get("val")
        elif n.op == "call_function":
            stack += _viewed(n)


def _viewed(n: Node) -> list[Any]:
    """What the results of a call may share memory with; all that it takes where no schema says."""
    schema = getattr(n.target, "_schema", None)
    if schema is None:
        return list(n.all_input_nodes)
    if not any(r.alias_info for r in schema.returns):
        return []
    return [x for a, x in zip(schema.arguments, n.args, strict=False) if a.alias_info]
