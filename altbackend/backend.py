"""A captured graph through AOTAutograd, and the partitioner and compilers that AOTAutograd calls."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

from altbackend.lazy_dataclass import dataclass

from . import decomp, fx_passes, partition
from .compat import aot_autograd, torch_api
from .compiled import discarding
from .compiled.load import Job
from .config.options import Config
from .debug.trace import DecisionKind, Trace
from .errors import AltError, BadOptionValue, FallbackWarning, InternalError, Unsupported, internal_error
from .fx_passes.graph import drop_dead, snapshot
from .fx_passes.quantised import packed
from .graph_cache import wrapper_plan
from .graph_cache.traced import Recording, calling_of
from .pipeline import by_library, compile_graph
from .repro import file as repro_file
from .runtime.boxed import BoxedCall, Function, Values
from .runtime.cuda_graphs import ALL
from .runtime.gradients import accepting_any_gradient
from .runtime.sharing import Watch, relation_of, watched
from .runtime.variants import Variants, transformed, without_values


def trace_and_compile(
    gm: torch.fx.GraphModule, example_inputs: Values, cfg: Config, number: int, recording: Recording
) -> Function:
    """Compile a graph that Dynamo captured by way of AOTAutograd. `recording` notes how its parts are called.

    A graph with an input in oneDNN's layout runs as captured, since tracing treats that input as a strided tensor;
    unless the input is a packed weight of quantised operators.
    """
    if _has_unknown_layouts(gm, example_inputs):
        todo = "convert the input with to_dense() before the compiled function"
        error = Unsupported(None, "an input has oneDNN's own layout, which tracing does not know", todo=todo)
        if cfg.strict:
            raise error
        warnings.warn(f"graph{number} runs with library calls only: {error}", FallbackWarning, stacklevel=2)
        return gm.forward
    captured = without_values(gm)
    _captured_passes(gm, cfg, recording.trace)
    donations = _Donations()
    build = aot_autograd.aot_autograd(
        fw_compiler=_compiler(cfg, number, "forward", recording, donations),
        bw_compiler=_compiler(cfg, number, "backward", recording, donations),
        inference_compiler=_compiler(cfg, number, "inference", recording, donations),
        decompositions=decomp.table(cfg.numerics),
        partition_fn=partition_with(cfg, number),
        keep_inference_input_mutations=True,
    )
    composite_ops = aot_autograd.undecomposed(decomp.taken_apart(cfg.numerics))
    with aot_autograd.functorch_settings(), torch_api.without_gc(), composite_ops:
        try:
            call = build(gm, example_inputs)
        except AssertionError as cause:
            if not aot_autograd.is_about_sharing(cause):
                raise
            return _by_operators(captured(), cfg)
        recording.finish()
        meta = torch_api.traced_metadata()
    calling = calling_of(gm)
    lifted = calling.lifted
    if aot_autograd.merged_views(meta, [*lifted, *example_inputs]):
        return _by_operators(captured(), cfg)
    watch = _watch(meta, gm, [*lifted, *example_inputs])
    call = recording.replaced(call, calling, len(example_inputs))

    trace = recording.trace  # a recording would keep traced values alive

    def compile_variant(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Function:
        own = Recording("inputs overlap in another way than at the first call", trace)
        return compile_again(graph, inputs, cfg, number, own)

    variants = Variants(captured, compile_variant, cfg.strict)
    function = transformed(watched(call, watch, variants, lifted), variants)
    if cfg.freezing_discard_parameters:
        return discarding.with_originals(function, gm, example_inputs, meta, trace)
    return function


def _has_unknown_layouts(gm: torch.fx.GraphModule, inputs: Values) -> bool:
    """Return whether an input in oneDNN's layout is more than a packed weight of quantised operators."""
    bindings = zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False)
    return any(isinstance(x, torch.Tensor) and x.is_mkldnn and not packed.is_packed(n) for n, x in bindings)


def _captured_passes(gm: torch.fx.GraphModule, cfg: Config, trace: Trace) -> None:
    """Run the passes over the captured graph; write their decisions, since the record of this graph may not end."""
    earlier_decisions = len(trace.decisions)
    fx_passes.pre_grad(gm, cfg, trace)
    if len(trace.decisions) > earlier_decisions:
        trace.write()


def _watch(meta: torch_api.ViewAndMutationMeta | None, gm: torch.fx.GraphModule, inputs: Values) -> Watch:
    """Return how the inputs of a traced graph must share memory. `meta` is AOTAutograd's metadata of the graph."""
    written = frozenset(k for k, info in enumerate(meta.input_info) if info.mutates_data) if meta else frozenset()
    if meta and written and len(meta.input_info) != len(inputs):  # views of one storage were merged into one input
        return Watch(frozenset(range(len(inputs))), relation=relation_of(inputs))
    return Watch(written, torch_api.static_inputs(gm))


def _by_operators(gm: torch.fx.GraphModule, cfg: Config) -> Function:
    """Return the captured graph, to run operator by operator, with one warning. Raise Unsupported if `strict`."""
    error = Unsupported(
        None,
        "inputs that share memory and of which one is written, in a way that AOTAutograd does not take",
        todo="give the function tensors of their own, or return copies",
    )
    if cfg.strict:
        raise error
    warnings.warn(f"a graph runs operator by operator: {error}", FallbackWarning, stacklevel=2)
    return gm


def compile_again(gm: torch.fx.GraphModule, inputs: Values, cfg: Config, number: int, recording: Recording) -> Function:
    """Compile like `trace_and_compile`, for real inputs, after Dynamo has ended. Other sizes need another variant."""
    variant = replace(cfg, freezing_discard_parameters=False)  # the first variant holds the originals
    with aot_autograd.new_tracing_context():
        return trace_and_compile(gm, inputs, variant, number, recording)


def partition_with(cfg: Config, number: int) -> Function:
    """Return the partitioner for AOTAutograd: it runs the passes over a joint graph and splits it."""

    def partition_(joint: torch.fx.GraphModule, inputs: object, **kwargs: object) -> object:
        trace = Trace(f"graph{number}_joint", cfg)
        fx_passes.before_joint(joint, cfg, trace)
        _joint_passes(joint, cfg, trace)
        fx_passes.after_joint(joint, cfg, trace)
        graphs = split_joint(joint, inputs, kwargs, cfg, trace)
        trace.finish()
        return graphs

    return partition_


def split_joint(
    joint: torch.fx.GraphModule, inputs: object, kwargs: Mapping[str, object], cfg: Config, trace: Trace
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Return (forward, backward) of a joint graph, split by this package's partitioner or else by torch's.

    torch's partitioner takes graphs if a setting of torch asks for what only it does. It also takes those on which this
    package's partitioner fails, with a warning; if `strict`, the error is raised instead.
    """
    drop_dead(joint.graph)
    reason = aot_autograd.partition_settings()
    if not reason:
        traced = joint.graph
        try:
            with trace.stage("partition"):
                replaced = aot_autograd.written_afterwards(joint)
                rules = partition.rules_of(cfg, joint)
                results = kwargs["num_fwd_outputs"]
                assert isinstance(results, int)
                return partition.split(joint, results, trace.decision, replaced, rules)
        except BadOptionValue:
            raise
        except Exception as cause:
            if cfg.strict:
                raise
            joint.graph = traced
            error = internal_error("splitting", trace.graph_name, cause, str(trace.folder or ""))
            reason = str(error)
            warnings.warn(f"{trace.graph_name} is split by torch: {error}", FallbackWarning, stacklevel=2)
    trace.decision(DecisionKind.PARTITION, trace.graph_name, "left to torch", reason)
    graphs: tuple[torch.fx.GraphModule, torch.fx.GraphModule] = aot_autograd.joint_partition()(joint, inputs, **kwargs)
    return graphs


def _joint_passes(joint: torch.fx.GraphModule, cfg: Config, trace: Trace) -> None:
    """Run the passes over the joint graph. If one fails, restore the traced graph and warn, or raise if `strict`."""
    traced = snapshot(joint.graph)
    try:
        with trace.stage("joint"):
            fx_passes.joint(joint, cfg, trace)
    except Exception as cause:
        if cfg.strict:
            raise
        joint.graph = traced()
        error = internal_error("preparing", trace.graph_name, cause, str(trace.folder or ""))
        warnings.warn(f"{trace.graph_name} is split as it was traced: {error}", FallbackWarning, stacklevel=2)


@dataclass
class _Donations:
    """The inputs of a backward whose memory it may take over, which the compilation of its forward finds out."""

    inputs: tuple[int, ...] = ()


def _compiler(cfg: Config, number: int, kind: str, recording: Recording, donations: _Donations) -> Function:
    # the backward is compiled long after this call has returned, so the closure holds cfg
    hooked = kind == "backward" and bool(
        torch_api.hooks_on_saved_tensors()
    )  # hooks may change the strides of saved tensors

    def compile_(gm: torch.fx.GraphModule, example_inputs: Values) -> object:
        trace = Trace(f"graph{number}_{kind}", cfg)
        if kind == "forward":
            donations.inputs = torch_api.take_donated_buffers(gm)
        gradients = _gradients(gm) if kind == "backward" else range(0)
        negative = wrapper_plan.negative_inputs(gm) & frozenset(gradients)
        packed.mark(gm)
        # the graph to run if a pass or the build fails; the passes change gm's graph in place
        traced = snapshot(gm.graph)
        # a hook may replace saved tensors, and the recording of a CUDA graph copies them into memory of its own
        donated = donations.inputs if kind == "backward" and not hooked and not cfg.cudagraphs else ()
        job = Job(kind, *_inputs_and_outputs(kind), hooked, donated)
        if kind != "backward":
            gm.graph.output_node().meta["of_inputs"] = aot_autograd.views_of_inputs(gm, torch_api.traced_metadata())
        if cfg.repro == "always":
            repro_file.save(gm, trace, asdict(job), f"{trace.graph_name}, as it was traced.")

        def failed(cause: Exception) -> BoxedCall:
            original = torch.fx.GraphModule(gm, traced())
            error = failure(original, trace, job, cause)
            if cfg.strict:
                if error is cause:
                    raise
                raise error from cause
            return library_calls_only(original, trace, error)

        try:
            if kind == "inference":  # a graph that is not split stands for the joint one
                fx_passes.before_joint(gm, cfg, trace)
                fx_passes.after_joint(gm, cfg, trace)
            with torch_api.without_gc():
                call = compile_graph(gm, cfg, trace, job, recording.part(kind, gm, asdict(job)), failed)
                recording.built(kind, call)
                return accepting_any_gradient(call, gradients.start, gradients.stop, negative) if gradients else call
        except Exception as cause:
            return failed(cause)

    return compile_


def failure(gm: torch.fx.GraphModule, trace: Trace, job: Job, cause: Exception) -> AltError:
    """Return `cause` as an error that names the user's line, the operator, the folder and a command to reproduce it."""
    error = cause if isinstance(cause, AltError) else internal_error("compiling", trace.graph_name, cause)
    saved = repro_file.save(gm, trace, asdict(job), f"{trace.graph_name} failed to compile. {error.headline}")
    if isinstance(error, InternalError):
        error.folder = str(trace.folder or (saved.parent if saved else ""))
    if saved is not None:
        error.reproduce = f"python {saved}"
    return error


def library_calls_only(gm: torch.fx.GraphModule, trace: Trace, error: AltError) -> BoxedCall:
    """Return a callable that runs the traced graph operator by operator, with one warning that says why."""
    warnings.warn(f"{trace.graph_name} runs with library calls only: {error}", FallbackWarning, stacklevel=2)
    trace.decision(DecisionKind.GRAPH, trace.graph_name, "library calls only", error.headline)
    return by_library(gm)


def _gradients(backward: torch.fx.GraphModule) -> range:
    """Return the indices of a backward's inputs that are gradients of results."""
    inputs = backward.graph.find_nodes(op="placeholder")
    tangents = [k for k, n in enumerate(inputs) if n.name.startswith("tangents_")]
    return range(tangents[0], tangents[-1] + 1) if tangents else range(0)


def _inputs_and_outputs(kind: str) -> tuple[tuple[int, ...], int]:
    """Return the indices of a graph's inputs whose address does not change, and the number of results a user sees."""
    context = torch._guards.TracingContext.try_get()
    meta = getattr(context, "fw_metadata", None)
    if meta is None or kind == "backward":  # the inputs of a backward come from its forward
        return (), ALL
    static = tuple(getattr(meta, "static_input_indices", None) or ())
    return static, meta.num_forward if kind == "forward" else ALL
