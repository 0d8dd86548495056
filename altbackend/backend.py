"""A captured graph through AOTAutograd, and the three compilers that it calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from . import compat, compat_aot, decomp, fx_passes, partition
from .binding import Job
from .cache.traced import Recording
from .config import Config
from .debug import Trace
from .errors import AltError, FallbackWarning, InternalError, Unsupported, internal_error
from .fx_passes.graph import drop_dead, remembered
from .pipeline import by_library, compile_graph
from .repro import file as repro_file
from .runtime.cuda_graphs import ALL


def trace_and_compile(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], cfg: Config, number: int, recording: Recording
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured by way of AOTAutograd; `recording` notes how its parts are called.

    One whose input has oneDNN's own layout runs as captured, since tracing takes that for a strided tensor.
    """
    if any(isinstance(x, torch.Tensor) and x.is_mkldnn for x in example_inputs):
        todo = "convert the input with to_dense() before the compiled function"
        error = Unsupported(None, "an input has oneDNN's own layout, which tracing does not know", todo=todo)
        if cfg.strict:
            raise error
        warnings.warn(f"graph{number} runs with library calls only: {error}", FallbackWarning, stacklevel=2)
        return gm.forward
    fx_passes.pre_grad(gm, cfg)
    build = compat_aot.aot_autograd(
        fw_compiler=_compiler(cfg, number, "forward", recording),
        bw_compiler=_compiler(cfg, number, "backward", recording),
        inference_compiler=_compiler(cfg, number, "inference", recording),
        decompositions=decomp.table(cfg.numerics),
        partition_fn=partition_with(cfg, number),
        keep_inference_input_mutations=True,
    )
    whole = compat_aot.left_whole(decomp.taken_apart(cfg.numerics))
    with compat_aot.functorch_settings(), compat.no_collection(), whole:
        call = build(gm, example_inputs)
        recording.finish()
        return call  # type: ignore[no-any-return]


def partition_with(cfg: Config, number: int) -> Callable[..., Any]:
    """What AOTAutograd calls with a joint graph: our passes over it, then (forward, backward)."""

    def partition_(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        trace = Trace(f"graph{number}_joint", cfg)
        fx_passes.run_users(cfg.joint_custom_pre_pass, joint)
        _joint_passes(joint, cfg, trace)
        fx_passes.run_users(cfg.joint_custom_post_pass, joint)
        halves = split_joint(joint, inputs, kwargs, cfg, trace)
        trace.finish()
        return halves

    return partition_


def split_joint(
    joint: torch.fx.GraphModule, inputs: Any, kwargs: Mapping[str, Any], cfg: Config, trace: Trace
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """(forward, backward) by our partitioner; by torch's where ours leaves it to that, or fails (unless `strict`)."""
    drop_dead(joint.graph)
    reason = partition.left_to_torch(joint)
    if not reason:
        traced = joint.graph
        try:
            with trace.stage("partition"):
                static = kwargs.get("static_lifetime_input_indices")
                return partition.split(joint, kwargs["num_fwd_outputs"], static, trace.decision)
        except Exception as cause:
            if cfg.strict:
                raise
            joint.graph = traced
            error = internal_error("splitting", trace.graph_name, cause, str(trace.folder or ""))
            reason = str(error)
            warnings.warn(f"{trace.graph_name} is split by torch: {error}", FallbackWarning, stacklevel=2)
    trace.decision("partition", trace.graph_name, "left to torch", reason)
    halves: tuple[torch.fx.GraphModule, torch.fx.GraphModule] = compat_aot.joint_partition()(joint, inputs, **kwargs)
    return halves


def _joint_passes(joint: torch.fx.GraphModule, cfg: Config, trace: Trace) -> None:
    """The passes over the joint graph; if one fails, the graph as it was traced, with one warning, unless `strict`."""
    traced = remembered(joint.graph)
    try:
        with trace.stage("joint"), fx_passes.verified(joint, cfg, "the passes over the joint graph"):
            fx_passes.joint_statistics(joint, trace)
            fx_passes.joint_random(joint, cfg, trace)
            if fx_passes.on_gpu(joint):
                fx_passes.cuda_joint(joint, cfg, trace)
    except Exception as cause:
        if cfg.strict:
            raise
        joint.graph = traced()
        error = internal_error("preparing", trace.graph_name, cause, str(trace.folder or ""))
        warnings.warn(f"{trace.graph_name} is split as it was traced: {error}", FallbackWarning, stacklevel=2)


def _compiler(cfg: Config, number: int, kind: str, recording: Recording) -> Callable[..., Any]:
    # cfg is captured here: the backward is compiled long after this call has returned
    def compile_(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        trace = Trace(f"graph{number}_{kind}", cfg)
        # what runs if a pass or the build fails; the passes change gm's graph in place
        traced = remembered(gm.graph)
        job = Job(kind, *_inputs_and_outputs(kind))
        if cfg.repro == "always":
            repro_file.save(gm, trace, asdict(job), f"{trace.graph_name}, as it was traced.")

        def failed(cause: Exception) -> Any:
            held = torch.fx.GraphModule(gm, traced())
            error = failure(held, trace, job, cause)
            if cfg.strict:
                if error is cause:
                    raise
                raise error from cause
            return library_calls_only(held, trace, error)

        try:
            if kind == "inference":  # a graph that is not split stands for the joint one
                fx_passes.run_users((*cfg.joint_custom_pre_pass, *cfg.joint_custom_post_pass), gm)
            with compat.no_collection():
                return compile_graph(gm, cfg, trace, job, recording.part(kind, gm, asdict(job)), failed)
        except Exception as cause:
            return failed(cause)

    return compile_


def failure(gm: torch.fx.GraphModule, trace: Trace, job: Job, cause: Exception) -> AltError:
    """`cause` as an error that names the user's line, the operator, the folder and a command that meets it again."""
    error = cause if isinstance(cause, AltError) else internal_error("compiling", trace.graph_name, cause)
    saved = repro_file.save(gm, trace, asdict(job), f"{trace.graph_name} failed to compile. {error.headline}")
    if isinstance(error, InternalError):
        error.folder = str(trace.folder or (saved.parent if saved else ""))
    if saved is not None:
        error.reproduce = f"python {saved}"
    return error


def library_calls_only(gm: torch.fx.GraphModule, trace: Trace, error: AltError) -> Callable[[list[Any]], Any]:
    """The traced graph run operator by operator, with one warning that says why."""
    warnings.warn(f"{trace.graph_name} runs with library calls only: {error}", FallbackWarning, stacklevel=2)
    trace.decision("graph", trace.graph_name, "library calls only", error.headline)
    return by_library(gm)


def _inputs_and_outputs(kind: str) -> tuple[tuple[int, ...], int]:
    """Which inputs of a graph keep their address, and how many of its results a user sees."""
    context = torch._guards.TracingContext.try_get()
    meta = getattr(context, "fw_metadata", None)
    if meta is None or kind == "backward":  # a backward takes what its forward left
        return (), ALL
    static = tuple(getattr(meta, "static_input_indices", None) or ())
    return static, meta.num_forward if kind == "forward" else ALL
