"""The places where a forward is narrow: a single value on which everything later depends, such as a residual stream.

Saving these and recomputing what lies between them keeps one segment alive at a time.

Method: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from torch.fx import Node

from .liveness import Liveness

LONG = 4  # a value that lives for more than 1/LONG of the forward, such as a mask, makes no place wide


def boundaries(h: Liveness) -> list[Node]:
    """Return the values that are alone alive at some place of the forward, in graph order."""
    order = [n for n in h.early if n in h.forward and n.op == "call_function"]
    last: dict[Node, int] = {}
    for k, n in enumerate(order):
        for a in n.all_input_nodes:
            last[h.storage[a]] = k
    alive: dict[Node, int] = {}
    boundary_values: dict[Node, None] = {}
    for k, n in enumerate(order):
        end = last.get(n, k)
        if h.storage[n] is n and end > k and h.kinds[n] != "size" and (end - k) * LONG <= len(order):
            alive[n] = end
        for m in [m for m, until in alive.items() if until <= k]:
            del alive[m]
        if len(alive) == 1 and n in alive and not isinstance(n.meta.get("val"), (tuple, list)):
            boundary_values[n] = None
    return [n for n in boundary_values if _has_work(h, n)]


def _has_work(h: Liveness, n: Node) -> bool:
    """Return whether several calls read a value: one that a single call reads is a step of a chain."""
    return len({u for u in h.readers(n) if u in h.forward}) > 1
