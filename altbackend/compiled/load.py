"""From code as data to a callable: build the kernels or find them in the cache, and load the host program."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from altbackend.lazy_dataclass import dataclass

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
from ..runtime.boxed import BoxedCall, Values, boxed
from ..runtime.cuda_graphs import ALL
from ..runtime.frozen import Frozen
from ..runtime.page_guard import NotGuardable
from . import bytecode, freezing, hosts, replay
from .artifact import Code
from .deferred import DeferredBuild, build_at_first_call

_PAGE_GUARD = '#include "altbackend/page_guard.h"\n'


@dataclass(frozen=True)
class Job:
    """The purpose that a graph is compiled for. `kind` is "inference", "forward", "backward" or "subgraph".

    - `static_inputs`: indices of inputs whose address does not change;
    - `user_outputs`: the number of leading results that a user sees; a forward's further results are for its backward;
    - `any_strides`: inputs may come with other strides than were traced;
    - `donated`: indices of inputs whose memory the graph may take over, in calls in which nothing else refers to them.
    """

    kind: str
    static_inputs: tuple[int, ...] = ()
    user_outputs: int = ALL
    any_strides: bool = False
    donated: tuple[int, ...] = ()


def bind(code: Code, cfg: Config, trace: Trace, job: Job) -> BoxedCall:
    """Build the kernels, or find them built, and load the host program. Raise CompilerMissing or CompilerFailed."""
    show(code, cfg, trace)
    with trace.stage("build"):
        built = build(code, cfg)
    main = _main(code, built, cfg, trace, job)
    return layouts.with_traced_strides(main if code.weight_prologue is None else _frozen(code, cfg, main), code.layouts)


def bind_deferred(
    code: Code,
    cfg: Config,
    trace: Trace,
    job: Job,
    building: contextlib.AbstractContextManager[object],
    failed: Callable[[Exception], BoxedCall],
) -> BoxedCall:
    """Load like `bind`, but build the kernels in the background and wait for them in the graph's first call.

    The build runs inside the context `building`. The first call raises the errors of the weight prologue. `failed`
    takes the errors of building and loading (CompilerMissing, CompilerFailed); it returns another callable or
    raises.
    """
    show(code, cfg, trace)
    frozen = None if code.weight_prologue is None else _frozen(code, cfg, _not_bound)

    def build_() -> list[object]:
        with building:
            return build(code, cfg)

    def bind_(built: list[object]) -> BoxedCall:
        main = _main(code, built, cfg, trace, job)
        if frozen is None:
            return main
        frozen.main = main
        return frozen

    built = workers.run_in_thread(build_, cfg)
    deferred = DeferredBuild(built, lambda: build(code, cfg), bind_, failed, None if frozen is None else frozen.results)
    return layouts.with_traced_strides(build_at_first_call(deferred), code.layouts)


def _not_bound(args: list[object]) -> Values:
    raise AssertionError("the graph ran before its kernels were built")


def _frozen(code: Code, cfg: Config, main: BoxedCall) -> Frozen:
    assert code.weight_prologue is not None
    in_place = code.device.type == "cuda" and cfg.cudagraphs
    on_cpu = code.device.type == "cpu"
    built = workers.run_in_thread(lambda: page_guard_library(cfg), cfg) if on_cpu else None  # beside the kernels
    owner = os.getpid()

    def library() -> ctypes.CDLL:
        if built is None:
            raise NotGuardable("the compiled check exists for CPUs only")
        try:  # the building thread does not exist in a fork
            return built.result() if built.done() or os.getpid() == owner else page_guard_library(cfg)
        except AltError as cause:
            raise NotGuardable(f"the compiled check cannot be built: {cause.headline}") from cause

    watch = freezing.watch_of(cfg, library)
    return Frozen(main, code.weight_prologue, code.main_inputs, code.prologue_inputs, watch, in_place=in_place)


def page_guard_library(cfg: Config) -> ctypes.CDLL:
    """Return the compiled check of guarded pages, cached or built now. Raise CompilerMissing or CompilerFailed."""
    dll: ctypes.CDLL = cpp.load(_PAGE_GUARD, cfg).dll
    dll.alt_guard_changed.restype = ctypes.c_int64
    return dll


def show(code: Code, cfg: Config, trace: Trace) -> None:
    """Offer the texts of the code and its subgraphs to the debug folder and the logs."""
    trace.artifact(f"kernels.{'txt' if code.device.type == 'cuda' else 'cpp'}", code.kernel_text, "kernel_code")
    trace.artifact("host.py", lambda: code.python, "output_code")
    for subgraph in code.subgraphs:
        show(subgraph.code, cfg, Trace(f"{trace.graph_name}_{subgraph.names[0]}", cfg))


def build(code: Code, cfg: Config) -> list[object]:
    """Return the binaries of each part of `code.with_subgraphs()`.

    The binaries are a library or None on a CPU, and the machine code of each launch on a GPU. They are built now,
    on a GPU in worker processes, or found in the cache folder. Raise CompilerMissing or CompilerFailed.
    """
    parts = list(code.with_subgraphs())
    cubins = {job: compile_cuda.submit(job, cfg) for job in dict.fromkeys(job for c in parts for job in c.jobs)}
    return [
        [cubins[job].result() for job in c.jobs] if c.device.type == "cuda" else cpp.load(c.cpp, cfg) if c.cpp else None
        for c in parts
    ]


def _main(code: Code, built: Sequence[object], cfg: Config, trace: Trace, job: Job) -> BoxedCall:
    """Load the host program with its binaries `built`, without the weight prologue."""
    with trace.stage("load"):
        call = _load(code, iter(built), cfg, trace)
    if not (code.kernels or code.library_calls or cfg.size_asserts):
        vars(call)["does_nothing"] = True
    parts = list(code.with_subgraphs())
    stats.record(
        kernels=sum(c.kernels for c in parts),
        library_calls=sum(c.library_calls for c in parts),
        compile_seconds=trace.seconds(),
    )
    if code.recording is not None and cfg.cudagraphs:
        static = [k for k, original in enumerate(code.main_inputs) if original in job.static_inputs]
        facts = replay.CallFacts(tuple(static), len(code.main_inputs), job.user_outputs, job.kind == "backward")
        call = replay.recorded(call, code.recording, facts, cfg, trace)
    return call


def _load(code: Code, built: Iterator[Any], cfg: Config, trace: Trace) -> BoxedCall:
    own = next(built)
    constants = dict(code.constants)
    for subgraph in code.subgraphs:
        constants |= dict.fromkeys(subgraph.names, control_flow.unboxed(_load(subgraph.code, built, cfg, trace)))
    if code.device.type == "cuda":
        return _load_cuda(code, own, constants, cfg, trace)
    threads = torch.get_num_threads if cfg.threads == 0 else lambda: cfg.threads
    return hosts.on_cpu(code, load(code.python, cfg, own, constants, threads), own, cfg, trace)


def _load_cuda(code: Code, cubins: Values, constants: Mapping[str, object], cfg: Config, trace: Trace) -> BoxedCall:
    with torch_api.cuda_device(code.device), torch_api.real_tensors():
        loaded: dict[int, Callable[..., None]] = {}
        for n, c in enumerate(cubins):
            loaded.setdefault(id(c), cuda_runtime.load(c, f"kernel{n}"))
        kernels = [loaded[id(c)] for c in cubins]
        python = load(code.python, cfg, kernels, constants, code.device.index or 0)
        return hosts.on_gpu(code, python, kernels, cfg, trace)


_loaded = 0


def load(python: str, cfg: Config, *bound: object) -> BoxedCall:
    """Execute the printed host program, and bind it to its kernels, its constants and, on a CPU, its threads."""
    global _loaded
    _loaded += 1
    name = f"<altbackend graph {_loaded}>"
    linecache.cache[name] = (len(python), None, python.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": name}
    exec(bytecode.compiled(python, name, open_store(cfg)), space)
    call: BoxedCall = boxed(space["bind"](*bound))
    weakref.finalize(call, linecache.cache.pop, name, None).atexit = False
    return call
