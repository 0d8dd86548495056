"""Reorder a backward graph: a recomputed value is computed just before its first reader."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from .placement import half_of, is_given_to_backward


def demand_order(backward: GraphModule) -> None:
    """Move every call to just before its first use by a node that the backward owns, in place; erase unused calls.

    The backward owns the nodes that depend on a gradient, and those that only it may run. They keep their order, and
    with it the order of effects and of collectives, which has to be the same in all processes.

    Extraction puts all recomputed calls in front, so that all their results would be alive before the first gradient.
    It also leaves calls with effects of the forward there, such as random ones, which the backward must not repeat.
    """
    graph = backward.graph
    nodes = list(graph.nodes)
    order: dict[Node, None] = {n: None for n in nodes if n.op == "placeholder"}
    for n in _from_gradients(nodes):
        placed(n, order)
    placed(graph.output_node(), order)
    for n in reversed(nodes):
        if n not in order:
            graph.erase_node(n)
    before = next(iter(order))
    for n in order:
        if n is not before:
            before.append(n)
            before = n
    graph.lint()
    backward.recompile()


def _from_gradients(nodes: list[Node]) -> dict[Node, None]:
    dependent: dict[Node, None] = {}
    for n in nodes:
        bound = is_given_to_backward(n) or half_of(n) == "backward"
        if bound or (n.op == "call_function" and any(a in dependent for a in n.all_input_nodes)):
            dependent[n] = None
    return dependent


def placed(n: Node, order: dict[Node, None]) -> None:
    """Append `n` to the order after all its operands."""
    stack = [n]
    while stack:
        top = stack[-1]
        missing = [] if top in order else [a for a in top.all_input_nodes if a not in order]
        if missing:
            stack.extend(reversed(missing))
        else:
            stack.pop()
            order.setdefault(top)
