"""Work of daemon threads that interpreter exit waits for, once it has killed the compilers that the work needs.

A daemon thread that asks for the interpreter's lock while the interpreter ends is unwound. If torch's or Triton's
C++ code stands on its stack, the unwinding calls `std::terminate` and aborts the process.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


class _Work:
    """Counts the threads of this process that work now."""

    def __init__(self) -> None:
        self.changed, self.count, self.ending = threading.Condition(), 0, False


_work = _Work()


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Have interpreter exit wait for this block. Raise OSError if the exit has begun."""
    work = _work
    with work.changed:
        if work.ending:
            raise OSError("the interpreter is ending")
        work.count += 1
    try:
        yield
    finally:
        with work.changed:
            work.count -= 1
            work.changed.notify_all()


def is_ending() -> bool:
    """Return whether interpreter exit has begun."""
    return _work.ending


def begin_exit() -> None:
    """Let no work begin any more."""
    with _work.changed:
        _work.ending = True


def wait_until_idle(seconds: float) -> bool:
    """Wait for the work that runs. Return whether all has ended in time."""
    with _work.changed:
        return _work.changed.wait_for(lambda: not _work.count, seconds)


def _after_fork() -> None:
    """Forget the work of the parent after a fork, which has none of its threads."""
    global _work
    _work = _Work()


os.register_at_fork(after_in_child=_after_fork)
