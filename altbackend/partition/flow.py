"""Minimum cut on integer capacities.

Method: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970:
blocking flows along shortest paths. Of all minimum cuts, `cut` returns the one with the smallest sink side.
"""

from __future__ import annotations

from collections import deque

INFINITE = 1 << 60


class Unbounded(ValueError):
    """Raised if every cut has an edge of infinite capacity."""


class Network:
    """A directed graph whose vertices are 0 .. n-1; each edge is stored beside its reverse, at number `e ^ 1`."""

    def __init__(self, vertices: int) -> None:
        self.out: list[list[int]] = [[] for _ in range(vertices)]
        self.head: list[int] = []
        self.residual: list[int] = []  # residual capacity

    def edge(self, a: int, b: int, capacity: int) -> None:
        """Add an edge from `a` to `b`; a capacity of at least INFINITE cannot be cut."""
        self.out[a].append(len(self.head))
        self.out[b].append(len(self.head) + 1)
        self.head += (b, a)
        self.residual += (min(capacity, INFINITE), 0)

    def cut(self, source: int, sink: int) -> tuple[int, list[bool]]:
        """Return (capacity of a minimum cut, for each vertex whether it is on the sink's side). Raises Unbounded."""
        total = 0
        while (level := self._levels(source, sink)) is not None:
            total += self._blocking_flow(source, sink, level)
            if total >= INFINITE:
                raise Unbounded
        return total, self._reaching(sink)

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """Return the distance of each vertex from the source (-1: not reached), or None if the sink is not reached."""
        level = [-1] * len(self.out)
        level[source] = 0
        pending = deque([source])
        while pending:
            a = pending.popleft()
            if a == sink:
                return level
            for e in self.out[a]:
                b = self.head[e]
                if self.residual[e] and level[b] < 0:
                    level[b] = level[a] + 1
                    pending.append(b)
        return None

    def _blocking_flow(self, source: int, sink: int, level: list[int]) -> int:
        """Push flow along paths that climb one level per edge until all are blocked; return the flow pushed."""
        head, residual, out = self.head, self.residual, self.out
        following = [0] * len(out)  # for each vertex the first edge that may still have capacity
        total, path, at = 0, [], source  # type: int, list[int], int
        while True:
            if at == sink:
                pushed = min(residual[e] for e in path)
                for e in path:
                    residual[e] -= pushed
                    residual[e ^ 1] += pushed
                total += pushed
                if total >= INFINITE:
                    return total
                full = next(k for k, e in enumerate(path) if not residual[e])
                at = head[path[full] ^ 1]
                del path[full:]
                continue
            while following[at] < len(out[at]):
                e = out[at][following[at]]
                if residual[e] and level[head[e]] == level[at] + 1:
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
        """Return for each vertex whether the sink is reachable along edges with residual capacity."""
        reaches = [False] * len(self.out)
        reaches[sink] = True
        pending = [sink]
        while pending:
            b = pending.pop()
            for e in self.out[b]:
                a = self.head[e]
                if self.residual[e ^ 1] and not reaches[a]:
                    reaches[a] = True
                    pending.append(a)
        return reaches
