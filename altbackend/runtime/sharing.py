"""Checks of inputs that share memory: a graph that writes an input is valid only if inputs overlap as when traced.

torch guards neither overlap nor storage offsets, unless sizes are symbolic. Graphs that write no input need no check.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import methodcaller

import torch

from altbackend.lazy_dataclass import dataclass

from .boxed import Function, Values

Call = Function
Span = tuple[int, int, int]  # first byte, one past the last byte, number of the input
_overlapping: Callable[..., set[int]] = torch._C._dynamo.guards.compute_overlapping_tensors
_address = methodcaller("data_ptr")


@dataclass(frozen=True)
class Watch:
    """The inputs that a graph writes, and how inputs may overlap.

    `written`: inputs whose memory the graph writes. `static`: those whose addresses do not change, mostly parameters.
    `relation`: the result of `relation_of` for the traced inputs, if overlapping inputs were merged for the graph;
    the inputs of a call must have the same one. Without it, no written input may overlap another one. Two static
    inputs are assumed to lie as they did.
    """

    written: frozenset[int]
    static: frozenset[int] = frozenset()
    relation: tuple[object, ...] | None = None


def watched(call: Call, watch: Watch, on_overlap: Call, lifted: tuple[object, ...] = ()) -> Call:
    """Return `call`, which gives inputs that overlap in another way than the traced ones to `on_overlap`.

    `lifted` holds the tensors that stand before the inputs where inputs are numbered. The check costs some
    microseconds per input that is not static, and a fraction of one per static input.
    """
    if watch.relation is not None:
        relation = watch.relation

        def related(*args: object) -> object:
            return call(*args) if relation_of((*lifted, *args)) == relation else on_overlap(*args)

        return related
    static = _Static(watch)

    def run(*args: object) -> object:
        return call(*args) if static.apart((*lifted, *args)) else on_overlap(*args)

    return run if watch.written else call


class _Static:
    """The check that no written input overlaps another. Its result for static inputs is reused while addresses stay."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        # if the graph writes only static inputs, only these need a check
        self.static = sorted(watch.static if watch.written - watch.static else watch.static & watch.written)
        self.moving: list[int] | None = None
        self.seen: tuple[tuple[int, ...], tuple[Span, ...], list[int], list[int]] = ((), (), [], [])

    def apart(self, args: Values) -> bool:
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
            k = bisect_left(begins, m[1])  # spans from k on begin behind it
            if k and ends[k - 1] > m[0] and not _fine(m, spans[:k], args, written):
                return False
        return True

    def _look(self, addresses: tuple[int, ...], args: Values) -> None:
        spans = tuple(sorted(span(args[k], k) for k in self.static))
        ends: list[int] = []
        for s in spans:
            ends.append(max(s[1], ends[-1] if ends else 0))  # the largest end so far
        self.seen = addresses, spans, [s[0] for s in spans], ends


def _fine(one: Span, others: Sequence[Span], args: Values, written: frozenset[int]) -> bool:
    """Return whether an input overlaps no other one, except where the graph writes neither."""
    for other in others:
        if other[1] <= one[0] or other[0] >= one[1] or not {one[2], other[2]} & written:
            continue
        pair = args[one[2]].detach(), args[other[2]].detach()
        if pair[0].untyped_storage()._cdata != pair[1].untyped_storage()._cdata or _overlapping(pair, symbolic=False):
            return False
    return True


def span(t: torch.Tensor, number: int) -> Span:
    """Return the bytes from the first to the last element of a tensor; an empty span without elements or strides."""
    if t.layout != torch.strided or not t.numel():
        return 0, 0, number
    begin = t.data_ptr()
    return begin, begin + t.itemsize * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))), number


def relation_of(args: Values) -> tuple[object, ...]:
    """Return, for each input, the first input with the same storage; its offset there and the storage's geometry.

    An input whose storage no other has gives None. Works on fake tensors too.
    """
    keys = [t.untyped_storage()._cdata if _strided(t) else None for t in args]
    out: list[object] = []
    for t, key in zip(args, keys, strict=True):
        if key is None or keys.count(key) == 1:
            out.append(None)
            continue
        base = t._base
        extent = t.untyped_storage().nbytes() if base is None else (base.shape, base.stride(), base.storage_offset())
        out.append((keys.index(key), t.storage_offset(), extent))
    return tuple(out)


def in_one_storage(args: Values) -> bool:
    """Return whether tensors that overlap in memory are views of one torch storage."""
    spans = sorted(span(t, k) for k, t in enumerate(args) if _strided(t))
    last: list[Span] = []
    for s in spans:
        last = [x for x in last if x[1] > s[0]]
        if any(args[x[2]].untyped_storage()._cdata != args[s[2]].untyped_storage()._cdata for x in last):
            return False
        last.append(s)
    return True


def _strided(t: object) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided
