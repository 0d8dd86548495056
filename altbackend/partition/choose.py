"""Which values of the forward to save: a minimum cut between what the forward has and what the backward reads.

A value v is two vertices, joined by an edge as costly as saving v. v's readers hang on its second vertex; those in the
backward are the sink. The first vertex on the sink's side means that v is computed again, which costs its edge from the
source. Method: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, for saving
less by computing again; the cut over a joint graph as in the notes on functorch's min-cut partitioner, 2022.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from . import cost
from .flow import INFINITE, Network, Unbounded
from .liveness import Halves

RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
UNSTORED = 2  # saving what the forward would only have had in registers is a pass over memory, and one more to read it


@dataclass(frozen=True)
class Choice:
    """What to save, in graph order: per value its bytes that stay alive for it, and why it is not computed again."""

    saved: dict[Node, tuple[int, str]]


def tagged(n: Node) -> CheckpointPolicy | None:
    """The checkpoint policy of a node. A value between two checkpointed regions, or under a hook, is kept."""
    policy = n.meta.get("recompute")
    if policy not in RECOMPUTE:
        return policy if isinstance(policy, CheckpointPolicy) else None
    again = [u for u in n.users if u.meta.get("recompute") in RECOMPUTE]
    region = n.meta.get("ac_graph_id")
    if region is not None and any(u.meta.get("ac_graph_id", region) > region for u in again):
        return CheckpointPolicy.MUST_SAVE
    if n.meta.get("has_backward_hook") and not again:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


class Chooser:
    """The rules for one joint graph. `static`: inputs that outlive the step (parameters)."""

    def __init__(self, halves: Halves, static: frozenset[Node]) -> None:
        self.halves, self.static = halves, static
        self.calls = _depths(halves, ("call",))
        self.steps = _depths(halves, ("call", "row"))
        self.alive = {halves.storage[n] for n in halves.results}

    def choose(self) -> Choice:
        """Raises Unbounded where something that the backward reads can be neither saved nor computed again."""
        h = self.halves
        nodes = [n for n in h.early if n in h.wanted]
        number = {n: 2 * k for k, n in enumerate(nodes)}
        source, sink = 2 * len(nodes), 2 * len(nodes) + 1
        net = Network(2 * len(nodes) + 2)
        kept: dict[Node, str] = {}
        for n in nodes:
            v = number[n]
            net.edge(v, v + 1, self.price(n))
            if n in h.read:
                net.edge(v + 1, sink, INFINITE)
            policy = tagged(n)
            if policy is CheckpointPolicy.MUST_RECOMPUTE and n.op != "placeholder":
                net.edge(v, sink, INFINITE)
            elif reason := self.must_keep(n, policy):
                kept[n] = reason
                net.edge(source, v, INFINITE)
            else:
                net.edge(source, v, cost.again(n, h.kinds[n]) if n in h.forward else 0)
            if n not in kept:  # what a kept value was computed from is of no concern
                for a in n.all_input_nodes:
                    net.edge(number[a] + 1, v, INFINITE)
        try:
            _, again = net.cut(source, sink)
        except Unbounded:
            stuck = [n.name for n in nodes if n in kept and n in h.written]
            raise Unbounded(f"the backward reads inputs that the forward overwrites: {', '.join(stuck)}") from None
        saved = [n for n in nodes if again[number[n] + 1] and not again[number[n]]]
        return Choice({n: (self.bytes_of(n), kept.get(n, "cheaper than computing it again")) for n in saved})

    def bytes_of(self, n: Node) -> int:
        """What stays allocated for a value and would not otherwise."""
        owner = self.halves.storage[n]
        return 0 if owner.op == "placeholder" or owner in self.alive else cost.nbytes(owner)

    def price(self, n: Node) -> int:
        """What saving costs, in bytes; INFINITE for what cannot be saved."""
        val = n.meta.get("val")
        if isinstance(val, torch.SymInt):
            return 1
        if not isinstance(val, torch.Tensor) or self.halves.storage[n] is not n or n in self.halves.written:
            return INFINITE  # views are made again from their storage, and an input that changes is no longer itself
        size = self.bytes_of(n)
        return 1 + size * (1 if self.is_stored(n) else UNSTORED)

    def is_stored(self, n: Node) -> bool:
        """Whether the forward puts a value into memory in any case."""
        h = self.halves
        if n.op == "placeholder" or h.kinds[_maker(n)] in ("call", "total"):
            return True
        later = [u for u in h.readers(n) if u in h.forward]
        return any(h.kinds[u] == "call" or self.calls[n] < _waits(u, self.calls) for u in later)

    def must_keep(self, n: Node, policy: CheckpointPolicy | None) -> str:
        """Why a value is not computed again, "" where it may be."""
        h = self.halves
        own = h.storage[n] is n and isinstance(n.meta.get("val"), torch.Tensor)
        maker = _maker(n)
        kind = h.kinds[maker]
        if n.op == "placeholder":
            return "an input"
        if n not in h.forward:  # computed once, wherever that is
            return ""
        if policy is CheckpointPolicy.MUST_SAVE and own:
            return "checkpoint policy"
        if kind == "call":
            return "a library call"
        if not own or kind in ("view", "size"):
            return ""
        if kind != "point" and cost.numel(n) * cost.SMALL < sum(map(cost.numel, maker.all_input_nodes)):
            return "a small result of much"
        if any(u not in h.forward and h.kinds.get(u) == "call" for u in h.readers(n)):
            return "a library call of the backward reads it"
        return self._spans(n)

    def _spans(self, n: Node) -> str:
        """A value that adds to an older one as large: the older would add to one older still, layer after layer."""
        large = [a for a in n.all_input_nodes if cost.nbytes(a) * cost.SMALL > cost.nbytes(n)]
        now = max((self.steps[a] for a in large), default=0)
        for a in large:
            old = self.halves.storage[a]
            made = old.op == "call_function" and old.all_input_nodes and self.halves.kinds[_maker(old)] != "call"
            if made and self.steps[old] < now:
                return f"it joins {old.name} with what came long after"
        return ""


def _maker(n: Node) -> Node:
    """The operator of a value: for one of several results, what gives them all."""
    return n.args[0] if n.target is operator.getitem and isinstance(n.args[0], Node) else n


def _waits(n: Node, depth: dict[Node, int]) -> int:
    """The depth of what a node reads."""
    return max((depth[a] for a in n.all_input_nodes if a in depth), default=0)


def _depths(h: Halves, kinds: tuple[cost.Kind, ...]) -> dict[Node, int]:
    """Per early node how many nodes of these kinds lie one behind the other up to it, itself among them."""
    depth: dict[Node, int] = {}
    for n in h.early:
        depth[n] = _waits(n, depth) + (n.op == "call_function" and h.kinds[n] in kinds)
    return depth
