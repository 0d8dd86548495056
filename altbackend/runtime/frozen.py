"""Results that depend only on parameters, kept between calls as long as nothing has written what they came from.

`Frozen` runs a graph's prologue and keeps its results for each set of parameters. What guards them is a `Watch`:
`by_pages` has the kernel note every write (page_guard.py); `Versions` (option `freezing=True`, where pages cannot be
guarded) trusts torch's counters, and what escapes.py sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch

from . import escapes, page_guard

MOST_SETS = 1024  # sets of parameters whose results one graph keeps
MOST_CHANGES = 2  # in a row, until guarding no longer pays
LONGEST_PAUSE = 64  # calls without a guard, when parameters change between all calls

Sources = Sequence[torch.Tensor]
Addresses = tuple[int, ...]
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_alive: WeakSet[Frozen] = WeakSet()


class Watched(Protocol):
    """Guards one set of tensors."""

    def unchanged(self, sources: Sources) -> bool:
        """Whether none was written since this was made, or last renewed."""

    def renew(self, sources: Sources) -> None:
        """Take the tensors as they are now for unchanged. Raises NotGuardable."""


Watch = Callable[[Sources], Watched]  # raises page_guard.NotGuardable


def refresh_all() -> None:
    """Compute everything that depends only on parameters anew at the next call of each compiled graph.

    Needed only with `freezing=True`, after a write that neither torch counts nor Python sees.
    """
    for each in list(_alive):
        each.refresh()


def by_pages(library: Callable[[], ctypes.CDLL]) -> Watch:
    """Guards by the kernel's notes. `library` gives the compiled check; it may raise whatever a build raises."""

    def watch(sources: Sources) -> Watched:
        if any(t.layout != torch.strided or t.device.type != "cpu" for t in sources):
            raise page_guard.NotGuardable("memory that is not in strides on a CPU")
        if torch.cuda.is_initialized() and any(t.is_pinned() for t in sources):  # type: ignore[no-untyped-call]
            raise page_guard.NotGuardable("memory that a GPU may write")
        return page_guard.Guard(sources, library())

    return watch


class Versions:
    """Guards by version counters and strides, optimizer steps, and by who has taken the memory.

    Of tensors that stay at their addresses, in storages that live. Raises NotGuardable for tensors that torch counts
    nothing of.
    """

    def __init__(self, sources: Sources) -> None:
        if any(t.is_inference() for t in sources):
            raise page_guard.NotGuardable("an inference tensor has no version counter")
        self.storages = escapes.watch(sources)
        self.renew(sources)

    def unchanged(self, sources: Sources) -> bool:
        return self.state == _counters(sources)

    def renew(self, sources: Sources) -> None:
        if escapes.handed_out(self.storages):
            raise page_guard.NotGuardable("a tensor whose memory Python code holds")
        self.state = _counters(sources)


def by_pages_or_versions(library: Callable[[], ctypes.CDLL]) -> Watch:
    """Guards by the kernel's notes where that is possible, else by what torch counts."""
    pages = by_pages(library)

    def watch(sources: Sources) -> Watched:
        try:
            return pages(sources)
        except page_guard.NotGuardable:
            return Versions(sources)

    return watch


@dataclass(eq=False)
class Kept:
    """Results for one set of parameters. `changes`: in a row, with no call between that found none.

    `pause`: calls for which no guard is made. `owners`: references to the parameters' storages.
    """

    results: Sequence[Any] = ()
    watched: Watched | None = None
    changes: int = 0
    pause: int = 0
    owners: tuple[Any, ...] = ()


class Frozen:
    """Calls `main` on the inputs numbered `kept` followed by the prologue's results.

    `watch` guards the inputs numbered `watched`, which the prologue takes; where it raises NotGuardable the prologue
    runs in every call. `in_place`: new results take the storage of the old ones, whose addresses a CUDA graph holds.
    `reason`: why results are not kept, or "".
    """

    def __init__(
        self,
        main: Callable[[list[Any]], Sequence[Any]],
        prologue: Callable[..., Sequence[Any]],
        kept: tuple[int, ...],
        watched: tuple[int, ...],
        watch: Watch,
        in_place: bool = False,
    ) -> None:
        self._boxed_call = True  # of the instance: what wraps a call copies its attributes
        self.main, self.prologue, self.kept, self.watch, self.in_place = main, prologue, kept, watch, in_place
        first, *more = watched
        pick = operator.itemgetter(first, *more)
        self._pick: Callable[[list[Any]], Sources] = pick if more else lambda args: (pick(args),)
        self.sets: dict[Addresses, Kept] = {}
        self.reason = ""
        _alive.add(self)

    def refresh(self) -> None:
        """Forget the results; the next call computes them anew."""
        for each in self.sets.values():
            each.watched = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        results = self.results(args)
        inner = [args[k] for k in self.kept]
        args.clear()
        inner += results
        return self.main(inner)

    def results(self, args: list[Any]) -> Sequence[Any]:
        """The prologue's results for these inputs, computed if they are not kept or may have changed."""
        sources = self._pick(args)
        addresses = tuple(map(_address, sources))
        held = self.sets.get(addresses)
        if held is None:
            held = self._new(sources, addresses)
        elif held.watched is not None and held.watched.unchanged(sources):
            held.changes = 0
            return held.results
        watched = self._guarded(held, sources)
        with torch.no_grad():
            results = self.prologue(*sources)
            if self.in_place:
                results = _in_place(held.results, results, sources)
        held.results, held.watched = results if watched or self.in_place else (), watched
        return results

    def _new(self, sources: Sources, addresses: Addresses) -> Kept:
        made = Kept()
        if len(self.sets) >= MOST_SETS:
            self.sets.pop(next(iter(self.sets)), None)
        self.sets[addresses] = made
        frozen, kept = ref(self), ref(made)

        def gone(_: object) -> None:
            """A parameter's memory is freed: results that come from it are freed too."""
            own = frozen()
            if own is not None and own.sets.get(addresses) is kept():
                own.sets.pop(addresses, None)

        made.owners = tuple(ref(t.untyped_storage(), gone) for t in sources if t.layout == torch.strided)
        return made

    def _guarded(self, held: Kept, sources: Sources) -> Watched | None:
        """A guard that holds from now on; None where there is none, or where guarding would not pay."""
        old, held.watched = held.watched, None
        if held.pause:
            held.pause -= 1
            return None
        held.changes += 1
        if held.changes > MOST_CHANGES:
            held.pause = min(1 << (held.changes - MOST_CHANGES), LONGEST_PAUSE)
            return None
        if old is not None:
            with contextlib.suppress(page_guard.NotGuardable):
                old.renew(sources)
                return old
        try:
            return self.watch(sources)
        except page_guard.NotGuardable as cause:
            self.reason, held.pause = str(cause), LONGEST_PAUSE
            return None


def _counters(tensors: Sources) -> tuple[Any, ...]:
    return escapes.events, [t._version for t in tensors], [t.stride() for t in tensors]


def _in_place(old: Sequence[Any], new: Sequence[Any], sources: Sources) -> Sequence[Any]:
    """`new`, moved into the storage of `old` where that is no parameter's own and has the same geometry."""
    shared = {t.untyped_storage().data_ptr() for t in sources}

    def stays(a: torch.Tensor, b: torch.Tensor) -> bool:
        apart = not {a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()} & shared
        return apart and (a.size(), a.stride(), a.dtype) == (b.size(), b.stride(), b.dtype)

    if len(old) != len(new):
        return new
    return [a.copy_(b) if stays(a, b) else b for a, b in zip(old, new, strict=True)]
