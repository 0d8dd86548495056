"""Less memory for more time: of several plans of what to save, the fastest within the budget.

A plan saves some values and recomputes all else that it may, library calls included. The plans are: the fastest step;
the narrow places of the forward, all or every n-th; and these with more values, which a knapsack chooses by the time
that saving them spares. A minimum cut completes each plan. Plans do not depend on the budget, so that a smaller budget
never takes more memory. Of equal layers the later ones keep their values: these are freed before the earlier layers are
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

from ..debug.trace import DecisionKind
from .choose import Choice, Chooser
from .knapsack import Item, solve
from .peak import peak_bytes
from .rules import LIFTED, Bans
from .segments import boundaries

STEPS = 12  # capacities of the knapsack
LARGE = 6_000  # nodes from which on a graph gets fewer plans
LATER = 1e-3  # the relative worth of saving a value of the last layer rather than of the first
KEPT = "the memory budget keeps it"

Decision = Callable[[DecisionKind, str, str, str], None]


@dataclass(frozen=True)
class Plan:
    """The cost of one choice: bytes at the peak and between the halves, and the time of recomputing, in bytes moved."""

    choice: Choice
    peak: int
    saved: int
    time: int

    @property
    def memory(self) -> int:
        """Return the measure that the budget limits. Saved bytes count again: other graphs run between the halves."""
        return self.peak + self.saved


def choose(chooser: Chooser, gradients: frozenset[Node], decision: Decision) -> Choice:
    """Return the values to save within the budget."""
    fastest = chooser.choose()
    if chooser.rules.budget == 1:
        return fastest
    ladder = plans(chooser, fastest, gradients)
    most, least = ladder[0].memory, ladder[-1].memory
    limit = least + chooser.rules.budget * (most - least)
    plan = min((p for p in ladder if p.memory <= limit), key=lambda p: p.time)
    facts = f"{plan.saved} of {ladder[0].saved} bytes saved, an estimated peak of {plan.peak} of {ladder[0].peak}"
    decision(
        DecisionKind.PARTITION,
        f"memory budget {chooser.rules.budget:g}",
        "plan chosen",
        f"{facts}; {len(ladder)} plans",
    )
    return plan.choice


def plans(chooser: Chooser, fastest: Choice, gradients: frozenset[Node]) -> list[Plan]:
    """Return plans in the order of falling memory. Neither saved bytes nor the peak rises from one to the next."""
    h = chooser.liveness

    def plan(choice: Choice) -> Plan:
        time = sum(map(chooser.recompute_cost, choice.recomputed))
        return Plan(choice, peak_bytes(h, choice, gradients), choice.bytes, time)

    first = plan(fastest)
    others = {plan_.choice.recomputed: plan_ for plan_ in map(plan, _choices(chooser, fastest))}
    ladder = [first]
    for p in sorted(others.values(), key=lambda p: (-p.memory, p.time)):
        while len(ladder) > 1 and p.time <= ladder[-1].time and _fits_under(p, ladder[-1]):
            ladder.pop()  # the new plan is better in every respect
        if _fits_under(p, ladder[-1]):
            ladder.append(p)
    return ladder


def _fits_under(p: Plan, q: Plan) -> bool:
    return p.memory < q.memory and p.peak <= q.peak and p.saved <= q.saved


def _choices(chooser: Chooser, fastest: Choice) -> Iterator[Choice]:
    """Yield the completed choices of all plans but the fastest."""
    bans = Bans(**{**vars(LIFTED), "totals": chooser.bans.totals})
    narrow = [n for n in boundaries(chooser.liveness) if n in chooser.prices and n in chooser.liveness.needed]
    for stride in _strides(len(narrow)):
        yield chooser.choose_with(dict.fromkeys(narrow[::-stride], KEPT), bans)
    for saved in _kept(chooser, fastest, narrow, bans):
        yield chooser.choose_with(saved, bans)
    if narrow:
        yield chooser.choose_with({}, bans)


def _strides(count: int) -> Iterable[int]:
    return [s for s in (1, 2, 3, 4, 6, 8, 12) if s * s <= 2 * count]


def _kept(chooser: Chooser, fastest: Choice, narrow: list[Node], bans: Bans) -> Iterator[Mapping[Node, str]]:
    """Yield for each capacity of the knapsack the values to keep, the narrow places included."""
    fixed = chooser.fixed(bans)
    candidates = [n for n, (size, _) in fastest.saved.items() if size and n not in fixed and n not in set(narrow)]
    if not candidates:
        return
    items = [
        Item(fastest.saved[n][0], _spared(chooser, fastest, n) * (1 + LATER * k / len(candidates)))
        for k, n in enumerate(candidates)
    ]
    steps = STEPS if len(chooser.liveness.kinds) < LARGE else STEPS // 3
    total = sum(item.weight for item in items)
    base = dict.fromkeys(narrow, KEPT)
    for chosen in dict.fromkeys(solve(items, [total * k // steps for k in range(steps + 1)], chooser.rules.greedy)):
        yield {**base, **{candidates[k]: KEPT for k in sorted(chosen)}}


def _spared(chooser: Chooser, fastest: Choice, n: Node) -> int:
    """Return the time of recomputing a value from the other values that the fastest step saves or recomputes."""
    h = chooser.liveness
    total, pending, seen = 0, [n], {n}
    while pending:
        m = pending.pop()
        total += chooser.recompute_cost(m)
        for a in m.all_input_nodes:
            if a not in seen and a in h.forward and a not in fastest.saved and a not in fastest.recomputed:
                seen.add(a)
                pending.append(a)
    return total
