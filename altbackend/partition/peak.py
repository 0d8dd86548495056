"""An estimate of a step's peak memory: saved values, and what is alive at once while the backward runs.

Parameters and other inputs are alive all the time and are not counted. A pointwise value counts if a library call reads
it or if it waits long for its last reader; the others stay in the registers of a kernel.
"""

from __future__ import annotations

import operator

from torch.fx import Node

from . import cost
from .choose import Choice
from .liveness import Liveness
from .reorder import placed

WAIT = 24  # calls between a pointwise value and its last reader from which on it is stored


def backward_order(h: Liveness, choice: Choice) -> list[Node]:
    """Return the calls of the backward in the order in which it runs them."""
    order: dict[Node, None] = dict.fromkeys(choice.saved)
    order.update(dict.fromkeys(n for n in h.storage if n.op == "placeholder"))
    given = len(order)
    for n in h.storage:
        if n in h.backward:
            placed(n, order)
    return list(order)[given:]


def peak_bytes(h: Liveness, choice: Choice, gradients: frozenset[Node]) -> int:
    """Return the most bytes that saved values, recomputed values and gradients take at once."""
    order = backward_order(h, choice)
    last: dict[Node, int] = {}
    for k, n in enumerate(order):
        for a in n.all_input_nodes:
            last[h.storage[a]] = k
    for n in gradients:
        last[h.storage[n]] = len(order)
    freed: list[list[int]] = [[] for _ in range(len(order) + 1)]
    for n, (size, _) in choice.saved.items():
        freed[last.get(n, 0)].append(size)
    alive = peak = choice.bytes
    for k, n in enumerate(order):
        end = last.get(n, k)
        if h.storage[n] is n and n not in choice.saved and _is_stored(h, n, end - k):
            size = cost.nbytes(n)
            alive += size
            freed[end].append(size)
        peak = max(peak, alive)
        alive -= sum(freed[k])
    return peak


def _is_stored(h: Liveness, n: Node, wait: int) -> bool:
    kind = h.kinds[n]
    if n.target is operator.getitem or kind in ("call", "total"):
        return not isinstance(n.meta.get("val"), (tuple, list))  # the elements of a tuple count
    return kind in ("point", "row") and (wait > WAIT or any(h.kinds.get(u) == "call" for u in h.readers(n)))
