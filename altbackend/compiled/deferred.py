"""Deferred builds: the callable of a graph is returned while its kernels are still being built."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import field
from typing import Generic, TypeVar

from altbackend.lazy_dataclass import dataclass

from ..runtime.boxed import BoxedCall, Values
from ..runtime.successor import Successor

Built = TypeVar("Built")


@dataclass
class DeferredBuild(Generic[Built]):
    """The steps that remain until a graph can run.

    A background thread fulfils `built`; `load` makes the callable of it. A fork has no such thread, so it calls
    `build` itself. `before_wait` takes the inputs of the first call before the wait and does not change them.
    `failed` takes any error of building or loading; it returns another callable or raises.
    """

    built: Future[Built]
    build: Callable[[], Built]
    load: Callable[[Built], BoxedCall]
    failed: Callable[[Exception], BoxedCall]
    before_wait: Callable[[list[object]], object] | None = None
    owner: int = field(default_factory=os.getpid)

    def wait(self, args: list[object]) -> BoxedCall:
        """Return the callable once it can run. `args` are the inputs of the first call."""
        if self.before_wait is not None:
            self.before_wait(args)
        try:
            return self.load(self.built.result() if os.getpid() == self.owner else self.build())
        except Exception as cause:
            return self.failed(cause)


def build_at_first_call(deferred: DeferredBuild[Built]) -> BoxedCall:
    """Return a callable that waits for the build in its first call. Dynamo and AOTAutograd go on meanwhile."""
    lock, waiting = threading.Lock(), [deferred]

    def first(args: list[object]) -> Values:
        with lock:
            if waiting:  # another thread may have been faster
                successor.become(waiting[0].wait(args))
                waiting.clear()
        return successor.current(args)

    successor = Successor(first)
    return successor.call()
