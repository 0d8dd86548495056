"""Choose the small temporaries of a GPU's program that share one allocation.

An allocation costs the host nearly as much as a launch, and a kernel on little data is done before the next launch.
Only kernels use these temporaries, all on the stream of the call, so that the memory of a dead one is free at once.
"""

from __future__ import annotations

from dataclasses import field

from altbackend.lazy_dataclass import dataclass

from ...ir.loops import Extern, View, reads, writes
from ...runtime import memory
from .cuda_program import CudaPlan

LARGEST = (1 << 18, 1 << 16, 1 << 14)  # bytes of one temporary; the first limit whose total fits is taken
MOST_BYTES = 8 << 20  # of the allocation, which lives as long as the call
ALIGNMENT = 256  # bytes, as the allocator aligns tensors


@dataclass(frozen=True)
class SmallBuffers:
    """The offset in bytes of each temporary in the shared allocation of `nbytes` bytes."""

    offsets: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0


def small_buffers(planned: CudaPlan) -> SmallBuffers:
    """Return the temporaries that share an allocation; none where fewer than two qualify."""
    lifetimes = _lifetimes(planned)
    for largest in LARGEST:
        blocks = [(b, n, *lifetimes[b]) for b in lifetimes if 0 < (n := _bytes(planned, b)) <= largest]
        offsets, total = memory.plan([(-(-n // ALIGNMENT) * ALIGNMENT, first, last) for _, n, first, last in blocks])
        if len(blocks) > 1 and total <= MOST_BYTES:
            return SmallBuffers(dict(zip((b for b, *_ in blocks), offsets, strict=True)), total)
    return SmallBuffers()


def _bytes(planned: CudaPlan, b: str) -> int:
    """Return the size of a buffer; 0 where only the call decides it."""
    buffer = planned.program.buffers[b]
    return buffer.extent * buffer.dtype.itemsize if isinstance(buffer.extent, int) else 0


def _lifetimes(planned: CudaPlan) -> dict[str, tuple[int, int]]:
    """Return the first and last step of each temporary that kernels alone use, and that no kernel wants zeroed."""
    p, takes = planned.program, planned.locations.takes
    spans: dict[str, tuple[int, int]] = {}
    others = {o.buffer for o in p.outputs if isinstance(o, View)}.union(planned.viewed, takes, takes.values())
    for k, s in enumerate(planned.steps):
        if isinstance(s, Extern):
            others.update((*reads(s), *writes(s)))
            continue
        others.update(b for q, b in zip(s.params, s.buffers, strict=True) if q.name in s.kernel.zeroed)
        for b in s.all_buffers:
            spans[b] = (spans.get(b, (k, k))[0], k)
    fresh = planned.locations.fresh
    return {b: span for b, span in spans.items() if b in fresh and b not in others and _is_on_gpu(planned, b)}


def _is_on_gpu(planned: CudaPlan, b: str) -> bool:
    return planned.program.buffers[b].device.type == "cuda"
