"""Wait for collectives as late as possible, so that other work runs during the communication.

A traced graph waits right after each collective. This pass moves each wait in front of the first call that needs it:

    s = all_reduce(a); w = wait(s); b = x @ y; c = w + b   ->   s = all_reduce(a); b = x @ y; w = wait(s); c = w + b

The order of the collectives stays, since all processes must start them in one order. Operands and results of a
collective that is under way stay in memory; the option `overlap_bytes` bounds them, and the oldest waits come first.
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from altbackend.lazy_dataclass import dataclass

from ..aten.collective import is_start, is_wait
from ..aten.mutates import is_mutable
from ..aten.view import aliased_arguments, storage_owner
from .context import Context


def run(gm: GraphModule, ctx: Context) -> int:
    """Move waits down, in place; return the number of those that moved."""
    waits = [n for n in gm.graph.nodes if is_wait(n.target)]
    if not waits:
        return 0
    order = _Order(ctx.config.overlap_bytes)
    for n in gm.graph.nodes:
        order.add(n)
    before = {n: n.next for n in waits}
    for earlier, later in zip(order.done[:-1], order.done[1:], strict=True):
        if earlier.next is not later:
            earlier.append(later)
    return sum(n.next is not before[n] for n in waits)


@dataclass
class _Order:
    """The calls in their new order. `pending`: waits that have not come yet, oldest first, with their bytes."""

    limit: int
    done: list[Node] = field(default_factory=list)
    pending: dict[Node, int] = field(default_factory=dict)

    def add(self, n: Node) -> None:
        if is_wait(n.target):
            self.pending[n] = _bytes_under_way(_start_of(n))
            self._bound(0)
            return
        if is_start(n.target):
            self._bound(_bytes_under_way(n))
        for w in [w for w in self.pending if n.op == "output" or _needs(n, w)]:
            self._wait_for(w)
        self.done.append(n)

    def _bound(self, more: int) -> None:
        """Wait for the oldest collectives until those under way and `more` bytes are within the limit."""
        while self.pending and sum(self.pending.values()) + more > self.limit:
            self._wait_for(next(iter(self.pending)))

    def _wait_for(self, w: Node) -> None:
        """Wait for a collective; those before it may still be under way."""
        del self.pending[w]
        self.done.append(w)


def _needs(n: Node, w: Node) -> bool:
    """Return whether a call must come after a wait: it uses the result, or writes what the collective reads."""
    if w in n.all_input_nodes:
        return True
    start = w.args[0]
    assert isinstance(start, Node)
    if start in n.all_input_nodes:
        return True
    if not is_mutable(n.target):
        return False
    busy = {storage_owner(m) for m in (start, *_start_of(w).all_input_nodes)}
    return any(storage_owner(m) in busy for m in aliased_arguments(n, written=True))


def _start_of(w: Node) -> Node:
    """Return the call that starts what `w` waits for; its result may be one of several."""
    n = w.args[0]
    while isinstance(n, Node) and n.op == "call_function" and not is_start(n.target) and n.all_input_nodes:
        n = n.all_input_nodes[0]
    assert isinstance(n, Node)
    return n


def _bytes_under_way(start: Node) -> int:
    """Return the bytes of the operands and results that a collective keeps in memory; those of known sizes."""
    values = [n.meta.get("val") for n in (start, *start.all_input_nodes)]
    tensors = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.itemsize for t in tensors if isinstance(t.numel(), int))
