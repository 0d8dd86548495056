"""The order in which fused kernels run."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..deps import Deps
from .group import Group


def order(groups: Sequence[Group]) -> list[Group]:
    """Return the groups in topological order, each at the position of its first node, or once its needs have run.

    A kernel that runs later keeps its operands alive longer; a kernel that runs earlier does so with its results.
    """
    by_number = {g.number: g for g in groups}
    waiting = {g.number: set(g.needs) for g in groups}
    users: dict[int, list[int]] = {}
    for g in groups:
        for n in g.needs:
            users.setdefault(n, []).append(g.number)
    position = {g.number: min(g.members) for g in groups}
    ready = [(position[n], position[n], n) for n, needs in waiting.items() if not needs]
    heapq.heapify(ready)
    ordered = []
    while ready:
        earliest, _, n = heapq.heappop(ready)
        ordered.append(by_number[n])
        for user in users.get(n, ()):
            waiting[user].discard(n)
            if not waiting[user]:
                heapq.heappush(ready, (max(earliest, position[user]), position[user], user))
    assert len(ordered) == len(groups), "the kernels depend on each other in a circle"
    return ordered


def verified(ordered: list[Group], deps: Deps) -> list[Group]:
    """Return the groups. Raise AssertionError if a node would run before one that it needs.

    Such code would read memory that nothing has written. A product that became part of a kernel is in no group.
    """
    waiting = {k for g in ordered for k in g.members}
    for g in ordered:
        for k in g.members:
            assert waiting.isdisjoint(deps.before[k]), f"node {k} would run before a node that it needs"
            waiting.discard(k)
    return ordered
