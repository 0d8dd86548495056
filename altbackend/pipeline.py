"""The compiler on one page: one functional ATen graph in, one callable out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace

import torch

from altbackend.lazy_dataclass import dataclass

from . import fx_passes
from .autotune import products, tiles
from .codegen.cpp import attention as attention_cpp
from .codegen.cpp import emit
from .codegen.host import cpp_cuda, cpp_graph, cpu_program, cuda_program, launch_plan
from .codegen.triton import attention, horizontal, print_triton
from .codegen.triton.print_triton import Emitted
from .compat import torch_api
from .compile_pool import cuda as compile_cuda
from .compiled import replay, subgraphs
from .compiled.artifact import Code, HostText
from .compiled.load import Job, bind, bind_deferred
from .config.options import Config
from .debug.trace import DecisionKind, Trace
from .errors import Unsupported
from .fx_passes import constants as weights
from .fx_passes import devices
from .graph_cache import lookup
from .ir.attention import Attention
from .ir.loops import Extern, Program, show_program
from .ir.verify import verify
from .lowering.facts import device_of
from .lowering.graph import lower_graph
from .lowering.subgraphs import require_closed, require_functional
from .runtime import multi_device
from .runtime.boxed import Args, BoxedCall, Values, boxed
from .runtime.cpp_host import HostForm
from .runtime.layouts import Layouts
from .schedule import horizontal_fusion, horizontal_split, kernel
from .schedule.concatenations import share_concatenations
from .schedule.deps import Deps
from .schedule.device import Cpu, Device, Gpu, ScheduleContext, read_device
from .schedule.donated import with_donated
from .schedule.fusion.group import Decision, Group
from .schedule.horizontal_parts import HorizontalKernel, Step
from .schedule.nested_concatenations import nest_concatenations
from .schedule.products import epilogue
from .schedule.short_reductions import write_out_short_reductions
from .schedule.split_and_fuse import split_and_fuse
from .schedule.tiling.gpu.tiled import TiledHorizontal, TiledKernel, pairs_in_one_pass, tile_steps

Constants = dict[str, object]


def compile_graph(
    gm: torch.fx.GraphModule,
    cfg: Config,
    trace: Trace,
    job: Job,
    on_stored: lookup.OnStored | None = None,
    failed: Callable[[Exception], BoxedCall] | None = None,
) -> BoxedCall:
    """Compile a functional graph. The result takes one list of inputs, which it empties, and returns a tuple.

    `on_stored` is told the path of the cache entry, if there is one. With `failed`, kernels may still be built when
    this function returns; the first call waits for them, and `failed` returns its replacement if their build fails.
    Raise Unsupported, CompilerMissing or CompilerFailed, leaving the graph and its parameters unchanged.
    """
    if len(devices.gpus(gm)) > 1:
        return _over_devices(gm, cfg, trace, job)
    load = Loader(cfg, trace, job, on_stored or (lambda _: None), failed)
    result = lookup.lookup(gm, cfg, asdict(job), trace)
    if isinstance(result, lookup.Uncacheable):
        trace.decision(DecisionKind.CACHE, trace.graph_name, "not cached", result.reason)
        call = load.new(_translate_and_submit(gm, load), contextlib.nullcontext())
    else:
        call = load.cached(result) or _compile_and_store(result.query, load)
    trace.finish()
    return call


def _compile_and_store(query: lookup.Query, load: Loader) -> BoxedCall:
    """Translate a graph, load its code and store it, while no other process compiles the same graph."""
    with contextlib.ExitStack() as lock:
        lock.enter_context(query.lock())
        result = lookup.find(query, load.trace)  # another process may have compiled the graph meanwhile
        if (call := load.cached(result)) is not None:
            return call
        with load.trace.stage("cache"):
            reason = lookup.miss_reason(query.parts, query.path)
            lines = query.lines  # before the passes change the graph
        load.trace.decision(DecisionKind.CACHE, load.trace.graph_name, "miss", reason)
        code = _translate_and_submit(query.gm, load)
        entry = lookup.new_entry(query, code, lines, load.trace)
        return load.new(code, entry.stored_after(lock.pop_all(), load.trace, load.on_stored))


def _translate_and_submit(gm: torch.fx.GraphModule, load: Loader) -> Code:
    return translate(gm, load.cfg, load.trace, load.job, lambda kernel: compile_cuda.submit(kernel, load.cfg))


@dataclass(frozen=True)
class Loader:
    """Makes callables of code: at once, or deferred to the first call. The fields are those of `compile_graph`."""

    cfg: Config
    trace: Trace
    job: Job
    on_stored: lookup.OnStored
    failed: Callable[[Exception], BoxedCall] | None

    def cached(self, result: lookup.Hit | lookup.Miss) -> BoxedCall | None:
        """Return the callable of a hit; None for a miss, or if the code cannot be loaded."""
        if isinstance(result, lookup.Miss):
            return None
        try:
            call = bind(result.code, self.cfg, self.trace, self.job)
        except Exception as cause:  # an entry with any defect is a miss
            lookup.unusable(result.query, cause, self.trace)
            return None
        result.record_loaded(self.trace, self.on_stored)
        return call

    def new(self, code: Code, building: AbstractContextManager[object]) -> BoxedCall:
        """Return the callable of new code, whose kernels are built inside the context `building`."""
        needs_build = any(c.cpp or c.jobs for c in code.with_subgraphs())
        # with `log` or `debug_dir`, the timings of this graph include the build
        if self.failed is not None and needs_build and not self.cfg.log and not self.cfg.debug_dir:
            return bind_deferred(code, self.cfg, self.trace, self.job, building, self.failed)
        with building:
            return bind(code, self.cfg, self.trace, self.job)


def _over_devices(gm: torch.fx.GraphModule, cfg: Config, trace: Trace, job: Job) -> BoxedCall:
    """Compile a graph over several GPUs: one program for each device's parts, and the copies between them."""
    parts = devices.parts(gm)
    if isinstance(parts, str):
        raise Unsupported(None, f"a graph over several GPUs: {parts}", todo="compile the devices' parts apart")
    cfg = replace(cfg, cudagraphs=False)
    steps = []
    for k, part in enumerate(parts):
        own = Trace(f"{trace.graph_name}_part{k}", cfg)
        is_copy = part.device is None
        call = by_library(part.module) if is_copy else compile_graph(part.module, cfg, own, Job("forward"))
        steps.append(multi_device.Step(call, part.inputs, part.outputs))
        trace.decision(DecisionKind.DEVICE, ", ".join(part.outputs), str(part.device or "between devices"), "")
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list)), "a graph returns several values"
    results = [a.name if isinstance(a, torch.fx.Node) else (a,) for a in returned]
    trace.finish()
    inputs = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    return multi_device.MultiDevice(inputs, multi_device.with_drops(steps, results), results)


def by_library(gm: torch.fx.GraphModule) -> BoxedCall:
    """Return a callable that runs the graph operator by operator. It takes one list of inputs, which it empties."""

    @boxed
    def call(args: Args) -> Values:
        inputs = list(args)
        args.clear()
        results: Values = gm(*inputs)
        return results

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
    layouts = () if torch_api.guards_layouts() else layouts_of(gm, job)
    scheduled, frozen = schedule_graph(gm, cfg, trace, job)
    program = scheduled.program
    with trace.stage("subgraphs"):
        inner = subgraphs.compile_subgraphs(
            program, scheduled.constants, cfg, trace, lambda g, c, t: translate(g, c, t, Job("subgraph"))
        )
    with trace.stage("codegen"):
        on_gpu = scheduled.device.type == "cuda"
        code = _cuda(scheduled, cfg, trace, job, submit) if on_gpu else _cpu(scheduled, cfg, trace, job)
    code = replace(subgraphs.attach(code, inner), layouts=layouts)
    if frozen is None:
        return replace(code, main_inputs=tuple(range(len(program.inputs))))
    return replace(code, weight_prologue=frozen.prologue, main_inputs=frozen.inputs, prologue_inputs=frozen.watched)


def schedule_graph(
    gm: torch.fx.GraphModule, cfg: Config, trace: Trace, job: Job
) -> tuple[Scheduled, weights.Split | None]:
    """Return a functional graph as scheduled kernels and library calls, and its split if it has a weight prologue.

    Changes the graph. Raises Unsupported.
    """
    frozen = None
    device = device_of(gm)
    cuda = device.type == "cuda"
    if job.kind == "subgraph":
        require_functional(gm)
    with trace.stage("post_grad"):
        static = job.static_inputs if job.kind == "inference" else ()
        gm = fx_passes.post_grad(gm, cfg, trace, static)
        if static or (cuda and job.kind == "inference"):
            names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
            frozen = fx_passes.inference(gm, static, cfg, trace, "gpu" if cuda else "cpu")
            if static:
                _log_frozen(frozen, names, job, trace)
        gm = fx_passes.finish(gm, cfg, trace)
    trace.artifact("post_grad_graph.txt", lambda: gm.print_readable(print_output=False), "graph")
    with trace.stage("lower"):
        program, constants = lower_graph(gm, cfg, trace.decision)
        program = check(with_donated(program, job.donated if cfg.reuse_memory else ()), cfg)
        if cfg.reuse_memory:
            program = check(share_concatenations(nest_concatenations(program)), cfg)
        if job.kind == "subgraph":
            require_closed(program)
    trace.artifact("loop_ir.txt", lambda: show_program(program), "ir_pre_fusion")
    ctx = ScheduleContext(read_device(device, cfg.threads), fast_math=cfg.numerics != "eager")
    with trace.stage("schedule"):
        program = check(write_out_short_reductions(program, ctx.device), cfg)
        program, deps, groups = split_and_fuse(program, cfg, ctx.device, trace.decision)
        check(program, cfg)
        if cuda and (choose := products.chooser(cfg, ctx, program)) is not None:
            groups = epilogue.attach(program, deps, groups, trace.decision, choose)
        steps = kernels_of(program, deps, groups, ctx.device, cfg.fuse, trace.decision)
    trace.artifact("kernels.txt", lambda: "\n".join(map(_show_step, steps)), "ir_post_fusion")
    any_strides = job.kind == "subgraph" or job.any_strides
    return Scheduled(program, deps, steps, constants, device, ctx, any_strides), frozen


def kernels_of(
    p: Program, deps: Deps, groups: Sequence[Group], device: Device, fused: bool, decide: Decision
) -> list[Step]:
    """Return the kernels and library calls of fused groups. `fused`: kernels that are alike share launches."""

    built: dict[tuple[int, ...], kernel.Kernel] = {}

    def build(g: Group) -> kernel.Kernel:
        if g.members not in built:
            built[g.members] = kernel.build(p, deps, g, device)
        return built[g.members]

    limits = horizontal_fusion.CPU if isinstance(device, Cpu) else horizontal_fusion.GPU
    if fused:
        groups = horizontal_split.split_mixed(p, deps, groups, build, limits)
    kernels = [g.extern or build(g) for g in groups]
    return horizontal_fusion.fuse_horizontally(p, deps, kernels, decide, limits) if fused else [*kernels]


def _log_frozen(frozen: weights.Split | None, names: Sequence[str], job: Job, trace: Trace) -> None:
    """Offer the graph of the weight prologue to the debug folder, and name the parameters that remain inputs."""
    if frozen is None:
        return
    prologue, unfrozen = frozen.prologue, [names[k] for k in frozen.inputs if k in set(job.static_inputs)]
    trace.artifact("frozen_graph.txt", lambda: prologue.print_readable(print_output=False), "graph")
    count = f"{len(job.static_inputs) - len(unfrozen)} of {len(job.static_inputs)} parameters"
    trace.decision(DecisionKind.FREEZING, count, "folded", f"inputs that remain: {', '.join(unfrozen) or 'none'}")


def layouts_of(gm: torch.fx.GraphModule, job: Job) -> Layouts:
    """Return the traced strides of a graph's static inputs, and whether the graph writes them."""
    inputs = gm.graph.find_nodes(op="placeholder")
    static = [(k, inputs[k], inputs[k].meta.get("val")) for k in job.static_inputs if k < len(inputs)]
    return tuple(
        (k, tuple(val.stride()), any(u.target is torch.ops.aten.copy_.default and u.args[0] is n for u in n.users))
        for k, n, val in static
        if isinstance(val, torch.Tensor) and val.layout == torch.strided and not n.meta.get("opaque")
        if not torch_api.has_symbolic_geometry(val)
    )


@dataclass(frozen=True)
class Scheduled:
    """A scheduled program: kernels and library calls in order, for one device.

    `any_strides`: inputs may have other strides than were traced.
    """

    program: Program
    deps: Deps
    steps: Sequence[Step]
    constants: Constants
    device: torch.device
    ctx: ScheduleContext
    any_strides: bool


def _cpu(s: Scheduled, cfg: Config, trace: Trace, job: Job) -> Code:
    """Print one C++ library and one host program, which may also have a form in C++."""
    steps = launches(s)
    planned = launch_plan.plan(s.program, s.deps, steps, cfg)
    printed = cpu_program.build(planned, cfg, s.any_strides)
    return Code(
        s.device,
        printed.python,
        printed.kernels,
        printed.library_calls,
        cpp=printed.cpp if printed.segments else "",
        constants=callables(steps, s.constants),
        names_lines=any(isinstance(x, launch_plan.Launch) and x.function.checks for x in steps),
        host=_host_text(lambda c: cpp_graph.build(planned, cfg, c), s, cfg, trace, job),
    )


def _host_text(
    build: Callable[[cpp_graph.Calling], cpp_graph.GraphHost], s: Scheduled, cfg: Config, trace: Trace, job: Job
) -> HostText | None:
    """Return the host program in C++; None if it is not wanted or has no such form, with the reason in the trace."""
    if cfg.host == "python" or job.kind == "subgraph":
        return None
    try:
        printed = build(cpp_graph.Calling(s.any_strides, drops=job.kind == "backward"))
    except Unsupported as cause:
        trace.decision(DecisionKind.HOST, trace.graph_name, "python", str(cause))
        return None
    form = HostForm(printed.inputs, printed.outputs, printed.constants, printed.donated)
    return HostText(printed.text, form, printed.segments, printed.steps)


def _cuda(
    s: Scheduled, cfg: Config, trace: Trace, job: Job, submit: Callable[[compile_cuda.Job], object] | None
) -> Code:
    """Print a Triton kernel for each launch, and one host program."""
    p, steps = cuda_steps(s, cfg, trace, submit)
    printed = cuda_program.build(p, steps, s.any_strides, cfg.size_asserts)
    return Code(
        s.device,
        printed.python,
        printed.kernels,
        printed.library_calls,
        jobs=tuple(job_of(s, k, hints) for k, hints in printed.launches),
        constants=callables(steps, s.constants),
        names_lines=any(isinstance(x, cuda_program.CudaLaunch) and bool(x.kernel.checks) for x in steps),
        recording=replay.facts(s.program),
        host=_host_text(lambda c: _cuda_host(p, steps, cfg, c), s, cfg, trace, job),
    )


def job_of(s: Scheduled, kernel: print_triton.TritonKernel, aligned: Sequence[int]) -> compile_cuda.Job:
    """Return the compilation of a kernel. `aligned`: the numbers of its pointers that are multiples of 16 bytes."""
    assert isinstance(s.ctx.device, Gpu)
    return compile_cuda.job_of(kernel, aligned, s.ctx.device.capability, s.ctx.fast_math)


def cuda_steps(
    s: Scheduled, cfg: Config, trace: Trace, submit: Callable[[compile_cuda.Job], object] | None = None
) -> tuple[Program, list[cuda_program.Step]]:
    """Return the launches and library calls of a program on a GPU, and the program with the launches' workspaces."""
    p, unaligned = s.program, cuda_program.unaligned_in(s.program)
    steps: list[cuda_program.Step] = []
    for step, emitted in _emitted(s, cfg, trace):
        first = len(steps)
        if isinstance(step, Extern) and isinstance(step.target, Attention):
            for printed_kernel, buffers in attention.emit(p, step.target, s.ctx):
                p, launches = cuda_program.launches(p, printed_kernel, buffers, step.origins, len(steps))
                steps += launches
        elif isinstance(step, Extern):
            steps.append(step)
        elif isinstance(emitted, TiledHorizontal):
            together, names = horizontal.emit(emitted)
            steps.append(cuda_program.CudaLaunch(together, together.params, names, emitted.launch.kernel.origins))
        else:
            for tiled, printed_kernel, buffers in emitted:
                origins = tiled.kernel.origins
                in_place = pairs_in_one_pass(tiled)
                p, launches = cuda_program.launches(p, printed_kernel, buffers, origins, len(steps), in_place)
                steps += launches
        for x in steps[first:]:
            if submit is not None and isinstance(x, cuda_program.CudaLaunch):
                aligned = cuda_program.aligned_pointers(x, unaligned)
                submit(job_of(s, x.kernel, aligned))
    return p, steps


def _cuda_host(
    p: Program, steps: Sequence[cuda_program.Step], cfg: Config, calling: cpp_graph.Calling
) -> cpp_graph.GraphHost:
    return cpp_graph.build_cuda(cpp_cuda.plan_of(p, steps), cfg, calling)


def _emitted(s: Scheduled, cfg: Config, trace: Trace) -> Iterable[tuple[Step, list[Emitted] | TiledHorizontal]]:
    """Give every step with its Triton kernels, one by one: none for a library call, several for a split kernel."""
    tiled = tile_steps(s.program, s.deps, s.steps, s.ctx, trace.decision)
    tuner = tiles.tile_tuner(cfg, s.ctx, s.device)
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
    """Return `p`, verified if option `verify_ir` is set."""
    return verify(p) if cfg.verify_ir else p


def _show_step(step: Step) -> str:
    if isinstance(step, HorizontalKernel):
        return horizontal_fusion.show(step)
    if not isinstance(step, Extern):
        return kernel.show_kernel(step)
    return f"{step.target}\n" if isinstance(step.target, Attention) else f"library call: {step.target}\n"


def launches(s: Scheduled) -> list[launch_plan.Step]:
    """Return the steps of a program on a CPU, with each kernel as the tree from which its C++ is printed."""
    return [_step(s, step, n) for n, step in enumerate(s.steps)]


def _step(s: Scheduled, step: Step, n: int) -> launch_plan.Step:
    label = f"kernel of step {n}"
    if isinstance(step, Extern) and isinstance(step.target, Attention):
        return launch_plan.Launch(label, *attention_cpp.emit(s.program, step.target), step.origins)
    if isinstance(step, Extern):
        return step
    if isinstance(step, HorizontalKernel):
        return launch_plan.horizontal_launch(label, step, *emit.emit(step.body, step.kernel, s.ctx))
    function, buffers = emit.emit(s.program, step, s.ctx)
    return launch_plan.Launch(label, function, buffers, step.origins, step.in_place)


def callables(steps: Values, constants: Constants) -> dict[str, object]:
    """Return constants by name, with the call targets that have no importable name."""
    out = dict(constants)
    for s in steps:
        if isinstance(s, Extern) and not isinstance(s.target, torch._ops.OpOverload):
            out[f"op_{getattr(s.target, '__name__', type(s.target).__name__)}"] = s.target
    return out
