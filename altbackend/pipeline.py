"""The compiler on one page: one functional ATen graph in, one callable out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from . import fx_passes
from .autotune import products, tiles
from .codegen.cpp import emit
from .codegen.host import cpu_program, cuda_program, launch_plan
from .codegen.triton import horizontal, print_triton
from .codegen.triton.print_triton import Emitted
from .compat import torch_api
from .compile_pool import cuda as compile_cuda
from .compiled import replay, subgraphs
from .compiled.artifact import Code
from .compiled.load import Compiled, Job, bind, bind_later
from .config.options import Config
from .debug.trace import Trace
from .errors import Unsupported
from .fx_passes import devices
from .graph_cache import entry_files
from .graph_cache.lookup import through_cache
from .ir.loops import Extern, Program, show_program
from .ir.verify import verify
from .lowering.facts import device_of
from .lowering.graph import lower_graph
from .lowering.subgraphs import require_closed, require_functional
from .runtime import multi_device
from .runtime.layouts import Layouts
from .schedule import deps as dependencies
from .schedule import horizontal_fusion, kernel, split
from .schedule.deps import Deps
from .schedule.device import Gpu, ScheduleContext, read_device
from .schedule.fusion import fuse
from .schedule.products import epilogue
from .schedule.tiling.gpu.tiled import TiledHorizontal, TiledKernel, tile_steps

Constants = dict[str, Any]


def compile_graph(
    gm: torch.fx.GraphModule,
    cfg: Config,
    trace: Trace,
    job: Job,
    kept: Callable[[entry_files.Place], None] | None = None,
    failed: Callable[[Exception], Compiled] | None = None,
) -> Compiled:
    """Compile a functional graph. The result takes one list of inputs, which it empties, and returns a tuple.

    `kept` is told where the cache holds the code, if it does. With `failed` kernels may still be under way when this
    returns, and are waited for at the first call; `failed` then gives what runs should their build fail. Raises
    Unsupported, CompilerMissing, CompilerFailed; the graph and its parameters are left as they were.
    """
    if len(devices.gpus(gm)) > 1:
        return _over_devices(gm, cfg, trace, job)

    def build(code: Code, around: AbstractContextManager[object]) -> Compiled:
        to_build = any(c.cpp or c.jobs for c in code.whole())
        # who has asked for times gets those of all stages together
        if failed is not None and to_build and not cfg.log and not cfg.debug_dir:
            return bind_later(code, cfg, trace, job, around, failed)
        with around:
            return bind(code, cfg, trace, job)

    call = through_cache(
        gm,
        cfg,
        trace,
        asdict(job),
        lambda: translate(gm, cfg, trace, job, lambda known: compile_cuda.submit(known, cfg)),
        lambda code: bind(code, cfg, trace, job),
        build,
        kept,
    )
    trace.finish()
    return call


def _over_devices(gm: torch.fx.GraphModule, cfg: Config, trace: Trace, job: Job) -> Compiled:
    """A graph over several GPUs: one program for each device's parts, and the copies between them."""
    found = devices.parts(gm)
    if isinstance(found, str):
        raise Unsupported(None, f"a graph over several GPUs: {found}", todo="compile the devices' parts apart")
    cfg = replace(cfg, cudagraphs=False)
    steps = []
    for k, part in enumerate(found):
        own = Trace(f"{trace.graph_name}_part{k}", cfg)
        as_it_is = part.device is None
        call = by_library(part.module) if as_it_is else compile_graph(part.module, cfg, own, Job("forward"))
        steps.append(multi_device.Step(call, part.inputs, part.outputs))
        trace.decision("device", ", ".join(part.outputs), str(part.device or "between devices"), "")
    returned: Any = gm.graph.output_node().args[0]
    results = [a.name if isinstance(a, torch.fx.Node) else (a,) for a in returned]
    trace.finish()
    return multi_device.Several(
        [n.name for n in gm.graph.find_nodes(op="placeholder")], multi_device.with_drops(steps, results), results
    )


def by_library(gm: torch.fx.GraphModule) -> Compiled:
    """The graph as it is, operator by operator. The result takes one list of inputs, which it empties."""

    def call(args: list[Any]) -> Any:
        held = list(args)
        args.clear()
        return gm(*held)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def translate(
    gm: torch.fx.GraphModule,
    cfg: Config,
    trace: Trace,
    job: Job,
    submit: Callable[[compile_cuda.Job], object] | None = None,
) -> Code:
    """A functional graph as text: its host program and its kernels. Changes the graph. Raises Unsupported.

    `submit` is given each Triton kernel as soon as its text is known, which may be before the others'.
    """
    frozen = None
    layouts = () if torch_api.guards_layouts() else layouts_of(gm, job)
    device = device_of(gm)
    cuda = device.type == "cuda"
    if job.kind == "body":
        require_functional(gm)
    with trace.stage("post_grad"):
        gm = fx_passes.post_grad(gm, cfg, trace)
        if job.kind == "inference" and job.static_inputs:
            passes = fx_passes.cuda_inference if cuda else fx_passes.cpu_inference
            with fx_passes.verified(gm, cfg, "the passes of inference"):
                frozen = passes(gm, job.static_inputs, cfg, trace)
        gm = fx_passes.finish(gm, cfg)
    trace.artifact("post_grad_graph.txt", lambda: gm.print_readable(print_output=False), "graph")
    with trace.stage("lower"):
        program, constants = lower_graph(gm, cfg, trace.decision)
        check(program, cfg)
        if job.kind == "body":
            require_closed(program)
    with trace.stage("bodies"):
        inner = subgraphs.compiled(program, constants, cfg, trace, lambda g, c, t: translate(g, c, t, Job("body")))
    trace.artifact("loop_ir.txt", lambda: show_program(program), "ir_pre_fusion")
    ctx = ScheduleContext(read_device(device, cfg.threads), fast_math=cfg.numerics != "eager")
    with trace.stage("schedule"):
        unsplit = fuse.totals_over_rows(program, cfg, ctx.device)
        program = check(split.split_reductions(program, ctx.device, unsplit), cfg)
        deps = dependencies.analyse(program)
        groups = fuse.fuse(program, deps, cfg, ctx.device, trace.decision)
        if cuda and (choose := products.chooser(cfg, ctx, program)) is not None:
            groups = epilogue.attach(program, deps, groups, trace.decision, choose)
        kernels = [g.extern or kernel.build(program, deps, g, ctx.device) for g in groups]
        steps: list[horizontal_fusion.Step] = [*kernels]
        if cuda and cfg.fuse:
            steps = horizontal_fusion.fuse_horizontally(program, kernels, trace.decision)
    trace.artifact("kernels.txt", lambda: "\n".join(map(_show_step, steps)), "ir_post_fusion")
    with trace.stage("codegen"):
        any_strides = job.kind == "body" or job.any_strides
        scheduled = Scheduled(program, deps, steps, constants, device, ctx, any_strides)
        code = _cuda(scheduled, cfg, trace, submit) if cuda else _cpu(scheduled, cfg)
    code = replace(subgraphs.attached(code, inner), layouts=layouts)
    if frozen is None:
        return replace(code, kept=tuple(range(len(program.inputs))))
    return replace(code, prologue=frozen.prologue, kept=frozen.kept, watched=frozen.watched)


def layouts_of(gm: torch.fx.GraphModule, job: Job) -> Layouts:
    """The strides of a graph's static inputs, as they were traced."""
    inputs = gm.graph.find_nodes(op="placeholder")
    static = [(k, inputs[k], inputs[k].meta.get("val")) for k in job.static_inputs if k < len(inputs)]
    return tuple(
        (k, tuple(val.stride()), any(u.target is torch.ops.aten.copy_.default and u.args[0] is n for u in n.users))
        for k, n, val in static
        if isinstance(val, torch.Tensor) and val.layout == torch.strided and not torch_api.has_symbolic_geometry(val)
    )


@dataclass(frozen=True)
class Scheduled:
    """A scheduled program: kernels and library calls in order, for one device.

    `any_strides`: inputs may have other strides than were traced.
    """

    program: Program
    deps: Deps
    steps: Sequence[horizontal_fusion.Step]
    constants: Constants
    device: torch.device
    ctx: ScheduleContext
    any_strides: bool


def _cpu(s: Scheduled, cfg: Config) -> Code:
    """Print one C++ library and one host program."""
    steps = [_step(s, step, n) for n, step in enumerate(s.steps)]
    printed = cpu_program.build(s.program, s.deps, steps, cfg, s.any_strides)
    return Code(
        s.device,
        printed.python,
        printed.kernels,
        printed.library_calls,
        cpp=printed.cpp if printed.segments else "",
        bound=callables(steps, s.constants),
        names_lines=any(isinstance(x, launch_plan.Launch) and x.function.checks for x in steps),
    )


def _cuda(s: Scheduled, cfg: Config, trace: Trace, submit: Callable[[compile_cuda.Job], object] | None) -> Code:
    """Print a Triton kernel for each launch, and one host program."""
    assert isinstance(s.ctx.device, Gpu)
    p, capability, contract = s.program, s.ctx.device.capability, s.ctx.fast_math
    unaligned = cuda_program.unaligned_in(p)
    steps: list[cuda_program.Step] = []
    for step, emitted in _emitted(s, cfg, trace):
        first = len(steps)
        if isinstance(step, Extern):
            steps.append(step)
        elif isinstance(emitted, TiledHorizontal):
            together, names = horizontal.emit(emitted)
            steps.append(cuda_program.CudaLaunch(together, together.params, names, emitted.launch.kernel.origins))
        else:
            for tiled, printed_kernel, buffers in emitted:
                origins = tiled.kernel.origins
                p, launches = cuda_program.launches(p, printed_kernel, buffers, origins, len(steps))
                steps += launches
        for x in steps[first:]:
            if submit is not None and isinstance(x, cuda_program.CudaLaunch):
                aligned = cuda_program.aligned_pointers(x, unaligned)
                submit(compile_cuda.job_of(x.kernel, aligned, capability, contract))
    printed = cuda_program.build(p, steps, s.any_strides, cfg.size_asserts)
    return Code(
        s.device,
        printed.python,
        printed.kernels,
        printed.library_calls,
        jobs=tuple(compile_cuda.job_of(k, hints, capability, contract) for k, hints in printed.launches),
        bound=callables(steps, s.constants),
        names_lines=any(isinstance(x, cuda_program.CudaLaunch) and bool(x.kernel.checks) for x in steps),
        recording=replay.facts(s.program),
    )


def _emitted(
    s: Scheduled, cfg: Config, trace: Trace
) -> Iterable[tuple[horizontal_fusion.Step, list[Emitted] | TiledHorizontal]]:
    """Give every step with its Triton kernels, one by one: none for a library call, several for a split kernel."""
    tiled = tile_steps(s.program, s.deps, s.steps, s.ctx, trace.decision)
    tuner = tiles.tuner(cfg, s.ctx, s.device)
    printed = ((step, _printed(s.program, kernels)) for step, kernels in tiled)
    if tuner is None:
        return printed
    entries = list(printed)
    kernels = [e for _, emitted in entries if not isinstance(emitted, TiledHorizontal) for e in emitted]
    best = iter(tuner.tuned(s.program, kernels, trace.decision))
    return [
        (step, emitted if isinstance(emitted, TiledHorizontal) else [next(best) for _ in emitted])
        for step, emitted in entries
    ]


def _printed(p: Program, kernels: list[TiledKernel] | TiledHorizontal) -> list[Emitted] | TiledHorizontal:
    return kernels if isinstance(kernels, TiledHorizontal) else [(k, *print_triton.emit(p, k)) for k in kernels]


def check(p: Program, cfg: Config) -> Program:
    """`p`, verified when the options ask for it."""
    return verify(p) if cfg.verify_ir else p


def _show_step(step: horizontal_fusion.Step) -> str:
    if isinstance(step, horizontal_fusion.HorizontalKernel):
        return horizontal_fusion.show(step)
    return f"library call: {step.target}\n" if isinstance(step, Extern) else kernel.show_kernel(step)


def _step(s: Scheduled, step: horizontal_fusion.Step, n: int) -> launch_plan.Step:
    if isinstance(step, Extern):
        return step
    assert isinstance(step, kernel.Kernel)
    function, buffers = emit.emit(s.program, step, s.ctx)
    return launch_plan.Launch(f"kernel of step {n}", function, buffers, step.origins, step.in_place)


def callables(steps: Sequence[Any], constants: Constants) -> dict[str, Any]:
    """Constants by name, with the call targets that have no importable name."""
    out = dict(constants)
    for s in steps:
        if isinstance(s, Extern) and not isinstance(s.target, torch._ops.OpOverload):
            out[f"op_{getattr(s.target, '__name__', type(s.target).__name__)}"] = s.target
    return out
