"""Dependencies between kernels under construction, so that fusion does not join two kernels around a third.

Every kernel has a level above those of all kernels that it needs. A search for a kernel never visits kernels on its own
level or below, which bounds the search however long the graph is. The levels are those of Pearce and Kelly, "A dynamic
topological sort algorithm for directed acyclic graphs", 2006.
"""

from __future__ import annotations

from collections.abc import Iterable


class Reachability:
    """A growing graph of kernels, by number. Needs are only added, so that a dependency once found stays."""

    def __init__(self) -> None:
        self._needs: dict[int, set[int]] = {}
        self._users: dict[int, set[int]] = {}
        self._level: dict[int, int] = {}
        self._dependents: dict[int, set[int]] = {}

    def add(self, number: int, needs: Iterable[int]) -> None:
        """Let kernel `number`, which is entered if it is new, need the results of other kernels."""
        self._users.setdefault(number, set())
        known_needs = self._needs.setdefault(number, set())
        new = set(needs) - known_needs - {number}
        known_needs |= new
        for n in new:
            self._users.setdefault(n, set()).add(number)
        self._raise_level(number, 1 + max((self._level.get(n, 0) for n in new), default=-1))

    def join(self, gone: int, number: int) -> None:
        """Merge kernel `gone` into kernel `number` and remove the number `gone`."""
        needs, users = self._needs.pop(gone, set()), self._users.pop(gone, set())
        del self._level[gone]
        self._dependents.clear()
        for n in needs:
            self._users[n].discard(gone)
        for n in users:
            self._needs[n].discard(gone)
        for n in users - {number}:
            self.add(n, (number,))
        self.add(number, needs)

    def path(self, starts: Iterable[int], goal: int) -> int | None:
        """Return one of `starts`, other than `goal`, that depends on `goal`, or None."""
        dependents = self._dependents.setdefault(goal, {goal})
        visited: set[int] = set()
        for start in starts:
            if start != goal and self._depends(start, goal, dependents, visited):
                return start
        return None

    def _depends(self, start: int, goal: int, dependents: set[int], visited: set[int]) -> bool:
        """Search `goal` depth first from `start`; adds the kernels on a path that it finds to `dependents`."""
        floor = self._level.get(goal, 0)
        trail: list[int] = []
        stack = [iter((start,))]
        while stack:
            n = next(stack[-1], None)
            if n is None:
                stack.pop()
                if trail:
                    trail.pop()
            elif n in dependents:
                dependents.update(trail)
                return True
            elif n not in visited and self._level.get(n, 0) > floor:
                visited.add(n)
                trail.append(n)
                stack.append(iter(self._needs.get(n, ())))
        return False

    def _raise_level(self, number: int, level: int) -> None:
        stack = [(number, level)]
        while stack:
            n, least = stack.pop()
            if self._level.get(n, -1) < least:
                self._level[n] = least
                stack += [(u, least + 1) for u in self._users.get(n, ())]
