"""The memory plan: offsets of temporaries in one arena, chosen by their lifetimes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

ALIGN = 64  # bytes: one cache line, and the widest vector


def plan(blocks: Sequence[tuple[int, int, int]], reuse: bool = True) -> tuple[list[int], int]:
    """Return offsets in bytes for `(nbytes, first step, last step)` blocks, and the arena's size in bytes.

    Blocks are placed largest first, each at the lowest gap between placed blocks with an overlapping lifetime
    (greedy by size; Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020).
    """
    offsets = [0] * len(blocks)
    top = 0
    placed = _Placed([b[1] for b in blocks], [b[2] for b in blocks])
    for k in sorted(range(len(blocks)), key=lambda i: (-blocks[i][0], i)):
        size = -(-blocks[k][0] // ALIGN) * ALIGN
        offset = 0 if reuse else top
        for start, end in placed.meeting(k) if reuse else ():
            if start - offset >= size:
                break
            offset = max(offset, end)
        offsets[k] = offset
        placed.add(k, offset, offset + size)
        top = max(top, offset + size)
    return offsets, top


class _Placed:
    """Placed blocks, indexed by their first step and by an interval tree of steps.

    Span `s` of the tree covers the spans 2s and 2s + 1. A lifetime is stored in the fewest spans that cover it.
    """

    def __init__(self, first: Sequence[int], last: Sequence[int]) -> None:
        self.first, self.last = first, last
        self.leaves = 1 << max(last, default=0).bit_length()
        self.spans: dict[int, list[tuple[int, int, int]]] = {}
        self.begun: list[tuple[int, tuple[int, int, int]]] = []

    def add(self, k: int, start: int, end: int) -> None:
        block = (start, end, k)
        insort(self.begun, (self.first[k], block))
        low, high = self.first[k] + self.leaves, self.last[k] + self.leaves + 1
        while low < high:
            if low & 1:
                self.spans.setdefault(low, []).append(block)
                low += 1
            if high & 1:
                high -= 1
                self.spans.setdefault(high, []).append(block)
            low, high = low >> 1, high >> 1

    def meeting(self, k: int) -> list[tuple[int, int]]:
        """Return (start, end) in bytes of the blocks whose lifetime overlaps that of block `k`, in order of start."""
        after = bisect_left(self.begun, (self.first[k] + 1,))
        blocks = [block for _, block in self.begun[after : bisect_left(self.begun, (self.last[k] + 1,))]]
        span = self.first[k] + self.leaves
        while span:
            blocks += self.spans.get(span, ())
            span >>= 1
        return [(start, end) for start, end, _ in sorted(blocks)]
