"""Memory that inputs share: a graph that writes an input is right only for inputs that overlap as they did when traced.

torch guards neither overlap nor where an input begins in its storage, unless sizes are symbolic. Graphs that write no
input need no check.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

import torch

Call = Callable[..., Any]
Span = tuple[int, int, int]  # first byte, one past the last byte, number of the input
_overlapping: Callable[..., set[int]] = torch._C._dynamo.guards.compute_overlapping_tensors
_address = methodcaller("data_ptr")


@dataclass(frozen=True)
class Watch:
    """`written`: inputs whose memory the graph writes. `static`: those whose addresses stay, parameters mostly.

    `relation`: what `relation_of` gave for the inputs that were traced, if some that overlap were merged for the
    graph; it must be the same then. Otherwise no written input may overlap another one. Two static inputs are taken to
    lie as they did.
    """

    written: frozenset[int]
    static: frozenset[int] = frozenset()
    relation: tuple[Any, ...] | None = None


def watched(call: Call, watch: Watch, otherwise: Call, before: tuple[Any, ...] = ()) -> Call:
    """`call`, or `otherwise` for inputs that overlap in another way than those that it was compiled for.

    `before`: what stands before the inputs where these are counted.

    Costs a call some microseconds for each input that is not static, and a fraction of one for each static one.
    """
    if watch.relation is not None:
        relation = watch.relation

        def related(*args: Any) -> Any:
            return call(*args) if relation_of((*before, *args)) == relation else otherwise(*args)

        return related
    static = _Static(watch)

    def run(*args: Any) -> Any:
        return call(*args) if static.apart((*before, *args)) else otherwise(*args)

    return run if watch.written else call


class _Static:
    """The check that written inputs overlap no others. What it finds of static ones holds while their addresses do."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        # where no other input is written, only those static ones count that are
        self.static = sorted(watch.static if watch.written - watch.static else watch.static & watch.written)
        self.moving: list[int] | None = None
        self.seen: tuple[tuple[int, ...], tuple[Span, ...], list[int], list[int]] = ((), (), [], [])

    def apart(self, args: Sequence[Any]) -> bool:
        written, static = self.watch.written, self.watch.static
        if self.moving is None:
            self.moving = [k for k, t in enumerate(args) if k not in static and isinstance(t, torch.Tensor)]
        if not self.moving:
            return True
        moving = sorted(span(args[k], k) for k in self.moving)
        end = -1
        last: list[Span] = []
        for m in moving:
            if m[0] < end and not _fine(m, last, args, written):
                return False
            last = [*(x for x in last if x[1] > m[0]), m]
            end = max(end, m[1])
        addresses = tuple(map(_address, [args[k] for k in self.static]))
        if addresses != self.seen[0]:
            self._look(addresses, args)
        _, spans, begins, ends = self.seen
        for m in moving:
            k = bisect_left(begins, m[1])  # those from k on begin behind it
            if k and ends[k - 1] > m[0] and not _fine(m, spans[:k], args, written):
                return False
        return True

    def _look(self, addresses: tuple[int, ...], args: Sequence[Any]) -> None:
        spans = tuple(sorted(span(args[k], k) for k in self.static))
        ends: list[int] = []
        for s in spans:
            ends.append(max(s[1], ends[-1] if ends else 0))  # of all so far
        self.seen = addresses, spans, [s[0] for s in spans], ends


def _fine(one: Span, others: Sequence[Span], args: Sequence[Any], written: frozenset[int]) -> bool:
    """Whether an input overlaps none of others of which it, or the other, is written."""
    for other in others:
        if other[1] <= one[0] or other[0] >= one[1] or not {one[2], other[2]} & written:
            continue
        pair = args[one[2]].detach(), args[other[2]].detach()
        if pair[0].untyped_storage()._cdata != pair[1].untyped_storage()._cdata or _overlapping(pair, symbolic=False):
            return False
    return True


def span(t: torch.Tensor, number: int) -> Span:
    """The bytes from the first to the last element of a tensor; none without elements or strides."""
    if t.layout != torch.strided or not t.numel():
        return 0, 0, number
    begin = t.data_ptr()
    return begin, begin + t.itemsize * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))), number


def relation_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """Per input: the first one with the same storage; if there are several, its place there and what the storage is of.

    Works on a tracer's stand-ins too.
    """
    keys = [t.untyped_storage()._cdata if _strided(t) else None for t in args]
    out: list[Any] = []
    for t, key in zip(args, keys, strict=True):
        if key is None or keys.count(key) == 1:
            out.append(None)
            continue
        base = t._base
        whole = t.untyped_storage().nbytes() if base is None else (base.shape, base.stride(), base.storage_offset())
        out.append((keys.index(key), t.storage_offset(), whole))
    return tuple(out)


def in_one_storage(args: Sequence[Any]) -> bool:
    """Whether tensors that overlap in memory are views of one storage, as torch sees it."""
    spans = sorted(span(t, k) for k, t in enumerate(args) if _strided(t))
    last: list[Span] = []
    for s in spans:
        last = [x for x in last if x[1] > s[0]]
        if any(args[x[2]].untyped_storage()._cdata != args[s[2]].untyped_storage()._cdata for x in last):
            return False
        last.append(s)
    return True


def _strided(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided
