"""The order of a backward: what is computed again stands just before it is read."""

from __future__ import annotations

from torch.fx import GraphModule, Node


def demand_order(backward: GraphModule) -> None:
    """Move every call to where the first node that depends on a gradient needs it, in place; drop what none needs.

    Extraction leaves the forward's part in front of the backward's, so that all of it would be computed, and held,
    before the first gradient. It also leaves calls there that count as effects, as random ones do: the forward's.
    """
    graph = backward.graph
    nodes = list(graph.nodes)
    order: dict[Node, None] = {n: None for n in nodes if n.op == "placeholder"}
    for n in _from_gradients(nodes):
        _place(n, order)
    _place(graph.output_node(), order)
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
    found: dict[Node, None] = {}
    for n in nodes:
        tangent = n.op == "placeholder" and "tangents" in str(n.target)
        if tangent or (n.op == "call_function" and any(a in found for a in n.all_input_nodes)):
            found[n] = None
    return found


def _place(n: Node, order: dict[Node, None]) -> None:
    """Append `n` after all that it needs."""
    waiting = [n]
    while waiting:
        top = waiting[-1]
        missing = [] if top in order else [a for a in top.all_input_nodes if a not in order]
        if missing:
            waiting.extend(reversed(missing))
        else:
            waiting.pop()
            order.setdefault(top)
