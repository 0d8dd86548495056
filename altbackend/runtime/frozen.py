"""The weight prologue: results that depend only on parameters, cached between calls until a parameter is written.

`Frozen` runs a graph's weight prologue and caches its results for each set of parameters. A `Watch` guards the
parameters: `by_pages` has the kernel note every write (page_guard.py). `Versions` (option `freezing=True`, where pages
cannot be guarded) relies on torch's version counters and on escapes.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Protocol
from weakref import WeakSet, ref

import torch

from altbackend.lazy_dataclass import dataclass

from ..compat.torch_api import unannotated
from . import discarded, escapes, page_guard
from .boxed import Args, BoxedCall, Values, boxed

MOST_SETS = 1024  # sets of parameters whose results one graph caches
MOST_CHANGES = 2  # changes in a row after which guarding no longer pays
LONGEST_PAUSE = 64  # calls without a guard, if parameters change between all calls

Sources = Sequence[torch.Tensor]
Addresses = tuple[int, ...]
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_alive: WeakSet[Frozen] = WeakSet()


class ParameterGuard(Protocol):
    """A guard of one set of tensors."""

    def unchanged(self, sources: Sources) -> bool:
        """Return whether no tensor was written since the guard was made or last renewed."""

    def renew(self, sources: Sources) -> None:
        """Take the tensors' present values as unchanged. Raise NotGuardable."""


Watch = Callable[[Sources], ParameterGuard]  # raises page_guard.NotGuardable


def refresh_all() -> None:
    """Recompute everything that depends only on parameters at the next call of each compiled graph.

    Needed only with `freezing=True`, after a write that neither torch counts nor escapes.py detects.
    """
    for frozen in list(_alive):
        frozen.refresh()


def by_pages(library: Callable[[], ctypes.CDLL]) -> Watch:
    """Return the watch that uses the kernel's notes of writes.

    `library` returns the compiled check; it may raise the errors of a build.
    """

    def watch(sources: Sources) -> ParameterGuard:
        if any(t.layout != torch.strided or t.device.type != "cpu" for t in sources):
            raise page_guard.NotGuardable("memory that is not strided memory of a CPU")
        if unannotated(torch.cuda.is_initialized)() and any(unannotated(t.is_pinned)() for t in sources):
            raise page_guard.NotGuardable("memory that a GPU may write")
        return page_guard.Guard(sources, library())

    return watch


class Versions:
    """Guards tensors by version counters, strides, optimizer steps, and detection of code that takes their memory.

    The tensors must stay at their addresses in living storages. Raise NotGuardable for tensors without a counter.
    """

    def __init__(self, sources: Sources) -> None:
        if any(t.is_inference() for t in sources):
            raise page_guard.NotGuardable("an inference tensor has no version counter")
        self.storages = escapes.watch(sources)
        self.renew(sources)

    def unchanged(self, sources: Sources) -> bool:
        return self.state == _counters(sources)

    def renew(self, sources: Sources) -> None:
        if escapes.is_exposed(self.storages):
            raise page_guard.NotGuardable("a tensor whose memory Python code holds")
        self.state = _counters(sources)


def by_pages_or_versions(library: Callable[[], ctypes.CDLL]) -> Watch:
    """Return the watch that uses the kernel's notes of writes where possible, and version counters elsewhere."""
    pages = by_pages(library)

    def watch(sources: Sources) -> ParameterGuard:
        try:
            return pages(sources)
        except page_guard.NotGuardable:
            return Versions(sources)

    return watch


@dataclass(eq=False)
class CachedResults:
    """The results for one set of parameters.

    `changes` counts changes that guards found in a row, with no unchanged call between them. `pause`: the number of
    calls for which no guard is made; then one is made again. `owners`: references to the parameters' storages.
    """

    results: Values = ()
    guard: ParameterGuard | None = None
    changes: int = 0
    pause: int = 0
    owners: tuple[object, ...] = ()
    version: int = 0  # counts guards that were taken away
    lock: AbstractContextManager[bool] = field(default_factory=threading.RLock)


class Frozen:
    """Calls `main` on the inputs numbered `main_inputs`, followed by the results of the weight prologue.

    `watch` guards the inputs numbered `prologue_inputs`, which the prologue takes. If it raises NotGuardable, the
    prologue runs in every call. `in_place`: new results take the storage of the old ones, whose addresses a CUDA
    graph contains. `reason`: why results are not cached, or "".
    """

    def __init__(
        self,
        main: BoxedCall,
        prologue: Callable[..., Sequence[object]],
        main_inputs: tuple[int, ...],
        prologue_inputs: tuple[int, ...],
        watch: Watch,
        in_place: bool = False,
    ) -> None:
        boxed(self)
        self.main, self.prologue, self.main_inputs = main, prologue, main_inputs
        self.watch, self.in_place = watch, in_place
        first, *more = prologue_inputs
        pick = operator.itemgetter(first, *more)
        self._pick: Callable[[Args], Sources] = pick if more else lambda args: (pick(args),)
        self.sets: dict[Addresses, CachedResults] = {}
        self.final: Values | None = None  # the results, once their parameters are discarded
        self.unread: Sources = ()  # originals to release once the main graph can run
        self.reason = ""
        _alive.add(self)

    def refresh(self) -> None:
        """Drop the results; the next call recomputes them."""
        for cached in list(self.sets.values()):  # a guard may hold a parameter's last reference, and that drops its set
            cached.guard = None

    def __call__(self, args: list[object]) -> Values:
        results = self.results(args)
        main_args = [args[k] for k in self.main_inputs]
        if self.unread:
            self._release(main_args)
        args.clear()
        main_args += results
        return self.main(main_args)

    def results(self, args: Args) -> Values:
        """Return the prologue's results for these inputs; recompute them if they are not cached or may have changed."""
        if self.final is not None:
            return self.final
        sources = self._pick(args)
        if discarded.are_originals(sources):
            with torch.no_grad():
                self.unread, self.final = sources, self.prologue(*sources)
            return self.final
        addresses = tuple(map(_address, sources))
        cached = self.sets.get(addresses)
        if cached is None:
            cached = self._new(sources, addresses)
        elif (cached_results := _unchanged(cached, sources)) is not None:
            return cached_results
        with cached.lock:
            if (cached_results := _unchanged(cached, sources)) is not None:  # another thread has recomputed them
                return cached_results
            guard = self._new_guard(cached, sources)
            if guard is not None or self.in_place:
                with torch.no_grad():
                    results = self.prologue(*sources)
                    if self.in_place:
                        results = _in_place(cached.results, results, sources)
                cached.results, cached.guard = results, guard
                return results
            cached.results = ()
        with torch.no_grad():
            return self.prologue(*sources)

    def _release(self, main_args: Args) -> None:
        """Give up the originals that only the prologue reads: its results are final."""
        read = {id(x) for x in main_args}
        unread, self.unread = self.unread, ()
        discarded.release([t for t in unread if id(t) not in read])

    def _new(self, sources: Sources, addresses: Addresses) -> CachedResults:
        cached = CachedResults()
        if len(self.sets) >= MOST_SETS:
            self.sets.pop(next(iter(self.sets)), None)
        self.sets[addresses] = cached
        frozen, weak_cached = ref(self), ref(cached)

        def drop(_: object) -> None:
            """Drop the cached results once a parameter's memory is freed."""
            owner = frozen()
            if owner is not None and owner.sets.get(addresses) is weak_cached():
                owner.sets.pop(addresses, None)

        cached.owners = tuple(ref(escapes.storage_of(t), drop) for t in sources if t.layout == torch.strided)
        return cached

    def _new_guard(self, cached: CachedResults, sources: Sources) -> ParameterGuard | None:
        """Return a guard that is valid from now on; None if memory cannot be guarded or guarding would not pay."""
        old, cached.guard = cached.guard, None
        cached.version += 1  # after the guard is taken: see `_unchanged`
        if cached.pause:
            cached.pause -= 1
            return None
        if old is not None:
            cached.changes += 1
            if cached.changes > MOST_CHANGES:
                cached.pause = min(1 << (cached.changes - MOST_CHANGES), LONGEST_PAUSE)
                return None
            with contextlib.suppress(page_guard.NotGuardable):
                old.renew(sources)
                return old
        try:
            return self.watch(sources)
        except page_guard.NotGuardable as cause:
            self.reason, cached.pause = str(cause), LONGEST_PAUSE
            return None


def _unlock_after_fork() -> None:
    """Give every set of results a new lock: a thread that held one is not in the child process."""
    for frozen in list(_alive):
        for cached in list(frozen.sets.values()):
            cached.lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock_after_fork)


def _unchanged(cached: CachedResults, sources: Sources) -> Values | None:
    """Return the results if their parameters have not changed, else None.

    Another thread may take the guard meanwhile and renew it, before it has new results. The guard then says that
    nothing has changed, and the version tells that it was taken.
    """
    version, guard = cached.version, cached.guard
    if guard is None or not guard.unchanged(sources):
        return None
    results = cached.results
    if cached.version != version:
        return None
    cached.changes = 0
    return results


def _counters(tensors: Sources) -> tuple[object, ...]:
    return escapes.events, [t._version for t in tensors], [t.stride() for t in tensors]


def _in_place(old: Values, new: Values, sources: Sources) -> Sequence[object]:
    """Return `new` moved into the storage of `old`, where that is not a parameter's and has the same geometry."""
    shared = {escapes.storage_of(t).data_ptr() for t in sources}

    def stays(a: torch.Tensor, b: torch.Tensor) -> bool:
        apart = not {escapes.storage_of(a).data_ptr(), escapes.storage_of(b).data_ptr()} & shared
        return apart and (a.size(), a.stride(), a.dtype) == (b.size(), b.stride(), b.dtype)

    if len(old) != len(new):
        return new
    return [a.copy_(b) if stays(a, b) else b for a, b in zip(old, new, strict=True)]
