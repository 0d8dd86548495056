"""Totals of all compilations in this process."""

from __future__ import annotations

import threading
from dataclasses import replace

from altbackend.lazy_dataclass import dataclass


@dataclass(frozen=True)
class GraphStats:
    """Totals over all graphs compiled since the last `reset`.

    `kernels` are those generated, `library_calls` the steps left to ATen, `compile_seconds` wall time inside the
    backend (a graph is one forward, backward or inference graph).
    """

    graphs: int = 0
    kernels: int = 0
    library_calls: int = 0
    compile_seconds: float = 0.0

    def __sub__(self, earlier: GraphStats) -> GraphStats:
        """Return the difference from the earlier snapshot."""
        return GraphStats(
            self.graphs - earlier.graphs,
            self.kernels - earlier.kernels,
            self.library_calls - earlier.library_calls,
            self.compile_seconds - earlier.compile_seconds,
        )


class Totals:
    """Adds up `GraphStats`; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = GraphStats()

    def record(self, *, kernels: int, library_calls: int, compile_seconds: float) -> None:
        """Add one compiled graph."""
        with self._lock:
            self._sum = replace(
                self._sum,
                graphs=self._sum.graphs + 1,
                kernels=self._sum.kernels + kernels,
                library_calls=self._sum.library_calls + library_calls,
                compile_seconds=self._sum.compile_seconds + compile_seconds,
            )

    def snapshot(self) -> GraphStats:
        """Return the totals so far."""
        with self._lock:
            return self._sum

    def reset(self) -> None:
        """Reset all totals to zero."""
        with self._lock:
            self._sum = GraphStats()


# torch.compile gives a backend no object to count in, so the count belongs to the process.
_PROCESS = Totals()
record = _PROCESS.record
snapshot = _PROCESS.snapshot
reset = _PROCESS.reset
