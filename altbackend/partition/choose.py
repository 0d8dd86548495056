"""Choose the values that the forward saves: a minimum cut between the forward and the reads of the backward.

A value v is two vertices, joined by an edge whose capacity is the cost of saving v. The readers of v are connected to
its second vertex; readers in the backward are the sink. If the first vertex is on the sink's side, v is recomputed; the
capacity of its edge from the source is the cost of that.

Method: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, for recomputing
instead of saving; the cut over a joint graph as in the notes on functorch's min-cut partitioner, 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from altbackend.lazy_dataclass import dataclass

from ..aten.comparison import is_compared_exactly
from ..aten.mutates import is_write_back
from ..compat import aot_autograd
from . import cost
from .flow import INFINITE, Network, Unbounded
from .liveness import Liveness
from .placement import half_of, producer, reads_number
from .policy import RECOMPUTE, tagged
from .rules import Bans, Rules

UNSTORED = 2  # passes over memory to save a value that the forward would have in registers only: a write and a read
LONG_CHAIN = 100  # pointwise operators in a row, of which one result is saved
PRESSURE = 1 << 10  # a byte costs this many times more if memory is scarce


@dataclass(frozen=True)
class Choice:
    """The values to save, in graph order: for each the bytes that stay allocated, and why it is not recomputed.

    `recomputed`: the calls of the forward that the backward runs again.
    """

    saved: dict[Node, tuple[int, str]]
    recomputed: frozenset[Node] = field(default=frozenset())

    @property
    def bytes(self) -> int:
        """Return the bytes that stay allocated only because values are saved."""
        return sum(size for size, _ in self.saved.values())


class Chooser:
    """The cuts of one joint graph under the user's rules."""

    def __init__(self, liveness: Liveness, rules: Rules) -> None:
        self.liveness, self.bans, self.rules = liveness, rules.bans, rules
        self._costs: dict[Node, int] = {}
        self.nodes = [n for n in liveness.early if n in liveness.needed]
        self.calls = _depths(liveness, ("call",))
        self.steps = _depths(liveness, ("call", "row"))
        self.chain = _chains(liveness)
        self.alive = {liveness.storage[n] for n in liveness.results}
        self.sources = _written_twice(liveness)
        self.free = _without_inputs(liveness)
        self.prices = {n: self.price(n) for n in self.nodes}
        self.policies = {n: tagged(n) for n in self.nodes}

    def choose(self) -> Choice:
        """Return the values to save for the fastest step.

        Raises Unbounded if a value that the backward reads can be neither saved nor recomputed.
        """
        return self._cut(self.fixed(self.bans), self.prices)

    def choose_with(self, saved: Mapping[Node, str], bans: Bans) -> Choice:
        """Return the values to save if the backward recomputes all it may, except for the values `saved`."""
        fixed = {**self.fixed(bans), **saved}
        prices = {n: 0 if n in fixed and p < INFINITE else min(p * PRESSURE, INFINITE) for n, p in self.prices.items()}
        return self._cut(fixed, prices)

    def fixed(self, bans: Bans) -> dict[Node, str]:
        """Return the values that are never recomputed, with the reason."""
        reasons = {n: self.must_save(n, self.policies[n], bans) for n in self.nodes}
        return {n: reason for n, reason in reasons.items() if reason}

    def _cut(self, fixed: Mapping[Node, str], prices: Mapping[Node, int]) -> Choice:
        h, nodes = self.liveness, self.nodes
        number = {n: 2 * k for k, n in enumerate(nodes)}
        source, sink = 2 * len(nodes), 2 * len(nodes) + 1
        net = Network(2 * len(nodes) + 2)
        for n in nodes:
            v = number[n]
            net.edge(v, v + 1, prices[n])
            if n in h.read:
                net.edge(v + 1, sink, INFINITE)
            if n in fixed:
                net.edge(source, v, INFINITE)
                continue
            if self.policies[n] is RECOMPUTE:
                net.edge(v, sink, INFINITE)
            else:
                net.edge(source, v, self.recompute_cost(n) if n in h.forward else 0)
            for a in n.all_input_nodes:  # recomputing n needs its operands
                net.edge(number[a] + 1, v, INFINITE)
        try:
            _, on_sink_side = net.cut(source, sink)
        except Unbounded:
            stuck = [n.name for n in nodes if n in fixed and n in h.written]
            raise Unbounded(f"the backward reads inputs that the forward overwrites: {', '.join(stuck)}") from None
        saved = [n for n in nodes if on_sink_side[number[n] + 1] and not on_sink_side[number[n]]]
        recomputed = frozenset(n for n in nodes if on_sink_side[number[n]] and n in h.forward)
        reasons = {n: fixed.get(n, "cheaper than recomputing it") for n in saved}
        return Choice({n: (self.bytes_of(n), reasons[n]) for n in saved}, recomputed)

    def recompute_cost(self, n: Node) -> int:
        """Return the cost of recomputing a value, in bytes whose saving costs as much."""
        if n in self.free:
            return 0
        if n not in self._costs:
            self._costs[n] = cost.recompute_cost(n, self.liveness.kinds[n], self.rules.speed)
        return self._costs[n]

    def bytes_of(self, n: Node) -> int:
        """Return the bytes that stay allocated only because a value is saved."""
        owner = self.liveness.storage[n]
        return 0 if owner.op == "placeholder" or owner in self.alive else cost.nbytes(owner)

    def price(self, n: Node) -> int:
        """Return the cost of saving a value, in bytes; INFINITE for a value that cannot be saved."""
        h, val = self.liveness, n.meta.get("val")
        if isinstance(val, (torch.SymInt, torch.SymFloat)) or aot_autograd.is_carried(val) or n in h.targets:
            return 1
        if not isinstance(val, torch.Tensor) or h.storage[n] is not n or n in h.written:
            return INFINITE  # views are recomputed from their base, and a written input has lost its value
        size = self.bytes_of(n)
        return 1 + size * (1 if self.is_stored(n) else UNSTORED)

    def is_stored(self, n: Node) -> bool:
        """Return whether the forward stores a value in memory even if it is not saved."""
        h = self.liveness
        if n.op == "placeholder" or h.kinds[producer(n)] in ("call", "total"):
            return True
        readers = [u for u in h.readers(n) if u in h.forward]
        return any(h.kinds[u] == "call" or self.calls[n] < _operand_depth(u, self.calls) for u in readers)

    def must_save(self, n: Node, policy: CheckpointPolicy | None, bans: Bans) -> str:
        """Return the reason why a value is not recomputed, or "" if it may be."""
        h, call = self.liveness, producer(n)
        own = h.storage[n] is n and isinstance(n.meta.get("val"), torch.Tensor)
        kind = h.kinds[call]
        if n.op == "placeholder":
            return "an input"
        if policy is RECOMPUTE or n not in h.forward:  # without the forward, only the backward computes it
            return ""
        if half_of(call) == "forward":
            return "only the forward may run it"
        if n in self.sources:
            return "the forward and the backward write it to one input"
        if policy is not None and own:
            return "checkpoint policy"
        if n in self.free:
            return ""
        if reads_number(call) or (kind == "call" and (bans.calls or not cost.is_repeatable(call))):
            return "a library call"
        if not own or kind in ("view", "size"):
            return ""
        if is_compared_exactly(n):
            return "it is compared for equality"
        return self._banned(n, call, bans)

    def _banned(self, n: Node, call: Node, bans: Bans) -> str:
        """Return the ban that holds for a value that could be recomputed, or ""."""
        h = self.liveness
        shrinks = cost.numel(n) * cost.SMALL < sum(map(cost.numel, call.all_input_nodes))
        if bans.totals and h.kinds[call] in ("total", "row") and shrinks:
            return "a small result of large operands"
        if bans.read_by_calls and any(u not in h.forward and h.kinds.get(u) == "call" for u in h.readers(n)):
            return "a library call of the backward reads it"
        if bans.long_chains and self.chain[n] and self.chain[n] % LONG_CHAIN == 0:
            return "a long chain of pointwise operators"
        return self._spans(n) if bans.far_apart else ""

    def _spans(self, n: Node) -> str:
        """Return a reason to save a value that is added to a large older one, as in a residual stream, or "".

        The older value is such a sum too, so recomputing would go back layer after layer.
        """
        large = [a for a in n.all_input_nodes if cost.nbytes(a) * cost.SMALL > cost.nbytes(n)]
        latest = max((self.steps[a] for a in large), default=0)
        for a in large:
            old = self.liveness.storage[a]
            computed = old.op == "call_function" and old.all_input_nodes
            if computed and self.liveness.kinds[producer(old)] != "call" and self.steps[old] < latest:
                return f"it adds {old.name} to a much later value"
        return ""


def _written_twice(h: Liveness) -> frozenset[Node]:
    """Return the values that the forward writes to inputs that the backward writes again.

    The input has another value when the backward runs, so that its old value cannot be computed again from it.
    """
    writes = [n for n in h.early if is_write_back(n) and n.args[0] in h.targets]
    return frozenset(n.args[1] for n in writes if isinstance(n.args[1], Node))


def _operand_depth(n: Node, depth: dict[Node, int]) -> int:
    """Return the largest depth of the operands of a node."""
    return max((depth[a] for a in n.all_input_nodes if a in depth), default=0)


def _depths(h: Liveness, kinds: tuple[cost.Kind, ...]) -> dict[Node, int]:
    """Return for each early node the number of nodes of these kinds on the longest path to it, itself included."""
    depth: dict[Node, int] = {}
    for n in h.early:
        depth[n] = _operand_depth(n, depth) + (n.op == "call_function" and h.kinds[n] in kinds)
    return depth


def _without_inputs(h: Liveness) -> frozenset[Node]:
    """Return the early pointwise nodes that depend on no input, such as tables of positions.

    Their readers compute them in registers, so that saving them costs a kernel and a result.
    """
    free: set[Node] = set()
    for n in h.early:
        fuses = n.op == "call_function" and h.kinds[n] in ("point", "view") and n.target not in cost.DRAWS
        if fuses and n not in h.written and all(a in free for a in n.all_input_nodes):
            free.add(n)
    return frozenset(free)


def _chains(h: Liveness) -> dict[Node, int]:
    """Return for each early node the number of pointwise and row operators in a row that end with it."""
    length: dict[Node, int] = {}
    for n in h.early:
        kind = h.kinds[n]
        fuses = n.op == "call_function" and kind in ("point", "row", "view")
        length[n] = _operand_depth(n, length) + (kind != "view") if fuses else 0
    return length
