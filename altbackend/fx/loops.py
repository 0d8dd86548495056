"""Unroll `while_loop` by two: the body runs once more inside each iteration, if the condition still holds."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from .module import attribute

_UNROLLED = "altbackend_unrolled"


def unroll(gm: GraphModule) -> int:
    """Unroll the loops of a graph whose number of iterations is not known, each once; return their number."""
    loop = torch.ops.higher_order.while_loop
    loops = [n for n in gm.graph.find_nodes(op="call_function", target=loop) if _UNROLLED not in n.meta]
    return sum(_unroll(gm, n) for n in loops)


def _unroll(gm: GraphModule, n: Node) -> bool:
    condition, body, carried, more = n.args
    if not isinstance(condition, Node) or not isinstance(body, Node) or not isinstance(carried, (tuple, list)):
        return False
    assert isinstance(more, (tuple, list))
    step = _two_steps(attribute(gm, str(condition.target)), attribute(gm, str(body.target)), len(carried), len(more))
    name = f"{str(body.target).replace('.', '_')}_twice"
    while hasattr(gm, name):
        name += "_"
    gm.add_module(name, step)
    with gm.graph.inserting_before(n):
        n.update_arg(1, gm.graph.get_attr(name))
    n.meta[_UNROLLED] = True
    return True


def _two_steps(condition: GraphModule, body: GraphModule, carried: int, more: int) -> GraphModule:
    """Return a body that runs `body`, and runs it again on the result where `condition` holds."""
    root = torch.nn.Module()
    root.add_module("condition", condition)
    root.add_module("body", body)
    root.add_module("same", _identity(carried, more))
    graph = Graph()
    inputs = [graph.placeholder(f"arg{k}") for k in range(carried + more)]
    rest = tuple(inputs[carried:])
    first = graph.call_module("body", tuple(inputs))
    values = tuple(graph.call_function(operator.getitem, (first, k)) for k in range(carried))
    predicate = graph.call_module("condition", (*values, *rest))
    branches = graph.get_attr("body"), graph.get_attr("same")
    second = graph.call_function(torch.ops.higher_order.cond, (predicate, *branches, (*values, *rest)))
    graph.output(tuple(graph.call_function(operator.getitem, (second, k)) for k in range(carried)))
    return GraphModule(root, graph)


def _identity(carried: int, more: int) -> GraphModule:
    """Return a branch that copies the carried values; a branch must not return its inputs."""
    graph = Graph()
    inputs = [graph.placeholder(f"arg{k}") for k in range(carried + more)]
    graph.output(tuple(graph.call_function(torch.clone, (x,)) for x in inputs[:carried]))
    return GraphModule(torch.nn.Module(), graph)
