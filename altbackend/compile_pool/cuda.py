"""Triton kernels to machine code, in worker processes, and kept in the cache folder."""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import folders
from ..config import Config
from ..errors import CompilerFailed, Unsupported
from ..runtime.cuda import Cubin
from .cpp import usable_folder

if TYPE_CHECKING:  # a process that finds its kernels built prints none
    from ..codegen.triton import TritonKernel

MOST_WORKERS = 8
ATTEMPTS = 2  # a worker that dies (out of memory, killed) is replaced once
SECONDS = 300.0  # that one kernel may take


@dataclass(frozen=True)
class Job:
    """What decides a kernel's machine code. `aligned`: numbers of the pointers that are multiples of 16.

    `name` is what the function is called; code built under another name is as good.
    """

    source: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, int], ...]
    aligned: tuple[int, ...]
    warps: int
    stages: int
    capability: int
    name: str = field(default="kernel", compare=False, repr=False)

    @property
    def key(self) -> str:
        return hashlib.sha256(repr((self, triton_version())).encode()).hexdigest()[:40]


def job_of(kernel: TritonKernel, aligned: Sequence[int], capability: int) -> Job:
    return Job(
        kernel.source,
        tuple(kernel.signature.items()),
        tuple(kernel.constexprs.items()),
        tuple(aligned),
        kernel.num_warps,
        kernel.num_stages,
        capability,
        kernel.label,
    )


@functools.cache
def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        raise Unsupported("a graph on a GPU", "triton is not installed", todo="pip install triton") from None


def submit(job: Job, cfg: Config) -> Future[Cubin]:
    """The kernel's machine code, from the cache folder or from a worker. The future raises CompilerFailed."""
    triton_version()
    return _submit(job, usable_folder(folders.cache_folder(cfg)) / "cubin", cfg.compile_threads)


@functools.lru_cache(maxsize=4096)
def _submit(job: Job, folder: Path, count: int) -> Future[Cubin]:
    return _threads(count).submit(_build, job, folder / job.key[:2] / f"{job.key}.json")


def warm(cfg: Config) -> None:
    """Start the workers in the background: they are ready when the first kernel is, and not a second later."""
    with contextlib.suppress(Unsupported):  # without triton there is nothing to start; a kernel will say so
        triton_version()
        _warm(cfg.compile_threads)


@functools.cache
def _warm(count: int) -> None:
    for _ in range(count or _count()):
        _threads(count).submit(lambda: _idle.put(_start()))


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count or _count(), thread_name_prefix="altbackend-compile")


def _count() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, usable))


def _build(job: Job, path: Path) -> Cubin:
    kept = _read(path)
    if kept is not None:
        return kept
    made = _ask(job)
    if "error" in made:
        raise CompilerFailed("triton.compile", made["error"], str(_keep_source(path, job)))
    try:
        made["digest"] = hashlib.sha256(made["cubin"].encode()).hexdigest()
        folders.write_whole(path, json.dumps(made).encode())
    except OSError:
        pass  # a full disk costs the next process a compilation
    return _cubin(made, job.warps)


def _read(path: Path) -> Cubin | None:
    """The entry, if it is whole; anything else is a miss and will be replaced."""
    try:
        held = json.loads(path.read_text())
        if held["digest"] != hashlib.sha256(held["cubin"].encode()).hexdigest():
            return None
        return _cubin(held, int(held["warps"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cubin(held: dict[str, Any], warps: int) -> Cubin:
    return Cubin(base64.b64decode(held["cubin"]), int(held["shared"]), warps, str(held["name"]))


def _keep_source(path: Path, job: Job) -> Path:
    text = path.with_suffix(".py")
    try:
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(job.source)
    except OSError:
        pass
    return text


# --- workers ---------------------------------------------------------------------------------------------------------

_idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()


def _worker() -> subprocess.Popen[str]:
    try:
        return _idle.get_nowait()
    except queue.Empty:
        return _start()


def _start() -> subprocess.Popen[str]:
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    made = subprocess.Popen(
        [sys.executable, "-m", "altbackend.compile_pool.cubin_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    atexit.register(_end, made)
    return made


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # something was still to be written
                pipe.close()


def _ask(job: Job) -> dict[str, Any]:
    question = {
        "key": job.key,
        "name": job.name,
        "source": job.source,
        "signature": dict(job.signature),
        "constexprs": dict(job.constexprs),
        "aligned": job.aligned,
        "warps": job.warps,
        "stages": job.stages,
        "capability": job.capability,
    }
    reason = ""
    for _ in range(ATTEMPTS):
        worker = _worker()
        assert worker.stdin is not None
        assert worker.stdout is not None
        limit = threading.Timer(SECONDS, worker.kill)
        limit.start()
        start = time.monotonic()
        try:
            worker.stdin.write(json.dumps(question) + "\n")
            worker.stdin.flush()
            made = json.loads(worker.stdout.readline())
        except (OSError, ValueError) as cause:
            reason = str(cause)
        else:
            limit.cancel()
            _idle.put(worker)
            return dict(made) | {"warps": job.warps}
        limit.cancel()
        _end(worker)
        if time.monotonic() - start >= SECONDS:
            return {"error": f"the kernel did not compile within {SECONDS:.0f} s"}
        reason = f"a compile worker ended with exit status {worker.returncode} {reason}"
    return {"error": reason}
