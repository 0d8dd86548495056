"""Calls replayed from a CUDA graph (`mode="reduce-overhead"`).

A call is run as it is the first time, recorded the second, replayed from then on. What a user gets is always memory of
its own, so a later call never overwrites it. What a forward leaves to its backward stays where the recording put it; as
long as any of it is alive, the recording rests and a second one, or the plain call, does the work.

Parameters, buffers, inputs that the graph writes and what a recorded forward left are read where they lie: their
addresses are part of the recording. Other inputs are copied into places of the recording first.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .cuda import view

ALL = 1 << 30  # `user_outputs` of a graph without a backward
MOST_RESTING = 2  # recordings of the same sizes, of which all but one wait for a backward
log = logging.getLogger(__name__)

Call = Callable[[list[Any]], Sequence[Any]]
_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class Capture(Protocol):
    """What records; `runtime.capture.CudaCapture` but in tests."""

    @property
    def shared(self) -> Any: ...
    def pool(self) -> Any: ...
    def busy(self) -> bool: ...
    def empty(self, t: torch.Tensor) -> torch.Tensor: ...
    def record(self, call: Call, args: list[Any], pool: Any) -> tuple[Callable[[], None], Sequence[Any]]: ...


@dataclass(frozen=True)
class Signature:
    """What is known of a graph when it is compiled.

    `static`: inputs that keep their address, and from `static_from` on all. `written`: inputs that the graph writes.
    `user_outputs`: how many results, from the first, a user sees; the others go to the backward. `sized`: whether
    sizes vary from call to call. `most`: how many recordings to keep. `follows`: a backward, which is recorded only
    for what a recorded forward left.
    """

    name: str
    static: frozenset[int]
    static_from: int
    written: frozenset[int]
    user_outputs: int
    sized: bool
    most: int
    follows: bool = False

    def stays(self, k: int) -> bool:
        return k in self.static or k >= self.static_from or k in self.written


@dataclass(eq=False)
class Recording:
    """One recorded call. `fixed`: argument -> address that is part of it; `places`: argument -> its place."""

    replay: Callable[[], None]
    pool: Any
    fixed: dict[int, int]
    places: dict[int, torch.Tensor]
    copied: list[torch.Tensor] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)  # per result a Value, Input, Kept or Copied
    kept: list[int] = field(default_factory=list)  # storages that a backward reads
    at_rest: int = 0  # references to them that are our own

    def resting(self) -> bool:
        """Whether a result of an earlier call, left for its backward, is still alive."""
        return bool(self.kept) and sum(map(_use_count, self.kept)) > self.at_rest

    def fits(self, args: list[Any]) -> bool:
        return all(args[k].data_ptr() == at for k, at in self.fixed.items())


@dataclass(frozen=True)
class Value:
    """A result that is no tensor: the same in every call of these sizes."""

    value: Any


@dataclass(frozen=True)
class Input:
    """A result that is a view of an argument."""

    number: int
    geometry: tuple[Any, Any, Any]


@dataclass(frozen=True)
class Kept:
    """A result that stays in its place."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Copied:
    """A result that is copied out: a view of copy `number`."""

    number: int
    geometry: tuple[Any, Any, Any]


# address of what a recorded forward left in its pool -> that recording
_left: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()
# the same of parameters that it handed on
_passed: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()


def _geometry(t: torch.Tensor, start: int) -> tuple[Any, Any, Any]:
    return tuple(t.size()), t.stride(), t.storage_offset() - start


def _cdata(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


alive: weakref.WeakSet[Recorded] = weakref.WeakSet()


class Recorded:
    """`call`, replayed. Takes one list of inputs, which it empties. `reason`: why recording was given up, or ''."""

    def __init__(self, call: Call, signature: Signature, capture: Capture) -> None:
        self._boxed_call = True  # of the instance: what wraps a call copies its attributes
        self.call, self.signature, self.capture = call, signature, capture
        self.check: Callable[[], None] | None = getattr(call, "check", None)
        self.recordings: dict[Any, list[Recording]] = {}
        self.reason = ""
        self.lock = threading.Lock()
        alive.add(self)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self.reason or self.capture.busy() or not self.lock.acquire(blocking=False):
            return self.call(args)
        try:
            found = self._find(args)
            return self.call(args) if found is None else self._run(found, args)
        finally:
            self.lock.release()

    def _find(self, args: list[Any]) -> Recording | None:
        """The recording for these arguments, made now if this is the second such call."""
        key = self._key(args)
        if key not in self.recordings:
            if sum(map(len, self.recordings.values())) < self.signature.most:
                self.recordings[key] = []
            return None
        known = self.recordings[key]
        fitting = [r for r in known if r.fits(args)]
        for r in fitting:
            if not r.resting():
                return r
        if self.signature.follows and not any(isinstance(a, torch.Tensor) and a.data_ptr() in _left for a in args):
            return None
        if len(fitting) >= MOST_RESTING or sum(map(len, self.recordings.values())) >= self.signature.most:
            return None
        try:
            made = self._record(args)
        except Exception as cause:
            self.reason = f"{type(cause).__name__}: {cause}"
            log.info("%s is not replayed from a CUDA graph: %s", self.signature.name, self.reason)
            return None
        known.append(made)
        return made

    def _key(self, args: list[Any]) -> Any:
        if not self.signature.sized:
            return ()
        stays = self.signature.stays
        return tuple(
            a if not isinstance(a, torch.Tensor) else () if stays(k) else tuple(a.size()) for k, a in enumerate(args)
        )

    def _record(self, args: list[Any]) -> Recording:
        fixed: dict[int, int] = {}
        places: dict[int, torch.Tensor] = {}
        forward: Recording | None = None
        given = list(args)
        for k, a in enumerate(args):
            if not isinstance(a, torch.Tensor) or a.numel() == 0:
                continue
            at = a.data_ptr()
            forward = forward or _left.get(at)
            if self.signature.stays(k) or at in _left or at in _passed:
                fixed[k] = at
                continue
            with torch.inference_mode(False):
                given[k] = places[k] = self.capture.empty(a)
        made = Recording(lambda: None, self._pool(forward), fixed, places)
        made.replay, outputs = self.capture.record(self.call, list(given), made.pool)
        self._sort_results(made, given, outputs)
        del outputs, given  # what they refer to must not count below
        made.at_rest = sum(map(_use_count, made.kept))
        return made

    def _pool(self, forward: Recording | None) -> Any:
        """Where a recording's memory comes from: that of its forward, one of its own if it leaves anything, any."""
        if forward is not None:
            return forward.pool
        return self.capture.shared if self.signature.user_outputs == ALL else self.capture.pool()

    def _sort_results(self, r: Recording, given: list[Any], outputs: Sequence[Any]) -> None:
        owners = {_cdata(a): k for k, a in enumerate(given) if isinstance(a, torch.Tensor)}
        copies: dict[int, int] = {}
        kept: dict[int, torch.Tensor] = {}
        for n, out in enumerate(outputs):
            if not isinstance(out, torch.Tensor):
                r.results.append(Value(out))
                continue
            storage, own = _cdata(out), n < self.signature.user_outputs
            number = owners.get(storage)
            if number is not None and (own or number in r.fixed):
                r.results.append(Input(number, _geometry(out, given[number].storage_offset())))
                if not own:
                    _passed[out.data_ptr()] = r
            elif own:
                at = copies.setdefault(storage, len(copies))
                if at == len(r.copied):
                    r.copied.append(_whole(out))
                r.results.append(Copied(at, _geometry(out, 0)))
            else:
                kept.setdefault(storage, out)
                r.results.append(Kept(out))
                if out.numel():
                    _left[out.data_ptr()] = r
        r.kept = list(kept)

    def _run(self, r: Recording, args: list[Any]) -> Sequence[Any]:
        if self.check is not None:
            self.check()
        with torch.no_grad():
            for k, place in r.places.items():
                _copy(place, args[k])
            r.replay()
            fresh = [self.capture.empty(t) for t in r.copied]
            if fresh:
                torch._foreach_copy_(fresh, r.copied)
        out = [_result(x, args, fresh) for x in r.results]
        args.clear()
        return out


def _copy(place: torch.Tensor, a: torch.Tensor) -> None:
    """Copy values; a stride of 0 is one value in memory."""
    for axis, (n, step) in enumerate(zip(place.size(), place.stride(), strict=True)):
        if step == 0 and n > 1:
            place, a = place.narrow(axis, 0, 1), a.narrow(axis, 0, 1)
    place.copy_(a)


def _whole(out: torch.Tensor) -> torch.Tensor:
    """All of a result's storage as one row of its dtype, so that several views of it stay views of one another."""
    n = out.untyped_storage().nbytes() // out.dtype.itemsize
    return view(out, (n,), (1,), -out.storage_offset())


def _result(x: Any, args: list[Any], fresh: list[torch.Tensor]) -> Any:
    match x:
        case Copied(number, (sizes, strides, offset)):
            return view(fresh[number], sizes, strides, offset)
        case Kept(t):
            return view(t, t.size(), t.stride(), 0)
        case Input(number, (sizes, strides, offset)):
            a = args[number]
            if offset == 0 and a.size() == sizes and a.stride() == strides:
                return a
            return view(a, sizes, strides, offset)
        case Value(value):
            return value
    raise AssertionError(x)
