"""The backend that torch.compile calls: resolve options, then load a captured graph from the cache or compile it."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence

import torch

import altbackend

from .compat import torch_api
from .compile_pool import cuda as compile_cuda
from .compiled import freezing
from .compiled.artifact import Code
from .compiled.load import Job, bind
from .config.options import Config
from .config.resolve import notes, resolve
from .debug.trace import DecisionKind, Trace
from .disk_cache.json_object import JsonObject
from .disk_cache.storage import open_store
from .errors import AltError
from .graph_cache import entry_files, traced
from .integrations import inductor_settings
from .runtime.boxed import BoxedCall, Function
from .runtime.variants import Variants, transformed, without_values

_graphs = itertools.count()


def alt(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Function:
    """Compile a graph that Dynamo captured. Raise UnknownOption, BadOptionValue or UnknownMode."""
    settings = resolve(mode, options, settings=inductor_settings.values())
    cfg, freezing_reason = freezing.decide_freezing(settings, example_inputs)
    compile_cuda.end_unneeded_early_workers(cfg)
    for name, reason in notes(options):
        logging.getLogger(__name__).info("option %s has no effect here: %s", name, reason)
    number = next(_graphs)
    trace = Trace(f"graph{number}", cfg)
    trace.decision(DecisionKind.FREEZING, trace.graph_name, str(cfg.freezing), freezing_reason)
    with trace.stage("cache"):
        query = traced.query_of(gm, example_inputs, cfg)
    if isinstance(query, str):
        trace.decision(DecisionKind.WARM_START, trace.graph_name, "not looked up", query)
    else:
        with torch_api.without_gc(), trace.stage("load"):
            variants = _variants(gm, cfg, trace)
            call = traced.load_cached(query, gm, cfg, trace, _part_loader(cfg, number), variants)
        if call is not None:
            trace.finish()
            return transformed(call, variants)
    if any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in example_inputs):
        compile_cuda.warm(cfg)  # workers start while the compiler is imported and the graph is traced
    # A warm start does not import the compiler.
    return altbackend.trace_and_compile(gm, example_inputs, cfg, number, traced.Recording(query, trace))


def _variants(gm: torch.fx.GraphModule, cfg: Config, trace: Trace) -> Variants:
    """Return the callable for inputs that overlap in another way than the first call's.

    It imports the compiler if called.
    """

    def compiled(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Function:
        recording = traced.Recording("inputs overlap in another way than at the first call", trace)
        return altbackend.compile_again(graph, inputs, cfg, next(_graphs), recording)

    return Variants(without_values(gm), compiled, cfg.strict)


def _part_loader(cfg: Config, number: int) -> traced.Load:
    def load(code: Code, job_fields: JsonObject) -> BoxedCall:
        job = Job(job_fields["kind"], tuple(job_fields["static_inputs"]), job_fields["user_outputs"])
        trace = Trace(f"graph{number}_{job.kind}", cfg)
        call = bind(code, cfg, trace, job)
        trace.finish()
        return call

    return load


def start_workers_early() -> None:
    """Start the compile workers in the background where a GPU is in use and the cache has never held a graph.

    This happens at the first look-up of the backend: Dynamo then traces for longer than a worker takes to start.
    """
    if not torch_api.gpu_in_use():
        return
    with contextlib.suppress(AltError):  # the backend's own call reports errors in the options
        cfg = resolve()
        if entry_files.is_empty(open_store(cfg)):
            compile_cuda.start_workers_early(cfg)


start_workers_early()
