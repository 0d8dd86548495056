"""Put the graphs of submodules and of higher-order operators into the graph that calls them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_aggregate

from ..fx_passes.idioms import substitute
from .module import Program, attribute, drop_unread, graph_module

# Higher-order operators that run one graph: by name, the number of arguments before the operands.
_RUNS_ONE = {"invoke_subgraph": 2, "wrap": 1}


def inline(program: Program) -> GraphModule:
    """Inline all calls of submodules and of `invoke_subgraph`, and branches whose condition is a constant.

    A submodule without a graph is traced; one that cannot be traced, or that has hooks, stays a call. The graph is
    changed in place; its parameters keep their names. Raise TypeError for an object without a graph.
    """
    gm = graph_module(program)
    while any(_inlined(gm, n) for n in list(gm.graph.nodes)):
        pass
    drop_unread(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def _inlined(gm: GraphModule, n: Node) -> bool:
    """Inline one call; return whether that was done."""
    if n._erased:
        return False
    if n.op == "call_module":
        module = attribute(gm, str(n.target))
        graph = _graph_of(module)
        if graph is None or any(True for _ in _hooks(module)):
            return False
        return _insert(gm, n, graph, str(n.target), n.args, n.kwargs)
    if n.op != "call_function" or not isinstance(n.target, torch._ops.HigherOrderOperator):
        return False
    called, operands = _called(n)
    if called is None:
        return False
    graph = attribute(gm, str(called.target))
    return isinstance(graph, GraphModule) and _insert(gm, n, graph, str(called.target), operands, {})


def _called(n: Node) -> tuple[Node | None, Sequence[object]]:
    """Return the node of the graph that a higher-order operator runs, and its operands; None if it is not known."""
    name = str(n.target)
    if name in _RUNS_ONE and isinstance(n.args[0], Node) and n.args[0].op == "get_attr":
        return n.args[0], n.args[_RUNS_ONE[name] :]
    if name == "cond" and isinstance(n.args[0], bool):
        branch, operands = n.args[1 if n.args[0] else 2], n.args[3]
        if isinstance(branch, Node) and isinstance(operands, (tuple, list)):
            return branch, operands
    return None, ()


def _hooks(module: torch.nn.Module) -> list[object]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]


def _graph_of(module: torch.nn.Module) -> GraphModule | None:
    """Return a graph of a module, traced if it has none; None if it cannot be traced."""
    if isinstance(module, GraphModule):
        return module
    if not isinstance(module, torch.nn.Module) or type(module).__module__.startswith("torch.export"):
        return None
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return _normalisation(module)
    try:
        return torch.fx.symbolic_trace(module)
    except Exception:  # control flow that depends on data
        return None


def _normalisation(module: torch.nn.modules.batchnorm._BatchNorm) -> GraphModule | None:
    """Return the graph of a batch normalisation with constant statistics; its own code reads the rank of its input."""
    if module.training or module.running_mean is None:
        return None
    graph = torch.fx.Graph()
    x = graph.placeholder("input")
    names = ("running_mean", "running_var", "weight", "bias")
    given = [graph.get_attr(name) if getattr(module, name) is not None else None for name in names]
    graph.output(graph.call_function(torch.nn.functional.batch_norm, (x, *given), {"eps": module.eps}))
    return GraphModule(module, graph)


def _insert(
    gm: GraphModule, n: Node, inner: GraphModule, path: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    """Insert the nodes of `inner`, whose attributes are those of the module at `path`, and replace the call."""
    values = _bound(inner, args, kwargs)
    if values is None:
        return False
    with gm.graph.inserting_before(n):
        for m in inner.graph.nodes:
            if m.op == "output":
                break
            if m.op != "placeholder":
                values[m] = copy = gm.graph.node_copy(m, lambda a: values[a])
                if m.op in ("get_attr", "call_module"):
                    copy.target = f"{path}.{m.target}"
    result = _mapped(inner.graph.output_node().args[0], values)
    if isinstance(result, Node):
        result.meta = {**n.meta, **result.meta}
    _replace(n, result)
    return True


def _bound(inner: GraphModule, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[Node, Argument] | None:
    """Return the value of each input of a graph; None if the arguments do not fit."""
    inputs = inner.graph.find_nodes(op="placeholder")
    names = [str(p.target) for p in inputs]
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=p.args[0] if p.args else inspect.Parameter.empty,
        )
        for name, p in zip(names, inputs, strict=True)
    ]
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except (TypeError, ValueError):  # starred inputs, or defaults before inputs without
        return None
    bound.apply_defaults()
    return {p: bound.arguments[name] for name, p in zip(names, inputs, strict=True)}


def _mapped(x: Argument, values: Mapping[Node, Argument]) -> Argument:
    return values[x] if isinstance(x, Node) else map_aggregate(x, lambda a: values[a] if isinstance(a, Node) else a)


def _replace(n: Node, result: object) -> None:
    """Replace a call by its result; elements of a result of several values are taken at once."""
    if isinstance(result, (tuple, list)):
        for user in list(n.users):
            if user.op == "call_function" and getattr(user.target, "__name__", "") == "getitem":
                index: Any = user.args[1]
                substitute(user, result[index])
                n.graph.erase_node(user)
    if n.users:
        substitute(n, result)
    n.graph.erase_node(n)
