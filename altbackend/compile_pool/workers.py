"""A pool of worker processes for Triton, fed by threads that never hold up the end of the interpreter."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from .children import Child, ChildFailed, python
from .cubin_worker import compile_job

ATTEMPTS = 2  # a worker that dies (out of memory, killed) is replaced once
SECONDS = 300.0  # that one kernel may take
WORKER = python("altbackend.compile_pool.cubin_worker")

Result = TypeVar("Result")


class Pool:
    """At most `count` jobs at a time. Workers are started when they are needed, or by `warm`, and kept."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self.tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        for n in range(count):
            # not an executor, whose threads the interpreter waits for before it ends
            threading.Thread(target=self._serve, name=f"altbackend-compile-{n}", daemon=True).start()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """What `task` returns or raises, once a thread has run it."""
        future: Future[Result] = Future()
        self.tasks.put((future, task))
        return future

    def warm(self) -> None:
        """Start all workers, in the background."""
        for _ in range(self.count):
            self.submit(lambda: self.idle.put(Child(WORKER)))

    def compile(self, question: dict[str, Any]) -> dict[str, Any]:
        """A worker's answer to a job (`cubin_worker.compile_job`), or {"error": text}.

        Where no worker can be started the job is done here. One that has killed its workers is not: it would kill us.
        """
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                worker = self._worker()
            except OSError:
                return compile_job(question)
            try:
                answer = json.loads(worker.ask(json.dumps(question), SECONDS))
            except ChildFailed as cause:
                if cause.late:
                    return {"error": f"{question['name']} did not compile within {SECONDS:.0f} s"}
                reason = f"a compile worker failed: {cause}"
            except ValueError as cause:
                worker.end()
                reason = f"a compile worker answered nonsense: {cause}"
            else:
                self.idle.put(worker)
                return dict(answer)
        return {"error": reason}

    def _worker(self) -> Child:
        with contextlib.suppress(queue.Empty):
            while True:
                worker = self.idle.get_nowait()
                if worker.alive:
                    return worker
                worker.end()
        return Child(WORKER)

    def _serve(self) -> None:
        while True:
            future, task = self.tasks.get()
            try:
                future.set_result(task())
            except BaseException as cause:
                future.set_exception(cause)
            del future, task  # or the last result would live until the next task


@functools.cache
def pool(count: int) -> Pool:
    """The pool of `count` workers of this process."""
    return Pool(count)


# A fork has neither the threads nor the workers.
os.register_at_fork(after_in_child=pool.cache_clear)
