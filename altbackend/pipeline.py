"""The compiler on one page: one functional ATen graph in, one callable out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from . import compat, fx_passes
from .autotune import products
from .binding import Compiled, Job, bind
from .cache import store
from .cache.graphs import through_cache
from .codegen import bundle as print_bundle
from .codegen import emit, host, host_cuda, replay, split_kernel
from .compile_pool import cuda as compile_cuda
from .compile_pool.code import Code
from .config import Config
from .debug import Trace
from .ir.loops import Extern, Program, show_program
from .ir.verify import verify
from .lowering.facts import device_of
from .lowering.graph import lower_graph
from .schedule import bundle, epilogue, fusion, kernel, split
from .schedule import deps as dependencies
from .schedule import target as targets
from .schedule.deps import Deps

Constants = dict[str, Any]


def compile_graph(
    gm: torch.fx.GraphModule, cfg: Config, trace: Trace, job: Job, kept: Callable[[store.Place], None] | None = None
) -> Compiled:
    """Compile a functional graph. The result takes one list of inputs, which it empties, and returns a tuple.

    `kept` is told where the cache holds the code, if it does. Raises Unsupported, CompilerMissing, CompilerFailed; the
    graph and its parameters are left as they were.
    """
    call = through_cache(
        gm,
        cfg,
        trace,
        asdict(job),
        lambda: translate(gm, cfg, trace, job),
        lambda code: bind(code, cfg, trace, job),
        kept,
    )
    trace.finish()
    return call


def translate(gm: torch.fx.GraphModule, cfg: Config, trace: Trace, job: Job) -> Code:
    """A functional graph as text: its host program and its kernels. Changes the graph. Raises Unsupported."""
    hoisted = None
    device = device_of(gm)
    cuda = device.type == "cuda"
    with trace.stage("post_grad"):
        gm = fx_passes.post_grad(gm, cfg, trace)
        if job.kind == "inference" and cfg.hoist_constants and job.static_inputs:
            passes = fx_passes.cuda_inference if cuda else fx_passes.cpu_inference
            hoisted = passes(gm, job.static_inputs, cfg, trace)
        gm = fx_passes.finish(gm, cfg)
    trace.artifact("post_grad_graph.txt", lambda: gm.print_readable(print_output=False), "graph")
    with trace.stage("lower"):
        program, constants = lower_graph(gm, cfg, trace.decision)
        check(program, cfg)
    trace.artifact("loop_ir.txt", lambda: show_program(program), "ir_pre_fusion")
    target = targets.cuda(fast=cfg.numerics != "eager") if cuda else targets.cpu(cfg.threads or torch.get_num_threads())
    with trace.stage("schedule"):
        whole = fusion.totals_over_rows(program, cfg, target)
        program = check(split.split_reductions(program, target, whole), cfg)
        edges = dependencies.analyse(program)
        groups = fusion.fuse(program, edges, cfg, target, trace.decision)
        if cuda and (choose := products.chooser(cfg, target, program)) is not None:
            groups = epilogue.attach(program, edges, groups, trace.decision, choose)
        kernels: list[Any] = [g.extern or kernel.build(program, edges, g, target) for g in groups]
        if cuda and cfg.fuse:
            kernels = bundle.bundled(program, kernels, trace.decision)
    trace.artifact("kernels.txt", lambda: "\n".join(map(_show_step, kernels)), "ir_post_fusion")
    with trace.stage("codegen"):
        code = (_cuda if cuda else _cpu)(program, edges, kernels, target, constants, device, cfg, trace)
    if hoisted is None:
        return replace(code, kept=tuple(range(len(program.inputs))))
    return replace(code, prologue=hoisted.prologue, kept=hoisted.kept, watched=hoisted.watched)


def _cpu(
    p: Program,
    edges: Deps,
    kernels: Sequence[Any],
    target: targets.Target,
    constants: Constants,
    device: torch.device,
    cfg: Config,
    trace: Trace,
) -> Code:
    """OpenMP C++: one library and one host program per graph."""
    steps = [_step(p, k, n) for n, k in enumerate(kernels)]
    printed = host.build(p, edges, steps, cfg, constants)
    return Code(
        device,
        printed.python,
        printed.kernels,
        printed.library_calls,
        cpp=printed.cpp if printed.segments else "",
        bound=callables(steps, constants),
        names_lines=any(isinstance(s, host.Launch) and s.function.checks for s in steps),
    )


def _cuda(
    p: Program,
    edges: Deps,
    kernels: Sequence[Any],
    target: targets.Target,
    constants: Constants,
    device: torch.device,
    cfg: Config,
    trace: Trace,
) -> Code:
    """Triton: a kernel per launch, and one host program."""
    recording = replay.facts(p)
    capability = compat.cuda_capability(device)
    steps: list[host_cuda.Step] = []
    for k in kernels:
        if isinstance(k, Extern):
            steps.append(k)
            continue
        if isinstance(k, bundle.Bundle):
            together, names = print_bundle.emit(k, target)
            steps.append(host_cuda.CudaLaunch(together, together.params, names, k.kernel.origins))
            continue
        for part, made, buffers in split_kernel.emit(p, edges, k, target, trace.decision):
            p, found = host_cuda.launches(p, made, buffers, part.origins, len(steps))
            steps += found
    printed = host_cuda.build(p, edges, steps)
    return Code(
        device,
        printed.python,
        printed.kernels,
        printed.library_calls,
        jobs=tuple(compile_cuda.job_of(k, hints, capability) for k, hints in printed.launches),
        bound=callables(steps, constants),
        names_lines=any(isinstance(s, host_cuda.CudaLaunch) and bool(s.kernel.checks) for s in steps),
        recording=recording,
    )


def check(p: Program, cfg: Config) -> Program:
    """`p`, verified when the options ask for it."""
    return verify(p) if cfg.verify_ir else p


def _show_step(k: Any) -> str:
    if isinstance(k, bundle.Bundle):
        return bundle.show(k)
    return f"library call: {k.target}\n" if isinstance(k, Extern) else kernel.show_kernel(k)


def _step(p: Program, k: Any, n: int) -> host.Step:
    if isinstance(k, Extern):
        return k
    function, buffers = emit.emit(p, k)
    return host.Launch(f"kernel of step {n}", function, buffers, k.origins, k.in_place)


def callables(steps: Sequence[Any], constants: Constants) -> dict[str, Any]:
    """Constants by name, with the call targets that have no importable name."""
    out = dict(constants)
    for s in steps:
        if isinstance(s, Extern) and not isinstance(s.target, torch._ops.OpOverload):
            out[f"op_{getattr(s.target, '__name__', type(s.target).__name__)}"] = s.target
    return out
