"""The compiler on one page: one functional ATen graph in, one callable out."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import fx_passes
from .codegen import emit, host
from .compile_pool import cpp
from .config import Config
from .debug import Trace
from .ir.loops import Extern, Program, show_program
from .ir.verify import verify
from .lowering.graph import lower_graph
from .report import stats
from .runtime.hoisted import Hoisted
from .runtime.host import Library
from .schedule import deps as dependencies
from .schedule import fusion, kernel, split
from .schedule.target import cpu

Compiled = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Job:
    """What a graph is compiled for. `kind`: "inference", "forward" or "backward"."""

    kind: str
    static_inputs: tuple[int, ...] = ()


def compile_graph(gm: torch.fx.GraphModule, cfg: Config, trace: Trace, job: Job) -> Compiled:
    """Compile a functional graph. The result takes one list of inputs, which it empties, and returns a tuple.

    Raises Unsupported, CompilerMissing, CompilerFailed; the graph and its parameters are left as they were.
    """
    hoisted = None
    with trace.stage("post_grad"):
        gm = fx_passes.post_grad(gm, cfg, trace)
        if job.kind == "inference" and cfg.hoist_constants and job.static_inputs:
            hoisted = fx_passes.cpu_inference(gm, job.static_inputs, cfg, trace)
        gm = fx_passes.finish(gm, cfg)
    trace.artifact("post_grad_graph.txt", lambda: gm.print_readable(print_output=False), "graph")
    with trace.stage("lower"):
        program, constants = lower_graph(gm, cfg, trace.decision)
        check(program, cfg)
    trace.artifact("loop_ir.txt", lambda: show_program(program), "ir_pre_fusion")
    with trace.stage("schedule"):
        target = cpu(cfg.threads or torch.get_num_threads())
        whole = fusion.totals_over_rows(program, cfg, target)
        program = check(split.split_reductions(program, target, whole), cfg)
        edges = dependencies.analyse(program)
        groups = fusion.fuse(program, edges, cfg, target, trace.decision)
        kernels = [g.extern or kernel.build(program, edges, g, target) for g in groups]
    trace.artifact("kernels.txt", lambda: "\n".join(map(_show_step, kernels)), "ir_post_fusion")
    with trace.stage("codegen"):
        steps = [_step(program, k, n) for n, k in enumerate(kernels)]
        printed = host.build(program, edges, steps, cfg, constants)
    trace.artifact("kernels.cpp", lambda: printed.cpp, "kernel_code")
    trace.artifact("host.py", lambda: printed.python, "output_code")
    with trace.stage("build"):
        library = Library(str(cpp.build(printed.cpp, cfg))) if printed.segments else None
    with trace.stage("load"):
        call = load(printed.python, library, callables(steps, constants), cfg)
    stats.record(kernels=printed.kernels, library_calls=printed.library_calls, compile_seconds=trace.seconds())
    trace.finish()
    return call if hoisted is None else Hoisted(call, hoisted.prologue, hoisted.kept, hoisted.watched)


def check(p: Program, cfg: Config) -> Program:
    """`p`, verified when the options ask for it."""
    return verify(p) if cfg.verify_ir else p


def _show_step(k: Any) -> str:
    return f"library call: {k.target}\n" if isinstance(k, Extern) else kernel.show_kernel(k)


def _step(p: Program, k: Any, n: int) -> host.Step:
    if isinstance(k, Extern):
        return k
    function, buffers = emit.emit(p, k)
    return host.Launch(f"kernel of step {n}", function, buffers, k.origins, k.in_place)


def callables(steps: Sequence[host.Step], constants: dict[str, Any]) -> dict[str, Any]:
    """Constants by name, with the call targets that have no importable name."""
    out = dict(constants)
    for s in steps:
        if isinstance(s, Extern) and not isinstance(s.target, torch._ops.OpOverload):
            out[f"op_{getattr(s.target, '__name__', type(s.target).__name__)}"] = s.target
    return out


_loaded = 0


def load(python: str, library: Library | None, constants: dict[str, Any], cfg: Config) -> Compiled:
    """Execute the printed host program and bind it to its library and constants."""
    global _loaded
    _loaded += 1
    name = f"<altbackend graph {_loaded}>"
    linecache.cache[name] = (len(python), None, python.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": name}
    exec(compile(python, name, "exec"), space)
    threads = torch.get_num_threads if cfg.threads == 0 else lambda: cfg.threads
    call: Compiled = space["bind"](library, constants, threads)
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
