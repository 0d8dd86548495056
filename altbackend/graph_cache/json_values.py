"""Arguments, call targets and graphs as JSON values, and back."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..runtime import control_flow, philox, quantised
from ..runtime import ops as runtime_ops

# The modules of functions that a graph may call.
_OWN = (control_flow, runtime_ops, philox, quantised)
_MODULES = {m.__name__: m for m in (builtins, math, operator, torch, *_OWN)} | {"_operator": operator}
# The arguments of this operator are numbers in a table of one process.
_LOCAL_ARGUMENTS = "triton_kernel_wrapper"
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


class NotCacheable(Exception):
    """Raised for a graph or value that has no text form that identifies it. The message says why."""


def encode(x: object) -> object:
    """Return `x` as a JSON value that `decode` reads. Equal JSON texts mean equal values. Raise NotCacheable."""
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return {"float": x.hex()}
    if type(x) is complex:
        return {"complex": [x.real.hex(), x.imag.hex()]}
    if isinstance(x, Node):
        return {"node": x.name}
    if isinstance(x, tuple):
        return {"tuple": [encode(y) for y in x]}
    if isinstance(x, list):
        return [encode(y) for y in x]
    if isinstance(x, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in x.items()]}
    if x is ...:
        return {"ellipsis": []}
    if isinstance(x, slice):
        return {"slice": [encode(y) for y in (x.start, x.stop, x.step)]}
    if isinstance(x, _NAMED):
        return {"torch": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"size": str(x.node.expr)}
    return _encode_callable(x)


def _encode_callable(x: object) -> object:
    if isinstance(x, torch._ops.OpOverload):
        return {"op": [*x._schema.name.split("::"), x._overloadname]}
    if isinstance(x, torch._ops.HigherOrderOperator):
        name = str(x._name)
        if name.startswith(_LOCAL_ARGUMENTS) or getattr(torch.ops.higher_order, name, None) is not x:
            raise NotCacheable(f"{name} has arguments that are valid in one process only")
        return {"higher_order": name}
    module, function = getattr(x, "__module__", None), getattr(x, "__name__", None)
    if isinstance(function, str) and module in _MODULES and getattr(_MODULES[module], function, None) is x:
        return {"function": [module, function]}
    raise NotCacheable(f"{x!r:.80} of type {type(x).__name__} has no text form")


def decode(x: object, nodes: dict[str, Node] | None = None) -> Any:
    """Return the value of a JSON form.

    Raise ValueError, LookupError, TypeError or AttributeError if it is malformed.
    """
    if isinstance(x, list):
        return [decode(y, nodes) for y in x]
    if not isinstance(x, dict):
        return x
    ((kind, content),) = x.items()
    if kind == "node":
        return (nodes or {})[content]
    if kind == "dict":
        return {decode(k, nodes): decode(v, nodes) for k, v in content}
    if kind in ("tuple", "slice"):
        return (tuple if kind == "tuple" else _slice)([decode(y, nodes) for y in content])
    return _DECODERS[kind](content)


def _slice(parts: list[object]) -> slice:
    return slice(*parts)


def _torch_value(name: str) -> object:
    value = getattr(torch, name)
    if not isinstance(value, _NAMED):
        raise ValueError(f"torch.{name} is not a dtype, layout or memory format")
    return value


def _overload(parts: list[str]) -> object:
    namespace, name, overload = parts
    operator_ = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    if not isinstance(operator_, torch._ops.OpOverload):
        raise ValueError(f"{namespace}::{name}.{overload} is not an operator")
    return operator_


def _function(parts: list[str]) -> object:
    module, name = parts
    return getattr(_MODULES[module], name)


_DECODERS: dict[str, Callable[[Any], object]] = {
    "float": float.fromhex,
    "complex": lambda h: complex(float.fromhex(h[0]), float.fromhex(h[1])),
    "torch": _torch_value,
    "device": torch.device,
    "ellipsis": lambda _: ...,
    "op": _overload,
    "higher_order": lambda name: getattr(torch.ops.higher_order, name),
    "function": _function,
}


def encode_calls(gm: GraphModule) -> list[object]:
    """Return a row [name, target, arguments] for each node of a graph of inputs and calls; the results are last.

    Raise NotCacheable if the graph has constants.
    """
    out: list[object] = []
    for n in gm.graph.nodes:
        if n.op == "get_attr":
            raise NotCacheable(f"{n.name}in the weight prologue is a constant")
        target = encode(n.target) if n.op == "call_function" else n.op
        out.append([n.name, target, encode(n.args), encode(n.kwargs)])
    return out


def decode_calls(rows: list[Any]) -> GraphModule:
    """Return the graph that `encode_calls` wrote. Raise the errors of `decode` and torch.fx."""
    graph, nodes = Graph(), dict[str, Node]()
    for name, target, args, kwargs in rows:
        arguments = decode(args, nodes)
        if target == "output":
            graph.output(*arguments)
        elif target == "placeholder":
            nodes[name] = graph.placeholder(name)
        else:
            nodes[name] = graph.create_node(
                "call_function", decode(target), tuple(arguments), decode(kwargs, nodes), name=name
            )
    return GraphModule(torch.nn.Module(), graph)
