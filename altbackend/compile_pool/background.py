"""Daemon threads of the compiler, which interpreter exit ends once it has killed the compilers that they wait for.

A daemon thread that asks for the interpreter's lock while the interpreter ends is unwound. If torch's or Triton's
C++ code stands on its stack, the unwinding calls `std::terminate` and aborts the process. Exit therefore joins the
threads: a thread that has done its work still runs a few lines.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Task = TypeVar("Task")


class _State:
    """The threads of this process that exit joins, and the calls that make threads return that wait for tasks."""

    def __init__(self) -> None:
        self.ending = False
        self.threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.stops: list[Callable[[], None]] = []


_state = _State()


class Tasks(Generic[Task]):
    """A queue of tasks, and the daemon threads that serve it until interpreter exit."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[list[Task]] = queue.SimpleQueue()
        self._count = 0
        _state.stops.append(self._stop)

    def serve(self, run: Callable[[list[Task]], None], name: str) -> None:
        """Start one more thread, which calls `run` with a list of one task.

        `run` takes the task out of the list, so that nothing else holds it.
        """
        self._count += 1
        start(lambda: self._serve(run), name)

    def put(self, task: Task) -> None:
        """Add a task, which a thread takes."""
        self._tasks.put([task])

    def _serve(self, run: Callable[[list[Task]], None]) -> None:
        while work := self._tasks.get():
            run(work)

    def _stop(self) -> None:
        for _ in range(self._count):
            self._tasks.put([])


def start(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread, which interpreter exit joins."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _state.threads.add(thread)
    thread.start()
    return thread


def is_ending() -> bool:
    """Return whether interpreter exit has begun, so that no work may begin any more."""
    return _state.ending


def begin_exit() -> None:
    """Let no work begin any more."""
    _state.ending = True


def join(seconds: float) -> bool:
    """End the threads once they have done what they do now. Return whether all have ended in time."""
    for stop in _state.stops:
        stop()
    end, threads = time.monotonic() + seconds, list(_state.threads)
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return not any(thread.is_alive() for thread in threads)


def _after_fork() -> None:
    """Forget the threads of the parent after a fork, which has none of them."""
    global _state
    _state = _State()


os.register_at_fork(after_in_child=_after_fork)
