"""Calls replayed from a CUDA graph (`mode="reduce-overhead"`).

A call runs normally the first time, is recorded the second time, and replayed from then on. A user gets results in new
memory, so that a later call never overwrites them. The values that a forward leaves for its backward stay in the
recording's memory; while any of them is alive, a second recording or the plain call does the work.

The recording contains the addresses of parameters, buffers, inputs that the graph writes, and values that a recorded
forward left. Other inputs are first copied into buffers of the recording.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Protocol

import torch

from altbackend.lazy_dataclass import dataclass

from .boxed import Args, BoxedCall, Values, boxed
from .cuda import view

ALL = 1 << 30  # `user_outputs` of a graph without a backward
MOST_RESTING = 2  # recordings of the same sizes, of which all but one wait for a backward
log = logging.getLogger(__name__)

_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class Capture(Protocol):
    """The recorder: `runtime.capture.CudaCapture` except in tests."""

    @property
    def shared(self) -> object: ...
    def pool(self) -> object: ...
    def busy(self) -> bool: ...
    def empty(self, t: torch.Tensor) -> torch.Tensor: ...
    def record(
        self, call: BoxedCall, args: list[object], pool: object
    ) -> tuple[Callable[[], None], Sequence[object]]: ...


@dataclass(frozen=True)
class Signature:
    """The properties of a graph that are known when it is compiled.

    `static`: inputs whose address does not change; inputs from `static_from` on are static too. `written`: inputs
    that the graph writes. `user_outputs`: the number of leading results that a user sees; the others go to the
    backward. `sized`: whether sizes vary between calls. `most`: the largest number of recordings. `follows`:
    whether the graph is a backward, which is recorded only for values that a recorded forward left.
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
    """One recorded call.

    `fixed` maps an argument to its recorded address, `buffers` maps the others to their buffer.
    """

    replay: Callable[[], None]
    pool: object
    fixed: dict[int, int]
    buffers: dict[int, torch.Tensor]
    copied: list[torch.Tensor] = field(default_factory=list)
    results: Args = field(default_factory=list)  # a Value, Input, Left or Copied for each result
    left: list[int] = field(default_factory=list)  # storages that a backward reads
    own_references: int = 0  # the recording's own references to them

    def resting(self) -> bool:
        """Return whether a result of an earlier call, left for its backward, is still alive."""
        return bool(self.left) and sum(map(_use_count, self.left)) > self.own_references

    def fits(self, args: Args) -> bool:
        return all(args[k].data_ptr() == at for k, at in self.fixed.items())


@dataclass(frozen=True)
class Value:
    """A result that is not a tensor: it is the same in every call of these sizes."""

    value: object


@dataclass(frozen=True)
class Input:
    """A result that is a view of an argument."""

    number: int
    geometry: tuple[object, object, object]


@dataclass(frozen=True)
class Left:
    """A result for the backward, which stays in the recording's memory."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Copied:
    """A result that is copied for the user: a view of copy `number`."""

    number: int
    geometry: tuple[object, object, object]


# address of a value that a recorded forward left in its pool -> that recording
_left: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()
# address of a parameter that a recorded forward handed on -> that recording
_passed: weakref.WeakValueDictionary[int, Recording] = weakref.WeakValueDictionary()


def _geometry(t: torch.Tensor, start: int) -> tuple[object, object, object]:
    return tuple(t.size()), t.stride(), t.storage_offset() - start


def _cdata(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


alive: weakref.WeakSet[Recorded] = weakref.WeakSet()


class Recorded:
    """A call that is replayed.

    It takes one list of inputs, which it empties. `reason` says why recording ended, or "".
    """

    def __init__(self, call: BoxedCall, signature: Signature, capture: Capture) -> None:
        boxed(self)
        self.call, self.signature, self.capture = call, signature, capture
        self.check: Callable[[], None] | None = getattr(call, "check", None)
        self.recordings: dict[object, list[Recording]] = {}
        self.reason = ""
        self.lock = threading.Lock()
        alive.add(self)

    def __call__(self, args: list[object]) -> Values:
        if self.reason or self.capture.busy() or not self.lock.acquire(blocking=False):
            return self.call(args)
        try:
            recording = self._find(args)
            return self.call(args) if recording is None else self._run(recording, args)
        finally:
            self.lock.release()

    def _find(self, args: list[object]) -> Recording | None:
        """Return the recording for these arguments, or record it if this is the second such call."""
        key = self._key(args)
        if key not in self.recordings:
            if sum(map(len, self.recordings.values())) < self.signature.most:
                self.recordings[key] = []
            return None
        recordings = self.recordings[key]
        fitting = [r for r in recordings if r.fits(args)]
        for r in fitting:
            if not r.resting():
                return r
        if self.signature.follows and not any(isinstance(a, torch.Tensor) and a.data_ptr() in _left for a in args):
            return None
        if len(fitting) >= MOST_RESTING or sum(map(len, self.recordings.values())) >= self.signature.most:
            return None
        try:
            recording = self._record(args)
        except Exception as cause:
            self.reason = f"{type(cause).__name__}: {cause}"
            log.info("%s is not replayed from a CUDA graph: %s", self.signature.name, self.reason)
            return None
        recordings.append(recording)
        return recording

    def _key(self, args: Args) -> object:
        if not self.signature.sized:
            return ()
        stays = self.signature.stays
        return tuple(
            a if not isinstance(a, torch.Tensor) else () if stays(k) else tuple(a.size()) for k, a in enumerate(args)
        )

    def _record(self, args: list[object]) -> Recording:
        fixed: dict[int, int] = {}
        buffers: dict[int, torch.Tensor] = {}
        forward: Recording | None = None
        inputs = list(args)
        for k, a in enumerate(args):
            if not isinstance(a, torch.Tensor) or a.numel() == 0:
                continue
            at = a.data_ptr()
            forward = forward or _left.get(at)
            if self.signature.stays(k) or at in _left or at in _passed:
                fixed[k] = at
                continue
            with torch.inference_mode(False):
                inputs[k] = buffers[k] = self.capture.empty(a)
        recording = Recording(lambda: None, self._pool(forward), fixed, buffers)
        recording.replay, outputs = self.capture.record(self.call, list(inputs), recording.pool)
        self._sort_results(recording, inputs, outputs)
        del outputs, inputs  # their references must not count below
        recording.own_references = sum(map(_use_count, recording.left))
        return recording

    def _pool(self, forward: Recording | None) -> object:
        """Return a recording's memory pool: its forward's, its own if it leaves values, or else the shared one."""
        if forward is not None:
            return forward.pool
        return self.capture.shared if self.signature.user_outputs == ALL else self.capture.pool()

    def _sort_results(self, r: Recording, inputs: Args, outputs: Values) -> None:
        owners = {_cdata(a): k for k, a in enumerate(inputs) if isinstance(a, torch.Tensor)}
        copies: dict[int, int] = {}
        left: dict[int, torch.Tensor] = {}
        for n, out in enumerate(outputs):
            if not isinstance(out, torch.Tensor):
                r.results.append(Value(out))
                continue
            storage, own = _cdata(out), n < self.signature.user_outputs
            number = owners.get(storage)
            if number is not None and (own or number in r.fixed):
                r.results.append(Input(number, _geometry(out, inputs[number].storage_offset())))
                if not own:
                    _passed[out.data_ptr()] = r
            elif own:
                at = copies.setdefault(storage, len(copies))
                if at == len(r.copied):
                    r.copied.append(_flat_storage(out))
                r.results.append(Copied(at, _geometry(out, 0)))
            else:
                left.setdefault(storage, out)
                r.results.append(Left(out))
                if out.numel():
                    _left[out.data_ptr()] = r
        r.left = list(left)

    def _run(self, r: Recording, args: Args) -> Values:
        if self.check is not None:
            self.check()
        with torch.no_grad():
            for k, buffer in r.buffers.items():
                _copy(buffer, args[k])
            r.replay()
            fresh = [self.capture.empty(t) for t in r.copied]
            if fresh:
                torch._foreach_copy_(fresh, r.copied)
        out = [_result(x, args, fresh) for x in r.results]
        args.clear()
        return out


def _copy(buffer: torch.Tensor, a: torch.Tensor) -> None:
    """Copy values. A stride of 0 means that one value in memory stands for all."""
    for axis, (n, step) in enumerate(zip(buffer.size(), buffer.stride(), strict=True)):
        if step == 0 and n > 1:
            buffer, a = buffer.narrow(axis, 0, 1), a.narrow(axis, 0, 1)
    buffer.copy_(a)


def _flat_storage(out: torch.Tensor) -> torch.Tensor:
    """Return a result's storage as one row of its dtype, so that its views stay views of one another."""
    n = out.untyped_storage().nbytes() // out.dtype.itemsize
    return view(out, (n,), (1,), -out.storage_offset())


def _result(x: object, args: Args, fresh: list[torch.Tensor]) -> object:
    match x:
        case Copied(number, (sizes, strides, offset)):
            return view(fresh[number], sizes, strides, offset)
        case Left(t):
            return view(t, tuple(t.size()), t.stride(), 0)  # torch 2.15 takes no torch.Size
        case Input(number, (sizes, strides, offset)):
            a = args[number]
            if offset == 0 and a.size() == sizes and a.stride() == strides:
                return a
            return view(a, sizes, strides, offset)
        case Value(value):
            return value
    raise AssertionError(x)
