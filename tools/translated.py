"""Generated code of a program for a CPU or for a GPU, without running the program and without a GPU.

The program is traced on CPU tensors. For a GPU, the passes, the scheduler and the printers for a GPU then work on that
graph; operators that dispatch differently on a GPU (attention) are those of a CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from altbackend import backend, decomp, fx_passes, pipeline
from altbackend.compat import aot_autograd, torch_api
from altbackend.compiled.artifact import Code
from altbackend.compiled.load import Job
from altbackend.config.options import Config
from altbackend.debug.trace import Trace
from altbackend.lowering.graph import lower_graph
from altbackend.schedule.device import H200, Cpu

GPU = torch.device("cuda", 0)

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


class Translated(Exception):
    """Ends a compilation once its code is known."""


def codes(run: Callable[[Backend], object], device: str, cfg: Config) -> list[Code]:
    """Return the code of every graph of a program: one of inference, or the forward and the backward of training.

    `run` calls the program compiled with the backend that it is given; with gradients enabled, that is training.
    `device`: "cpu" or "cuda". The trace of a graph is called "inference", "forward" or "backward".
    """
    translated: list[Code] = []

    def translate(gm: GraphModule, job: Job) -> None:
        trace = Trace(job.kind, cfg)
        code = pipeline.translate(gm, cfg, trace, job)
        trace.finish()
        translated.extend(code.with_subgraphs())

    def inference(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        translate(gm, Job("inference", *backend._inputs_and_outputs("inference")))
        raise Translated

    def training(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        trace = Trace("joint", cfg)
        backend._joint_passes(joint, cfg, trace)
        forward, backward = backend.split_joint(joint, inputs, kwargs, cfg, trace)
        translate(forward, Job("forward", *backend._inputs_and_outputs("forward")))
        translate(backward, Job("backward"))
        raise Translated

    def compile_(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        fx_passes.pre_grad(gm, cfg)
        build = aot_autograd.aot_autograd(
            fw_compiler=lambda gm, _: gm,
            bw_compiler=lambda gm, _: gm,
            inference_compiler=inference,
            decompositions=decomp.table(cfg.numerics),
            partition_fn=training,
            keep_inference_input_mutations=True,
        )
        whole = aot_autograd.undecomposed(decomp.taken_apart(cfg.numerics))
        with aot_autograd.functorch_settings(), whole:
            return build(gm, inputs)

    torch._dynamo.reset()
    with _for_gpu() if device == "cuda" else _for_any_cpu():
        try:
            run(compile_)
        except Exception as cause:
            causes = [cause, cause.__cause__, cause.__context__]
            if not any(isinstance(c, Translated) or "Translated" in str(c) for c in causes):
                raise
    return translated


@contextlib.contextmanager
def _for_any_cpu() -> Iterator[None]:
    """Compile for a CPU with vectors of 16 numbers and common caches, whatever this machine has."""
    numbers = {name: n for name, n in asdict(Cpu(1)).items() if name != "threads"}
    with patch.object(torch_api, "cpu_properties", lambda: numbers):
        yield


@contextlib.contextmanager
def _for_gpu() -> Iterator[None]:
    """Compile graphs of CPU tensors for a GPU: lowering sees their values on it."""
    lower = lower_graph

    def lowered(gm: GraphModule, cfg: Config, *rest: Any, **more: Any) -> Any:
        for n in gm.graph.nodes:
            n.meta["val"] = tree_map_only(FakeTensor, _on_gpu, n.meta.get("val"))
            n.args, n.kwargs = tree_map_only(torch.device, lambda d: GPU, (n.args, n.kwargs))
        return lower(gm, cfg, *rest, **more)

    with (
        patch.object(pipeline, "lower_graph", lowered),
        patch.object(pipeline, "device_of", lambda gm: GPU),
        patch.object(torch_api, "cuda_properties", lambda device: asdict(H200)),
        patch.object(fx_passes, "on_gpu", lambda gm: True),
    ):
        yield


def _on_gpu(x: FakeTensor) -> FakeTensor:
    geometry = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return FakeTensor(x.fake_mode, geometry, GPU)
