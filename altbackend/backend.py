"""The Dynamo backend: options, AOTAutograd, and the three compilers that it calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import compat, decomp
from .config import Config, resolve
from .debug import Trace
from .pipeline import Job, compile_graph

_graphs = itertools.count()


def alt(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured. Raises UnknownOption, BadOptionValue, UnknownMode."""
    cfg = resolve(mode, options)
    number = next(_graphs)
    for user_pass in cfg.pre_grad_custom_pass:
        user_pass(gm.graph)
    build = compat.aot_autograd(
        fw_compiler=_compiler(cfg, number, "forward"),
        bw_compiler=_compiler(cfg, number, "backward"),
        inference_compiler=_compiler(cfg, number, "inference"),
        decompositions=decomp.table(),
        partition_fn=_partition(cfg),
        keep_inference_input_mutations=True,
    )
    with compat.functorch_settings():
        return build(gm, example_inputs)  # type: ignore[no-any-return]


def _partition(cfg: Config) -> Callable[..., Any]:
    cut = compat.joint_partition()

    def partition(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        for user_pass in (*cfg.joint_custom_pre_pass, *cfg.joint_custom_post_pass):
            user_pass(joint.graph)
        return cut(joint, inputs, **kwargs)

    return partition


def _compiler(cfg: Config, number: int, kind: str) -> Callable[..., Any]:
    # cfg is captured here: the backward is compiled long after this call has returned
    def compile_(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        trace = Trace(f"graph{number}_{kind}", cfg)
        return compile_graph(gm, cfg, trace, Job(kind, _static_inputs()))

    return compile_


def _static_inputs() -> tuple[int, ...]:
    context = torch._guards.TracingContext.try_get()
    meta = getattr(context, "fw_metadata", None)
    return tuple(getattr(meta, "static_input_indices", None) or ())
