"""Sort the nodes of a graph so that every node stands behind its arguments."""

from __future__ import annotations

from torch.fx import Graph, Node


def sort(graph: Graph) -> int:
    """Move nodes that stand before an argument behind it; the others keep their order. Return the number moved.

    Raise ValueError, naming the nodes, if some depend on each other.
    """
    placed: set[Node] = set()
    waiting: dict[Node, list[Node]] = {}  # a missing argument -> nodes that wait for it
    order: list[Node] = []
    for n in graph.nodes:
        ready = [n]
        while ready:
            m = ready.pop()
            missing = next((a for a in m.all_input_nodes if a not in placed), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(m)
                continue
            placed.add(m)
            order.append(m)
            ready.extend(reversed(waiting.pop(m, [])))
    if waiting:
        stuck = sorted({n.name for nodes in waiting.values() for n in nodes})
        raise ValueError(f"nodes of a graph depend on each other: {', '.join(stuck)}")
    return _rearrange(graph, order)


def _rearrange(graph: Graph, order: list[Node]) -> int:
    old = list(graph.nodes)
    moved = sum(a is not b for a, b in zip(old, order, strict=True))
    if moved:
        for n in order:
            graph._root.prepend(n)  # before the root is behind all nodes, since the list is a ring
    return moved
