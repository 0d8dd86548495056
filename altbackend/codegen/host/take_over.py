"""Choose which new buffers take over the memory of dying ones: the lifetimes of a host program's buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field

from altbackend.lazy_dataclass import dataclass

from ...ir.loops import Buffer, Program

MIN_BYTES = 1 << 14  # the check and the view of a smaller buffer cost more than its memory


@dataclass
class Uses:
    """The first and last step that uses each buffer, directly or through an alias."""

    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    aliased: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def add(self, k: int, buffers: Sequence[str]) -> None:
        """Enter step number `k`, which uses `buffers`."""
        for b in buffers:
            for used in (b, *self._below(b)):
                self.first.setdefault(used, k)
                self.last[used] = k

    def _below(self, b: str) -> list[str]:
        """Return the buffers of which `b` may be a view."""
        below: list[str] = []
        for a in self.aliased.get(b, ()):
            below += [a, *self._below(a)]
        return below


@dataclass(frozen=True)
class Writes:
    """The buffers that the host allocates for one step. `in_place`: pairs (read, written) that may share memory."""

    allocated: tuple[str, ...]
    in_place: tuple[tuple[str, str], ...] = ()


def take_overs(
    p: Program, steps: Sequence[Writes], uses: Uses, in_place_only: bool, own: Collection[str] = ()
) -> dict[str, str]:
    """Return the buffers that reuse the memory of a dead buffer, each with the name of the dead one.

    The dead buffer is a donated input, or a temporary in `own` that is a tensor of its own. The kernel that writes the
    new buffer is the last to read the dead one, and works in place. Unless `in_place_only`, the new buffer may also be
    allocated after the last use of the dead one. Both have the same number of bytes.
    """
    takes: dict[str, str] = {}
    given = [b for b, buffer in p.buffers.items() if buffer.donated or b in own]
    free = {b for b in given if b in uses.last and _is_large(p.buffers[b])}
    for k, s in enumerate(steps):
        for a, b in s.in_place:
            if a in free and uses.last[a] == k and uses.first[b] == k and b not in takes:
                takes[b] = a
                free.discard(a)
        for b in () if in_place_only else s.allocated:
            if uses.first.get(b) == k and b not in takes and (a_dead := _dead(p, b, free, uses.last, k)):
                takes[b] = a_dead
                free.discard(a_dead)
    return takes


def _dead(p: Program, b: str, free: set[str], last: Mapping[str, int], k: int) -> str:
    """Return a donated input whose last use is before step `k` and that has the bytes of `b`, or ""."""
    return next((a for a in sorted(free) if last[a] < k and same_bytes(p.buffers[a], p.buffers[b])), "")


def same_bytes(a: Buffer, b: Buffer) -> bool:
    """Return whether two buffers have the same dtype, device and extent."""
    return a.dtype == b.dtype and a.device == b.device and a.extent == b.extent


def _is_large(b: Buffer) -> bool:
    return not isinstance(b.extent, int) or b.extent * b.dtype.itemsize >= MIN_BYTES


def donors(p: Program, takes: Mapping[str, str]) -> list[int]:
    """Return the numbers of the inputs whose memory is taken over."""
    taken = set(takes.values())
    return [k for k, b in enumerate(p.inputs) if b in taken]
