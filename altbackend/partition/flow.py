"""Minimum cut on integer capacities.

Method: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970:
blocking flows along shortest paths. Of all minimum cuts, the one with the smallest sink side is given.
"""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 60


class Unbounded(ValueError):
    """Every cut has an edge of infinite capacity."""


class Network:
    """A directed graph whose vertices are 0 .. n-1; each edge is stored beside its reverse, at number `e ^ 1`."""

    def __init__(self, vertices: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(vertices)]
        self.head: list[int] = []
        self.room: list[int] = []  # capacity that is left

    def edge(self, a: int, b: int, capacity: int) -> None:
        self.out[a].append(len(self.head))
        self.out[b].append(len(self.head) + 1)
        self.head += (b, a)
        self.room += (min(capacity, INFINITE), 0)

    def cut(self, source: int, sink: int) -> tuple[int, list[bool]]:
        """(capacity of a minimum cut, per vertex whether it is on the sink's side). Raises Unbounded."""
        total = 0
        while (level := self._levels(source, sink)) is not None:
            total += self._blocking_flow(source, sink, level)
            if total >= INFINITE:
                raise Unbounded
        return total, self._reaching(sink)

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """Distance from the source per vertex (-1: farther than the sink), None where the sink is out of reach."""
        level = [-1] * len(self.out)
        level[source] = 0
        waiting = deque([source])
        while waiting:
            a = waiting.popleft()
            if a == sink:
                return level
            for e in self.out[a]:
                b = self.head[e]
                if self.room[e] and level[b] < 0:
                    level[b] = level[a] + 1
                    waiting.append(b)
        return None

    def _blocking_flow(self, source: int, sink: int, level: list[int]) -> int:
        """Push along paths that climb one level an edge until every one is blocked; gives what was pushed."""
        head, room, out = self.head, self.room, self.out
        following = [0] * len(out)  # per vertex the first edge that may still lead on
        total, path, at = 0, [], source  # type: int, list[int], int
        while True:
            if at == sink:
                pushed = min(room[e] for e in path)
                for e in path:
                    room[e] -= pushed
                    room[e ^ 1] += pushed
                total += pushed
                if total >= INFINITE:
                    return total
                full = next(k for k, e in enumerate(path) if not room[e])
                at = head[path[full] ^ 1]
                del path[full:]
                continue
            while following[at] < len(out[at]):
                e = out[at][following[at]]
                if room[e] and level[head[e]] == level[at] + 1:
                    break
                following[at] += 1
            else:
                if not path:
                    return total
                e = path.pop()
                at = head[e ^ 1]
                following[at] += 1
                continue
            path.append(e)
            at = head[e]

    def _reaching(self, sink: int) -> list[bool]:
        """Per vertex whether the sink can be reached over edges that have room."""
        found = [False] * len(self.out)
        found[sink] = True
        waiting = [sink]
        while waiting:
            b = waiting.pop()
            for e in self.out[b]:
                a = self.head[e]
                if self.room[e ^ 1] and not found[a]:
                    found[a] = True
                    waiting.append(a)
        return found
