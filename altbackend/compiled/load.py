"""From code as data to a callable: kernels built or found built, the host program loaded. Compiles no graph."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import torch_api
from ..compile_pool import cpp, workers
from ..compile_pool import cuda as compile_cuda
from ..config.options import Config
from ..debug.trace import Trace
from ..disk_cache.storage import open_store
from ..errors import AltError
from ..report import stats
from ..runtime import control_flow, layouts
from ..runtime import cuda as cuda_runtime
from ..runtime.cuda_graphs import ALL
from ..runtime.frozen import Frozen
from ..runtime.page_guard import NotGuardable
from . import bytecode, freezing, replay
from .artifact import Code
from .deferred import Late, late

Compiled = Callable[[list[Any]], Sequence[Any]]
_PAGE_GUARD = '#include "altbackend/page_guard.h"\n'


@dataclass(frozen=True)
class Job:
    """What a graph is compiled for. `kind`: "inference", "forward" or "backward", or "body" of another.

    `static_inputs`: inputs whose address stays. `user_outputs`: results that a user sees, the first ones; a forward's
    others are for its backward. `any_strides`: inputs may come in other strides than were traced.
    """

    kind: str
    static_inputs: tuple[int, ...] = ()
    user_outputs: int = ALL
    any_strides: bool = False


def bind(code: Code, cfg: Config, trace: Trace, job: Job) -> Compiled:
    """Build the kernels, or find them built, and load the host program. Raises CompilerMissing, CompilerFailed."""
    show(code, cfg, trace)
    with trace.stage("build"):
        built = build(code, cfg)
    main = _main(code, built, cfg, trace, job)
    return layouts.kept(main if code.prologue is None else _frozen(code, cfg, main), code.layouts)


def bind_later(
    code: Code,
    cfg: Config,
    trace: Trace,
    job: Job,
    meanwhile: contextlib.AbstractContextManager[object],
    failed: Callable[[Exception], Compiled],
) -> Compiled:
    """As `bind`, but the kernels are built in the background, `meanwhile`, and waited for when the graph is first run.

    The first call raises what the prologue raises; `failed` is given what building or loading raises (CompilerMissing,
    CompilerFailed), and gives another callable or raises.
    """
    show(code, cfg, trace)
    frozen = None if code.prologue is None else _frozen(code, cfg, _not_bound)

    def build_() -> list[Any]:
        with meanwhile:
            return build(code, cfg)

    def bind_(built: list[Any]) -> Compiled:
        main = _main(code, built, cfg, trace, job)
        if frozen is None:
            return main
        frozen.main = main
        return frozen

    built = workers.aside(build_, cfg)
    left = Late(built, lambda: build(code, cfg), bind_, failed, None if frozen is None else frozen.results)
    return layouts.kept(late(left), code.layouts)


def _not_bound(args: list[Any]) -> Sequence[Any]:
    raise AssertionError("a graph was run before its kernels were built")


def _frozen(code: Code, cfg: Config, main: Compiled) -> Frozen:
    assert code.prologue is not None
    in_place = code.device.type == "cuda" and cfg.cudagraphs
    on_cpu = code.device.type == "cpu"
    built = workers.aside(lambda: page_guard_library(cfg), cfg) if on_cpu else None  # beside the kernels
    owner = os.getpid()

    def library() -> ctypes.CDLL:
        if built is None:
            raise NotGuardable("its check is built for CPUs only")
        try:  # a fork has not the thread that builds
            return built.result() if built.done() or os.getpid() == owner else page_guard_library(cfg)
        except AltError as cause:
            raise NotGuardable(f"its check cannot be built: {cause.headline}") from cause

    watch = freezing.watch_of(cfg, library)
    return Frozen(main, code.prologue, code.kept, code.watched, watch, in_place=in_place)


def page_guard_library(cfg: Config) -> ctypes.CDLL:
    """The compiled check of guarded pages, from the cache folder or built. Raises CompilerMissing, CompilerFailed."""
    dll: ctypes.CDLL = cpp.load(_PAGE_GUARD, cfg).dll
    dll.alt_guard_changed.restype = ctypes.c_int64
    return dll


def show(code: Code, cfg: Config, trace: Trace) -> None:
    """Offer the texts to whoever asked to see them, with those of the bodies."""
    trace.artifact(f"kernels.{'txt' if code.device.type == 'cuda' else 'cpp'}", code.kernel_text, "kernel_code")
    trace.artifact("host.py", lambda: code.python, "output_code")
    for body in code.bodies:
        show(body.code, cfg, Trace(f"{trace.graph_name}_{body.names[0]}", cfg))


def build(code: Code, cfg: Config) -> list[Any]:
    """What each part of `code.whole()` runs on: a library or None, or the machine code of each launch on a GPU.

    Built now, on a GPU in worker processes, or found in the cache folder. Raises CompilerMissing, CompilerFailed.
    """
    parts = list(code.whole())
    cubins = {job: compile_cuda.submit(job, cfg) for job in dict.fromkeys(job for c in parts for job in c.jobs)}
    return [
        [cubins[job].result() for job in c.jobs] if c.device.type == "cuda" else cpp.load(c.cpp, cfg) if c.cpp else None
        for c in parts
    ]


def _main(code: Code, built: Sequence[Any], cfg: Config, trace: Trace, job: Job) -> Compiled:
    """The host program, on what was built for it, without its prologue."""
    with trace.stage("load"):
        call = _load(code, iter(built), cfg)
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
    return call


def _load(code: Code, built: Iterator[Any], cfg: Config) -> Compiled:
    own = next(built)
    bound = dict(code.bound)
    for body in code.bodies:
        bound |= dict.fromkeys(body.names, control_flow.unboxed(_load(body.code, built, cfg)))
    if code.device.type == "cuda":
        return _load_cuda(code, own, bound, cfg)
    return load(code.python, cfg, own, bound, torch.get_num_threads if cfg.threads == 0 else lambda: cfg.threads)


def _load_cuda(code: Code, cubins: Sequence[Any], bound: Mapping[str, Any], cfg: Config) -> Compiled:
    with torch_api.cuda_device(code.device), torch_api.real_tensors():
        loaded: dict[int, Any] = {}
        for n, c in enumerate(cubins):
            loaded.setdefault(id(c), cuda_runtime.load(c, f"kernel{n}"))
        return load(code.python, cfg, [loaded[id(c)] for c in cubins], bound)


_loaded = 0


def load(python: str, cfg: Config, *bound: Any) -> Compiled:
    """Execute the printed host program and bind it: to its library or kernels, its constants, on a CPU its threads."""
    global _loaded
    _loaded += 1
    name = f"<altbackend graph {_loaded}>"
    linecache.cache[name] = (len(python), None, python.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": name}
    exec(bytecode.compiled(python, name, open_store(cfg)), space)
    call: Compiled = space["bind"](*bound)
    call._boxed_call = True  # type: ignore[attr-defined]
    weakref.finalize(call, linecache.cache.pop, name, None).atexit = False
    return call
