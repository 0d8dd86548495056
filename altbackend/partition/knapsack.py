"""The knapsack problem: of items with a weight and a worth, the set of the greatest worth within a capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence

from altbackend.lazy_dataclass import dataclass

MOST_CELLS = 2_000_000  # cells of the table; larger problems are solved greedily


@dataclass(frozen=True)
class Item:
    """A positive weight and a worth of at least 0."""

    weight: int
    worth: float


def solve(items: Sequence[Item], capacities: Sequence[int], greedy: bool = False) -> list[frozenset[int]]:
    """Return for each capacity the indices of a set of items whose weights add up to at most it.

    The worth of the set is the greatest possible if the problem is small and not `greedy`, else at least half of that.
    """
    unit = math.gcd(*(item.weight for item in items)) or 1
    most = min(max(capacities, default=0), sum(item.weight for item in items)) // unit
    if not greedy and len(items) * (most + 1) <= MOST_CELLS:
        return _exact(items, [max(c, 0) // unit for c in capacities], unit, most)
    return [_greedy(items, c) for c in capacities]


def _exact(items: Sequence[Item], capacities: Sequence[int], unit: int, most: int) -> list[frozenset[int]]:
    """Solve by the dynamic programme over capacities: best(k, c) = max(best(k-1, c), best(k-1, c - weight) + worth)."""
    best = [0.0] * (most + 1)
    taken: list[bytearray] = []
    for item in items:
        weight = item.weight // unit
        takes = bytearray(most + 1)
        for c in range(most, weight - 1, -1):
            worth = best[c - weight] + item.worth
            if worth > best[c]:
                best[c], takes[c] = worth, 1
        taken.append(takes)
    return [_traced(items, taken, min(c, most), unit) for c in capacities]


def _traced(items: Sequence[Item], taken: Sequence[bytearray], capacity: int, unit: int) -> frozenset[int]:
    chosen = []
    for k in range(len(items) - 1, -1, -1):
        if taken[k][capacity]:
            chosen.append(k)
            capacity -= items[k].weight // unit
    return frozenset(chosen)


def _greedy(items: Sequence[Item], capacity: int) -> frozenset[int]:
    """Take items by worth per weight while they fit; or the one of greatest worth, if that is worth more."""
    chosen: list[int] = []
    left = capacity
    for k in sorted(range(len(items)), key=lambda k: items[k].worth / items[k].weight, reverse=True):
        if items[k].weight <= left:
            chosen.append(k)
            left -= items[k].weight
    fitting = [k for k, item in enumerate(items) if item.weight <= capacity]
    single = max(fitting, key=lambda k: items[k].worth, default=None)
    if single is not None and items[single].worth > sum(items[k].worth for k in chosen):
        return frozenset((single,))
    return frozenset(chosen)
