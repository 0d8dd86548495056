"""Which kernels under construction depend on which, so that two are not joined around a third.

Every kernel has a level above those of all that it needs. A search for a kernel never looks at others on its own level
or below, which keeps it short whatever the graph's length (levels as in Pearce and Kelly, "A dynamic topological sort
algorithm for directed acyclic graphs", 2006).
"""

from __future__ import annotations

from collections.abc import Iterable


class Reachability:
    """Kernels by number, and what they need. Needs are only added, so whoever is found to depend on one still does."""

    def __init__(self) -> None:
        self._needs: dict[int, set[int]] = {}
        self._users: dict[int, set[int]] = {}
        self._level: dict[int, int] = {}
        self._dependent: dict[int, set[int]] = {}

    def add(self, number: int, needs: Iterable[int]) -> None:
        """Kernel `number` needs the results of others; it is entered here if it was not."""
        self._users.setdefault(number, set())
        mine = self._needs.setdefault(number, set())
        new = set(needs) - mine - {number}
        mine |= new
        for n in new:
            self._users.setdefault(n, set()).add(number)
        self._lift(number, 1 + max((self._level.get(n, 0) for n in new), default=-1))

    def join(self, early: int, late: int) -> None:
        """Kernel `late` takes in `early`, whose number is gone then."""
        needs, users = self._needs.pop(early, set()), self._users.pop(early, set())
        del self._level[early]
        self._dependent.clear()
        for n in needs:
            self._users[n].discard(early)
        for n in users:
            self._needs[n].discard(early)
        for n in users - {late}:
            self.add(n, (late,))
        self.add(late, needs)

    def path(self, starts: Iterable[int], goal: int) -> int | None:
        """One of `starts`, other than `goal`, that depends on it, or None."""
        known = self._dependent.setdefault(goal, {goal})
        seen: set[int] = set()
        for start in starts:
            if start != goal and self._depends(start, goal, known, seen):
                return start
        return None

    def _depends(self, start: int, goal: int, known: set[int], seen: set[int]) -> bool:
        floor = self._level.get(goal, 0)
        trail: list[int] = []
        todo = [iter((start,))]
        while todo:
            n = next(todo[-1], None)
            if n is None:
                todo.pop()
                if trail:
                    trail.pop()
            elif n in known:
                known.update(trail)
                return True
            elif n not in seen and self._level.get(n, 0) > floor:
                seen.add(n)
                trail.append(n)
                todo.append(iter(self._needs.get(n, ())))
        return False

    def _lift(self, number: int, level: int) -> None:
        todo = [(number, level)]
        while todo:
            n, least = todo.pop()
            if self._level.get(n, -1) < least:
                self._level[n] = least
                todo += [(u, least + 1) for u in self._users.get(n, ())]
