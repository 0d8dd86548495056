"""Triton kernels compiled to machine code in worker processes, and stored in the cache folder."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from altbackend.lazy_dataclass import dataclass

from ..config.options import Config
from ..disk_cache.storage import Store, open_store
from ..errors import CompilerFailed, Unsupported
from ..runtime.cuda import Cubin
from . import workers

if TYPE_CHECKING:  # a process whose kernels are all cached does not import the printer
    from ..codegen.triton.print_triton import TritonKernel

# Part of every key. 1: kernels built before `packed_adds` could be wrong. 2: those built before `spills` could be slow.
BUILD = 2


@dataclass(frozen=True)
class Job:
    """The input of a kernel's compilation. `aligned`: indices of the pointers that are multiples of 16.

    `contract`: whether a product and the sum that takes it may be rounded once. `name` is the function's name,
    which does not distinguish jobs. `ptx`: return text in place of machine code.
    """

    source: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, int], ...]
    aligned: tuple[int, ...]
    warps: int
    stages: int
    capability: int
    name: str = field(default="kernel", compare=False, repr=False)
    contract: bool = True
    ptx: bool = field(default=False, repr=False)

    @property
    def key(self) -> str:
        identity = repr((self, triton_version(), BUILD)) + "ptx" * self.ptx
        return hashlib.sha256(identity.encode()).hexdigest()[:40]


def job_of(kernel: TritonKernel, aligned: Sequence[int], capability: int, contract: bool = True) -> Job:
    return Job(
        kernel.source,
        tuple(kernel.signature.items()),
        tuple(kernel.constexprs.items()),
        tuple(aligned),
        kernel.num_warps,
        kernel.num_stages,
        capability,
        kernel.label,
        contract,
    )


@functools.cache
def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        raise Unsupported("a graph on a GPU", "triton is not installed", todo="pip install triton") from None


def name_of(job: Job) -> str:
    """Return the name of a kernel's machine code in the store."""
    return f"cubin/{job.key[:2]}/{job.key}.cubin"


def submit(job: Job, cfg: Config) -> Future[Cubin]:
    """Return a future of the kernel's machine code, from the cache folder or a worker. It raises CompilerFailed."""
    triton_version()
    return _submit(job, open_store(cfg), workers.pool_of(cfg))


@functools.lru_cache(maxsize=4096)
def _submit(job: Job, store: Store, pool: workers.Pool) -> Future[Cubin]:
    cached = _read(store.local.read(name_of(job)), job.warps)  # takes less time than handing the job to a thread
    if cached is None:
        return pool.submit(lambda: _build(job, store, pool))
    done: Future[Cubin] = Future()
    done.set_result(cached)
    return done


os.register_at_fork(after_in_child=_submit.cache_clear)  # threads of the parent finish pending jobs


def warm(cfg: Config) -> None:
    """Start the workers in the background, so that they are ready when the first kernel is printed."""
    with contextlib.suppress(Unsupported):  # without Triton there is nothing to start; a kernel raises the error
        triton_version()
        _warm(workers.pool_of(cfg))


_early_pool: workers.Pool | None = None


def start_workers_early(cfg: Config) -> None:
    """Start workers like `warm` before the options of a call are known; see `end_unneeded_early_workers`."""
    global _early_pool
    warm(cfg)
    _early_pool = workers.pool_of(cfg)


def end_unneeded_early_workers(cfg: Config) -> None:
    """End workers that were started early if the options of this call need others."""
    global _early_pool
    early, _early_pool = _early_pool, None
    if early is not None and early is not workers.pool_of(cfg):
        early.cool()


def _forget() -> None:
    global _early_pool
    _early_pool = None


os.register_at_fork(after_in_child=_forget)


@functools.cache
def _warm(pool: workers.Pool) -> None:
    pool.warm()


os.register_at_fork(after_in_child=_warm.cache_clear)


def _build(job: Job, store: Store, pool: workers.Pool) -> Cubin:
    name = name_of(job)
    cached = _read(store.read(name), job.warps)
    if cached is not None:
        return cached
    answer = pool.compile(_request(job))
    if "error" in answer:
        raise CompilerFailed(
            "triton.compile", answer["error"], store.write_text(f"cubin/{job.key[:2]}/{job.key}.py", job.source)
        )
    cubin = Cubin(base64.b64decode(answer["cubin"]), int(answer["shared"]), job.warps, str(answer["name"]))
    with contextlib.suppress(OSError):  # a full disk costs the next process a compilation
        store.write(name, _serialized(cubin))
    return cubin


def _serialized(cubin: Cubin) -> bytes:
    """Return a line of JSON, then the machine code."""
    return json.dumps({"shared": cubin.shared, "name": cubin.name}).encode() + b"\n" + cubin.code


def _read(content: bytes | None, warps: int) -> Cubin | None:
    """Return machine code written by `_serialized`; None for another format, for example of an earlier version."""
    head, end, code = (content or b"").partition(b"\n")
    try:
        header = json.loads(head)
        return Cubin(code, int(header["shared"]), warps, str(header["name"])) if end else None
    except (ValueError, KeyError, TypeError):
        return None


def _request(job: Job) -> dict[str, object]:
    return {
        "key": job.key,
        "name": job.name,
        "source": job.source,
        "signature": dict(job.signature),
        "constexprs": dict(job.constexprs),
        "aligned": job.aligned,
        "warps": job.warps,
        "stages": job.stages,
        "capability": job.capability,
        "contract": job.contract,
        "ptx": job.ptx,
    }
