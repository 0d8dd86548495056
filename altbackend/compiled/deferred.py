"""A graph whose kernels are still being built when its callable is handed out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[list[Any]], Sequence[Any]]


@dataclass
class Late:
    """What is left to do until a graph can run.

    `built` gives what `bind` makes the callable of; `build` makes it here, for a fork, in which the thread that would
    fulfil `built` does not run. `ahead` is done with the first call's inputs before the wait, and leaves them as they
    are. `failed` gives, for whatever building or binding has raised, what runs instead, or raises.
    """

    built: Future[Any]
    build: Callable[[], Any]
    bind: Callable[[Any], Call]
    failed: Callable[[Exception], Call]
    ahead: Callable[[list[Any]], object] | None = None
    owner: int = field(default_factory=os.getpid)

    def call(self, args: list[Any]) -> Call:
        """The callable, once it can run; `args` are the first call's."""
        if self.ahead is not None:
            self.ahead(args)
        try:
            return self.bind(self.built.result() if os.getpid() == self.owner else self.build())
        except Exception as cause:
            return self.failed(cause)


def late(left: Late) -> Call:
    """A callable whose first call does what is left: until then Dynamo and AOTAutograd go on beside the builds."""
    lock, waiting, bound = threading.Lock(), [left], list[Call]()

    def run(args: list[Any]) -> Sequence[Any]:
        if not bound:
            with lock:
                if waiting:  # another thread may have been faster
                    bound.append(waiting[0].call(args))
                    waiting.clear()
        return bound[0](args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
