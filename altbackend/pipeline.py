"""The compiler on one page: one functional ATen graph in, one callable out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from . import fx_passes
from .autotune import products, tiles
from .codegen.cpp import emit
from .codegen.host import cpu_program, cuda_program
from .codegen.triton import horizontal as print_bundle
from .codegen.triton import split_kernel
from .compat import torch_api
from .compile_pool import cuda as compile_cuda
from .compiled import replay, subgraphs
from .compiled.artifact import Code
from .compiled.load import Job, bind, bind_deferred
from .config.options import Config
from .debug.trace import DecisionKind, Trace
from .errors import Unsupported
from .fx_passes import devices
from .graph_cache import lookup
from .ir.loops import Extern, Program, show_program
from .ir.verify import verify
from .lowering.facts import device_of
from .lowering.graph import lower_graph
from .lowering.subgraphs import require_closed, require_functional
from .runtime import multi_device
from .runtime.boxed import Args, BoxedCall, Values, boxed
from .runtime.layouts import Layouts
from .schedule import deps as dependencies
from .schedule import device as targets
from .schedule import horizontal_fusion, kernel, split
from .schedule.deps import Deps
from .schedule.fusion import fuse
from .schedule.products import epilogue

Constants = dict[str, Any]


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
    returned: Any = gm.graph.output_node().args[0]
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
    frozen = None
    layouts = () if torch_api.guards_layouts() else layouts_of(gm, job)
    device = device_of(gm)
    cuda = device.type == "cuda"
    if job.kind == "subgraph":
        require_functional(gm)
    with trace.stage("post_grad"):
        gm = fx_passes.post_grad(gm, cfg, trace)
        if job.kind == "inference" and job.static_inputs:
            frozen = fx_passes.inference(gm, job.static_inputs, cfg, trace, "gpu" if cuda else "cpu")
        gm = fx_passes.finish(gm, cfg, trace)
    trace.artifact("post_grad_graph.txt", lambda: gm.print_readable(print_output=False), "graph")
    with trace.stage("lower"):
        program, constants = lower_graph(gm, cfg, trace.decision)
        check(program, cfg)
        if job.kind == "subgraph":
            require_closed(program)
    with trace.stage("subgraphs"):
        inner = subgraphs.compile_subgraphs(
            program, constants, cfg, trace, lambda g, c, t: translate(g, c, t, Job("subgraph"))
        )
    trace.artifact("loop_ir.txt", lambda: show_program(program), "ir_pre_fusion")
    target = targets.cuda(fast=cfg.numerics != "eager") if cuda else targets.cpu(cfg.threads or torch.get_num_threads())
    with trace.stage("schedule"):
        whole = fuse.totals_over_rows(program, cfg, target)
        program = check(split.split_reductions(program, target, whole), cfg)
        edges = dependencies.analyse(program)
        groups = fuse.fuse(program, edges, cfg, target, trace.decision)
        if cuda and (choose := products.chooser(cfg, target, program)) is not None:
            groups = epilogue.attach(program, edges, groups, trace.decision, choose)
        kernels: Args = [g.extern or kernel.build(program, edges, g, target) for g in groups]
        if cuda and cfg.fuse:
            kernels = horizontal_fusion.bundled(program, kernels, trace.decision)
    trace.artifact("kernels.txt", lambda: "\n".join(map(_show_step, kernels)), "ir_post_fusion")
    with trace.stage("codegen"):
        loose = job.kind == "subgraph" or job.any_strides
        parts = (program, edges, kernels, target, constants, device, cfg, trace, loose)
        code = _cuda(*parts, submit) if cuda else _cpu(*parts)
    code = replace(subgraphs.attach(code, inner), layouts=layouts)
    if frozen is None:
        return replace(code, main_inputs=tuple(range(len(program.inputs))))
    return replace(code, weight_prologue=frozen.prologue, main_inputs=frozen.inputs, prologue_inputs=frozen.watched)


def layouts_of(gm: torch.fx.GraphModule, job: Job) -> Layouts:
    """Return the traced strides of a graph's static inputs, and whether the graph writes them."""
    inputs = gm.graph.find_nodes(op="placeholder")
    static = [(k, inputs[k], inputs[k].meta.get("val")) for k in job.static_inputs if k < len(inputs)]
    return tuple(
        (k, tuple(val.stride()), any(u.target is torch.ops.aten.copy_.default and u.args[0] is n for u in n.users))
        for k, n, val in static
        if isinstance(val, torch.Tensor) and val.layout == torch.strided and not torch_api.has_symbolic_geometry(val)
    )


def _cpu(
    p: Program,
    edges: Deps,
    kernels: Values,
    target: targets.Target,
    constants: Constants,
    device: torch.device,
    cfg: Config,
    trace: Trace,
    any_strides: bool,
) -> Code:
    """OpenMP C++: one library and one host program per graph."""
    steps = [_step(p, k, n, cfg.numerics == "eager") for n, k in enumerate(kernels)]
    printed = cpu_program.build(p, edges, steps, cfg, constants, any_strides)
    return Code(
        device,
        printed.python,
        printed.kernels,
        printed.library_calls,
        cpp=printed.cpp if printed.segments else "",
        constants=callables(steps, constants),
        names_lines=any(isinstance(s, cpu_program.Launch) and s.function.checks for s in steps),
    )


def _cuda(
    p: Program,
    edges: Deps,
    kernels: Values,
    target: targets.Target,
    constants: Constants,
    device: torch.device,
    cfg: Config,
    trace: Trace,
    any_strides: bool,
    submit: Callable[[compile_cuda.Job], object] | None,
) -> Code:
    """Triton: a kernel per launch, and one host program."""
    recording = replay.facts(p)
    capability = torch_api.cuda_capability(device)
    tuner = tiles.tile_tuner(cfg, target, device)
    anywhere = cuda_program.anywhere_in(p)
    contract = cfg.numerics != "eager"
    steps: list[cuda_program.Step] = []
    for k, emitted in _emitted(p, edges, kernels, target, tuner, trace):
        known = len(steps)
        if isinstance(k, Extern):
            steps.append(k)
        elif isinstance(k, horizontal_fusion.Bundle):
            together, names = print_bundle.emit(k, target)
            steps.append(cuda_program.CudaLaunch(together, together.params, names, k.kernel.origins))
        for part, made, buffers in emitted:
            p, found = cuda_program.launches(p, made, buffers, part.origins, len(steps))
            steps += found
        for s in steps[known:]:
            if submit is not None and isinstance(s, cuda_program.CudaLaunch):
                submit(compile_cuda.job_of(s.kernel, cuda_program.aligned_pointers(s, anywhere), capability, contract))
    printed = cuda_program.build(p, edges, steps, any_strides, cfg.size_asserts)
    return Code(
        device,
        printed.python,
        printed.kernels,
        printed.library_calls,
        jobs=tuple(compile_cuda.job_of(k, hints, capability, contract) for k, hints in printed.launches),
        constants=callables(steps, constants),
        names_lines=any(isinstance(s, cuda_program.CudaLaunch) and bool(s.kernel.checks) for s in steps),
        recording=recording,
    )


def _emitted(
    p: Program,
    edges: Deps,
    kernels: Values,
    target: targets.Target,
    tuner: tiles.TileTuner | None,
    trace: Trace,
) -> Iterator[tuple[Any, list[split_kernel.Emitted]]]:
    """Every step with its Triton kernels, one by one: none for a library call or a bundle, else one or several."""
    parts = (
        []
        if isinstance(k, (Extern, horizontal_fusion.Bundle))
        else split_kernel.emit(p, edges, k, target, trace.decision)
        for k in kernels
    )
    if tuner is None:
        return zip(kernels, parts, strict=True)
    held = list(parts)
    best = iter(tuner.tuned(p, [e for es in held for e in es], trace.decision))
    return zip(kernels, [[next(best) for _ in es] for es in held], strict=True)


def check(p: Program, cfg: Config) -> Program:
    """Return `p`, verified if option `verify_ir` is set."""
    return verify(p) if cfg.verify_ir else p


def _show_step(k: Any) -> str:
    if isinstance(k, horizontal_fusion.Bundle):
        return horizontal_fusion.show(k)
    return f"library call: {k.target}\n" if isinstance(k, Extern) else kernel.show_kernel(k)


def _step(p: Program, k: Any, n: int, exact: bool) -> cpu_program.Step:
    if isinstance(k, Extern):
        return k
    function, buffers = emit.emit(p, k, exact)
    return cpu_program.Launch(f"kernel of step {n}", function, buffers, k.origins, k.in_place)


def callables(steps: Values, constants: Constants) -> dict[str, Any]:
    """Return constants by name, with the call targets that have no importable name."""
    out = dict(constants)
    for s in steps:
        if isinstance(s, Extern) and not isinstance(s.target, torch._ops.OpOverload):
            out[f"op_{getattr(s.target, '__name__', type(s.target).__name__)}"] = s.target
    return out
