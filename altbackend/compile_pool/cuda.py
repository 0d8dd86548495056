"""Triton kernels to machine code, in worker processes, and kept in the cache folder."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ..config.options import Config
from ..disk_cache.storage import Store, open_store
from ..errors import CompilerFailed, Unsupported
from ..runtime.cuda import Cubin
from . import workers

if TYPE_CHECKING:  # a process that finds its kernels built prints none
    from ..codegen.triton.print_triton import TritonKernel


@dataclass(frozen=True)
class Job:
    """What decides a kernel's machine code. `aligned`: numbers of the pointers that are multiples of 16.

    `contract`: whether a product and the sum that takes it may be rounded once. `name` is what the function is called;
    code built under another name is as good.
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

    @property
    def key(self) -> str:
        return hashlib.sha256(repr((self, triton_version())).encode()).hexdigest()[:40]


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
    """Name of a kernel's machine code in the store."""
    return f"cubin/{job.key[:2]}/{job.key}.cubin"


def submit(job: Job, cfg: Config) -> Future[Cubin]:
    """The kernel's machine code, from the cache folder or from a worker. The future raises CompilerFailed."""
    triton_version()
    return _submit(job, open_store(cfg), workers.pool_of(cfg))


@functools.lru_cache(maxsize=4096)
def _submit(job: Job, store: Store, pool: workers.Pool) -> Future[Cubin]:
    kept = _read(store.here.read(name_of(job)), job.warps)  # a fraction of what handing it to a thread would take
    if kept is None:
        return pool.submit(lambda: _build(job, store, pool))
    found: Future[Cubin] = Future()
    found.set_result(kept)
    return found


os.register_at_fork(after_in_child=_submit.cache_clear)  # what was under way is finished by the other process's threads


def warm(cfg: Config) -> None:
    """Start the workers in the background: they are ready when the first kernel is, and not a second later."""
    with contextlib.suppress(Unsupported):  # without triton there is nothing to start; a kernel will say so
        triton_version()
        _warm(workers.pool_of(cfg))


_expected: workers.Pool | None = None


def start_workers_early(cfg: Config) -> None:
    """`warm` before the options of a call are known; the call then says which hold (`settle`)."""
    global _expected
    warm(cfg)
    _expected = workers.pool_of(cfg)


def settle(cfg: Config) -> None:
    """End the workers that were expected where other options hold."""
    global _expected
    expected, _expected = _expected, None
    if expected is not None and expected is not workers.pool_of(cfg):
        expected.cool()


def _forget() -> None:
    global _expected
    _expected = None


os.register_at_fork(after_in_child=_forget)


@functools.cache
def _warm(pool: workers.Pool) -> None:
    pool.warm()


os.register_at_fork(after_in_child=_warm.cache_clear)


def _build(job: Job, store: Store, pool: workers.Pool) -> Cubin:
    name = name_of(job)
    kept = _read(store.read(name), job.warps)
    if kept is not None:
        return kept
    answer = pool.compile(_question(job))
    if "error" in answer:
        raise CompilerFailed(
            "triton.compile", answer["error"], store.keep_text(f"cubin/{job.key[:2]}/{job.key}.py", job.source)
        )
    made = Cubin(base64.b64decode(answer["cubin"]), int(answer["shared"]), job.warps, str(answer["name"]))
    with contextlib.suppress(OSError):  # a full disk costs the next process a compilation
        store.write(name, _written(made))
    return made


def _written(made: Cubin) -> bytes:
    """A line of JSON, then the machine code."""
    return json.dumps({"shared": made.shared, "name": made.name}).encode() + b"\n" + made.code


def _read(content: bytes | None, warps: int) -> Cubin | None:
    """Machine code as `_written`; an earlier version may have kept another form."""
    head, end, code = (content or b"").partition(b"\n")
    try:
        held = json.loads(head)
        return Cubin(code, int(held["shared"]), warps, str(held["name"])) if end else None
    except (ValueError, KeyError, TypeError):
        return None


def _question(job: Job) -> dict[str, Any]:
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
    }
