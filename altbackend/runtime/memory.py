"""The memory plan: offsets of temporaries in one arena, by lifetime."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

ALIGN = 64  # bytes: one cache line, and the widest vector


def plan(blocks: Sequence[tuple[int, int, int]], reuse: bool = True) -> tuple[list[int], int]:
    """Offsets in bytes for `(nbytes, first step, last step)` blocks, and the arena's size.

    Largest first, each at the lowest gap among the blocks already placed whose lifetimes meet its own
    (greedy by size; Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020).
    """
    offsets = [0] * len(blocks)
    placed: list[tuple[int, int, int]] = []  # (offset, end, block), by offset
    top = 0
    for k in sorted(range(len(blocks)), key=lambda i: (-blocks[i][0], i)):
        nbytes, first, last = blocks[k]
        size = -(-nbytes // ALIGN) * ALIGN
        at = 0
        for start, end, other in placed:
            _, begin, until = blocks[other]
            if reuse and (until < first or last < begin):
                continue
            if start - at >= size:
                break
            at = max(at, end)
        offsets[k] = at
        insort(placed, (at, at + size, k))
        top = max(top, at + size)
    return offsets, top
