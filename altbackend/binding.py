"""From code as data to a callable: kernels built or found built, the host program loaded. Compiles no graph."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import compat
from .codegen import replay
from .compile_pool import cpp
from .compile_pool import cuda as compile_cuda
from .compile_pool.code import Code
from .config import Config
from .debug import Trace
from .report import stats
from .runtime import control_flow
from .runtime import cuda as cuda_runtime
from .runtime.cuda_graphs import ALL
from .runtime.hoisted import Hoisted

Compiled = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Job:
    """What a graph is compiled for. `kind`: "inference", "forward" or "backward", or "body" of another.

    `static_inputs`: inputs whose address stays. `user_outputs`: results that a user sees, the first ones; a forward's
    others are for its backward.
    """

    kind: str
    static_inputs: tuple[int, ...] = ()
    user_outputs: int = ALL


def bind(code: Code, cfg: Config, trace: Trace, job: Job) -> Compiled:
    """Build the kernels, or find them built, and load the host program. Raises CompilerMissing, CompilerFailed."""
    cuda = code.device.type == "cuda"
    call = _bind(code, cfg, trace)
    every = list(code.whole())
    stats.record(
        kernels=sum(c.kernels for c in every),
        library_calls=sum(c.library_calls for c in every),
        compile_seconds=trace.seconds(),
    )
    if code.recording is not None and cfg.cudagraphs:
        static = [k for k, original in enumerate(code.kept) if original in job.static_inputs]
        given = replay.Given(tuple(static), len(code.kept), job.user_outputs, job.kind == "backward")
        call = replay.recorded(call, code.recording, given, cfg, trace)
    if code.prologue is None:
        return call
    return Hoisted(call, code.prologue, code.kept, code.watched, in_place=cuda and cfg.cudagraphs)


def _bind(code: Code, cfg: Config, trace: Trace) -> Compiled:
    cuda = code.device.type == "cuda"
    trace.artifact("kernels.txt" if cuda else "kernels.cpp", code.kernel_text, "kernel_code")
    trace.artifact("host.py", lambda: code.python, "output_code")
    bound = dict(code.bound)
    for body in code.bodies:
        own = Trace(f"{trace.graph_name}_{body.names[0]}", cfg)
        bound |= dict.fromkeys(body.names, control_flow.unboxed(_bind(body.code, cfg, own)))
    return (_bind_cuda if cuda else _bind_cpu)(code, bound, cfg, trace)


def _bind_cpu(code: Code, bound: Mapping[str, Any], cfg: Config, trace: Trace) -> Compiled:
    with trace.stage("build"):
        library = cpp.load(code.cpp, cfg) if code.cpp else None
    with trace.stage("load"):
        threads = torch.get_num_threads if cfg.threads == 0 else lambda: cfg.threads
        return load(code.python, library, bound, threads)


def _bind_cuda(code: Code, bound: Mapping[str, Any], cfg: Config, trace: Trace) -> Compiled:
    """Kernels are compiled in worker processes, or found in the cache folder."""
    with trace.stage("build"):
        cubins = [j.result() for j in [compile_cuda.submit(job, cfg) for job in code.jobs]]
    with trace.stage("load"), compat.cuda_device(code.device), compat.real_tensors():
        loaded: dict[int, Any] = {}
        for n, c in enumerate(cubins):
            loaded.setdefault(id(c), cuda_runtime.load(c, f"kernel{n}"))
        return load(code.python, [loaded[id(c)] for c in cubins], bound)


_loaded = 0


def load(python: str, *bound: Any) -> Compiled:
    """Execute the printed host program and bind it: to its library or kernels, its constants, on a CPU its threads."""
    global _loaded
    _loaded += 1
    name = f"<altbackend graph {_loaded}>"
    linecache.cache[name] = (len(python), None, python.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": name}
    exec(compile(python, name, "exec"), space)
    call: Compiled = space["bind"](*bound)
    call._boxed_call = True  # type: ignore[attr-defined]
    weakref.finalize(call, linecache.cache.pop, name, None).atexit = False
    return call
