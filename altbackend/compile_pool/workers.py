"""The queue of all builds, C++ and Triton, and the worker processes that compile Triton kernels.

As many threads take tasks from the queue as builds may run side by side. None of them delays interpreter exit.
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
from ..disk_cache.json_object import JsonObject
from . import background, cores
from .children import Child, ChildFailed, python
from .cubin_worker import compile_job

ATTEMPTS = 2  # a worker that dies (out of memory, killed) is replaced once
SECONDS = 300.0  # limit for one kernel
WORKER = python("altbackend.compile_pool.cubin_worker")

Result = TypeVar("Result")


class Pool:
    """Runs at most `count` builds at a time. `start` decides what compiles Triton kernels (option `worker_start`).

    - "subprocess": workers that are reused; the pool starts them when needed, or `warm` does;
    - "spawn": one new worker for each kernel;
    - "inline": the thread that submits runs all tasks itself.
    """

    def __init__(self, count: int, start: str = "subprocess") -> None:
        self.count, self.start, self.cold = count, start, False
        self.idle: queue.SimpleQueue[Child] = queue.SimpleQueue()
        self.tasks: background.Tasks[tuple[Future[Any], Callable[[], Any]]] = background.Tasks()
        for n in range(count if start != "inline" else 0):
            # not an executor: the interpreter waits at exit until its threads have done all tasks
            self.tasks.serve(_in_background, f"altbackend-compile-{n}")

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Return a future of the result of `task`, which a thread runs."""
        future: Future[Result] = Future()
        if self.start == "inline":
            _fulfil(future, task, Exception)  # Ctrl-C belongs to this thread
        else:
            self.tasks.put((future, task))
        return future

    def warm(self) -> None:
        """Start all workers in the background. Each compiles a kernel, since its first one takes 0.1 s longer.

        With one worker per job, they are only started.
        """
        for _ in range(self.count if self.start != "inline" else 0):
            self.submit(self._start)

    def _start(self) -> None:
        if not self.cold:
            self.idle.put(_start_worker(compiles=self.start == "subprocess"))
        if self.cold:
            self._end_idle()

    def cool(self) -> None:
        """End the workers that are idle or being started. The next kernel starts a worker again."""
        self.cold = True
        self._end_idle()

    def _end_idle(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.idle.get_nowait().end()

    def compile(self, request: dict[str, object]) -> JsonObject:
        """Return a worker's answer to a job (`cubin_worker.compile_job`), or {"error": text}.

        If no worker can be started, this process does the job. A job that has killed its workers is not retried
        here: it would kill this process.
        """
        if self.start == "inline":
            return compile_job(request)
        reason = ""
        for _ in range(ATTEMPTS):
            try:
                worker = self._worker()
            except OSError as cause:
                return {"error": str(cause)} if background.is_ending() else compile_job(request)
            try:
                answer = json.loads(worker.ask(json.dumps(request), SECONDS))
            except ChildFailed as cause:
                if cause.timed_out:
                    return {"error": f"{request['name']} did not compile within {SECONDS:.0f} s"}
                reason = f"a compile worker failed: {cause}"
            except ValueError as cause:
                worker.end()
                reason = f"a compile worker sent a malformed answer: {cause}"
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


def run_in_thread(task: Callable[[], Result], cfg: Config) -> Future[Result]:
    """Return a future of the result of `task`, run by its own thread: one that waits for builds must not be a pool's.

    With builds "inline", this thread runs it.
    """
    future: Future[Result] = Future()
    if cfg.worker_start == "inline":
        _fulfil(future, task, Exception)
    else:
        work = [(future, task)]
        background.start(lambda: _in_background(work), "altbackend-build")
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


def _start_worker(compiles: bool) -> Child:
    """Return a new worker. If it `compiles`, it has loaded everything for its first kernel."""
    worker = Child(WORKER)
    if compiles:
        worker.ask(json.dumps(FIRST_KERNEL), SECONDS)
    return worker


def _in_background(work: list[tuple[Future[Result], Callable[[], Result]]]) -> None:
    """Fulfil the one future in a list, unless interpreter exit has begun. Nothing holds the task afterwards."""
    if background.is_ending():
        work.pop()[0].set_exception(OSError("the interpreter is ending"))
    else:
        _fulfil(*work.pop(), BaseException)


def _fulfil(future: Future[Result], task: Callable[[], Result], caught: type[BaseException]) -> None:
    try:
        future.set_result(task())
    except caught as cause:
        future.set_exception(cause)


def pool(count: int, start: str) -> Pool:
    """Return this process's pool for so many parallel builds."""
    with _lock:  # threads that ask at once would make a pool each
        return _pool(count, start)


_lock = threading.Lock()
_pool = functools.cache(Pool)


def pool_of(cfg: Config) -> Pool:
    """Return the pool that the options ask for."""
    return pool(_count(cfg.compile_threads), cfg.worker_start)


@functools.cache
def _count(requested: int) -> int:
    """Return the number of workers, cached because it reads system files, which can take 30 ms for each kernel."""
    return cores.workers(requested)


def _after_fork() -> None:
    """Drop the pools after a fork: it has no threads or workers, and perhaps locks that another thread held."""
    global _lock
    _lock = threading.Lock()
    _pool.cache_clear()


os.register_at_fork(after_in_child=_after_fork)
