"""Predict which reductions of columns a GPU kernel of whole rows will total beside its other work.

A LayerNorm's weight gradients are such totals. Split in two steps, they would leave the kernel of the rows and read all
of its data once more. But reductions are split before nodes are fused, so that fusion itself cannot be asked.
"""

from __future__ import annotations

import itertools

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir.loops import Extern, Pointwise, Program, Reduction, reads, writes
from ..deps import analyse
from ..device import Device, Gpu
from ..loop_mapping import Kind, Refusal, mappings, ordered_vars
from ..rows import CACHED, estimate
from ..split import cuts_of

HOPS = 3  # pointwise nodes, and the buffers between them, from a total to the kernel of rows


def predicted_totals(p: Program, device: Device) -> frozenset[str]:
    """Return the buffers of the reductions that would be split, and that a kernel of rows can total as they are.

    A reduction within rows must be near: it shares data with the total, or pointwise nodes in between do, and no
    library call must run between the two.
    """
    cut = [k for k, n in enumerate(p.nodes) if isinstance(n, Reduction) and _is_cut_column(n, device)]
    if not cut:
        return frozenset()
    near = _Neighbours(p)
    return frozenset(b for k in cut if near.has_rows(k) for b in writes(p.nodes[k]))


def _is_cut_column(n: Reduction, device: Device) -> bool:
    columns = bool(n.dims) and ordered_vars(n)[-1] not in n.rdims
    return columns and isinstance(device, Gpu) and cuts_of(n, device) is not None


@dataclass(frozen=True)
class _LibraryCalls:
    """The library calls that run before and after each node, as bit masks."""

    before: list[int]
    after: list[int]

    def separate(self, a: int, b: int) -> bool:
        """Return whether a library call must run between two nodes."""
        return bool(self.after[a] & self.before[b] | self.after[b] & self.before[a])


def _library_calls(p: Program) -> _LibraryCalls:
    needs = analyse(p).before
    calls = [k for k, n in enumerate(p.nodes) if isinstance(n, Extern)]
    itself = dict(zip(calls, (1 << bit for bit in range(len(calls))), strict=True))
    before, after = [0] * len(needs), [0] * len(needs)
    for k, needed in enumerate(needs):
        for j in needed:
            before[k] |= before[j] | itself.get(j, 0)
    for k in reversed(range(len(needs))):
        for j in needs[k]:
            after[j] |= after[k] | itself.get(k, 0)
    return _LibraryCalls(before, after)


class _Neighbours:
    """The nodes of a program by the buffers that they touch."""

    def __init__(self, p: Program) -> None:
        self._program = p
        self._calls = _library_calls(p)
        self._touching: dict[str, list[int]] = {}
        for k in range(len(p.nodes)):
            for b in _buffers(p, k):
                self._touching.setdefault(b, []).append(k)
        self._size = {b: estimate(x.numel) for b, x in p.buffers.items()}

    def has_rows(self, total: int) -> bool:
        """Return whether a kernel of rows near node `total` can total its columns."""
        read = _buffers(self._program, total)
        least = max(map(self._size.__getitem__, read)) // CACHED  # statistics of rows say nothing about their kernel
        visited, front = {total}, read
        for _ in range(HOPS):
            nodes = dict.fromkeys(k for b in front for k in self._touching[b] if k not in visited)
            visited.update(nodes)
            together = [k for k in nodes if not self._calls.separate(k, total)]
            if any(self._totals(k, total) for k in together):
                return True
            points = (k for k in together if isinstance(self._program.nodes[k], Pointwise))
            reached = itertools.chain.from_iterable(_buffers(self._program, k) for k in points)
            front = [b for b in dict.fromkeys(reached) if self._size[b] >= least]
        return False

    def _totals(self, rows: int, total: int) -> bool:
        """Return whether node `rows` reduces within rows, over which node `total` is a total."""
        node, reduction = self._program.nodes[rows], self._program.nodes[total]
        if not isinstance(node, Reduction) or not isinstance(reduction, Reduction):
            return False
        count = ex.prod(ex.size_of(v) for v in node.dims)
        if count == 1 or ordered_vars(node)[-1] not in node.rdims:
            return False
        candidates = mappings(reduction, count, any_order=True)
        return not isinstance(candidates, Refusal) and any(q.kind is Kind.CROSS_ROW for q in candidates)


def _buffers(p: Program, k: int) -> list[str]:
    return list(dict.fromkeys((*reads(p.nodes[k]), *writes(p.nodes[k]))))
