"""The queue of all builds, C++ and Triton, and the processes that compile Triton kernels.

Threads take from it, as many as builds may run side by side; none of them holds up the end of the interpreter.
"""

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

from ..config.options import Config
from . import cores
from .children import Child, ChildFailed, python
from .cubin_worker import compile_job

ATTEMPTS = 2  # a worker that dies (out of memory, killed) is replaced once
SECONDS = 300.0  # that one kernel may take
WORKER = python("altbackend.compile_pool.cubin_worker")

Result = TypeVar("Result")


class Pool:
    """At most `count` builds at a time. `start` says where Triton kernels are compiled (option `worker_start`):

    "subprocess": by workers that are started when they are needed, or by `warm`, and kept; "spawn": each by a worker of
    its own, which then ends; "inline": by the thread that submits, as everything is.
    """

    def __init__(self, count: int, start: str = "subprocess") -> None:
        self.count, self.start, self.cold = count, start, False
        self.idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self.tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        for n in range(count if start != "inline" else 0):
            # not an executor, whose threads the interpreter waits for before it ends
            threading.Thread(target=self._serve, name=f"altbackend-compile-{n}", daemon=True).start()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """What `task` returns or raises, once a thread has run it."""
        future: Future[Result] = Future()
        if self.start == "inline":
            _fulfil(future, task, Exception)  # Ctrl-C is this thread's own
        else:
            self.tasks.put((future, task))
        return future

    def warm(self) -> None:
        """Start all workers, in the background, and have each compile a kernel, as its first one takes 0.1 s longer.

        Where each job gets a worker of its own, they are only started.
        """
        for _ in range(self.count if self.start != "inline" else 0):
            self.submit(self._start)

    def _start(self) -> None:
        if not self.cold:
            self.idle.put(_started(compiles=self.start == "subprocess"))
        if self.cold:
            self._end_idle()

    def cool(self) -> None:
        """End the workers that wait for a kernel or are being started; the next kernel starts one again."""
        self.cold = True
        self._end_idle()

    def _end_idle(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.idle.get_nowait().end()

    def compile(self, question: dict[str, Any]) -> dict[str, Any]:
        """A worker's answer to a job (`cubin_worker.compile_job`), or {"error": text}.

        Where no worker can be started the job is done here. One that has killed its workers is not: it would kill us.
        """
        if self.start == "inline":
            return compile_job(question)
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
                if self.start == "spawn":
                    worker.end()
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
            _fulfil(future, task, BaseException)
            del future, task  # or the last result would live until the next task


def aside(task: Callable[[], Result], cfg: Config) -> Future[Result]:
    """What `task` returns or raises, run by a thread of its own: one that waits for builds must not be the pool's.

    Where the options ask for builds "inline", it is run here.
    """
    future: Future[Result] = Future()
    if cfg.worker_start == "inline":
        _fulfil(future, task, Exception)
    else:
        threading.Thread(
            target=_fulfil, args=(future, task, BaseException), name="altbackend-build", daemon=True
        ).start()
    return future


FIRST_KERNEL = {
    "source": (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x, XBLOCK: tl.constexpr):\n"
        "    at = x + tl.arange(0, XBLOCK)\n    tl.store(at, tl.load(at) + 1.0)\n"
    ),
    "signature": {"x": "*fp32", "XBLOCK": "constexpr"},
    "constexprs": {"XBLOCK": 64},
    "aligned": [],
    "capability": 80,
    "warps": 1,
    "stages": 1,
    "contract": True,
    "name": "altbackend_first",
    "key": "first",
}


def _started(compiles: bool) -> Child:
    """A new worker, with all that it loads for its first kernel loaded where it `compiles` one."""
    worker = Child(WORKER)
    if compiles:
        worker.ask(json.dumps(FIRST_KERNEL), SECONDS)
    return worker


def _fulfil(future: Future[Result], task: Callable[[], Result], caught: type[BaseException]) -> None:
    try:
        future.set_result(task())
    except caught as cause:
        future.set_exception(cause)


def pool(count: int, start: str) -> Pool:
    """The pool of this process for so many builds at a time."""
    with _lock:  # threads that ask at once would get a pool each
        return _pool(count, start)


_lock = threading.Lock()
_pool = functools.cache(Pool)


def pool_of(cfg: Config) -> Pool:
    """The pool that the options ask for."""
    return pool(_count(cfg.compile_threads), cfg.worker_start)


@functools.cache
def _count(wanted: int) -> int:
    """Every kernel asks, and files of the system are read for it: 30 ms where those are slow."""
    return cores.workers(wanted)


def _after_fork() -> None:
    """A fork has neither the threads nor the workers, and perhaps a lock that another thread held."""
    global _lock
    _lock = threading.Lock()
    _pool.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
