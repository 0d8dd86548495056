"""What torch.compile calls: options, then a captured graph from the cache, or by way of AOTAutograd."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import altbackend

from .compat import torch_api
from .compile_pool import cuda as compile_cuda
from .compiled import freezing
from .compiled.artifact import Code
from .compiled.load import Job, bind
from .config.options import Config, notes, resolve
from .debug.trace import Trace
from .disk_cache.storage import open_store
from .errors import AltError
from .graph_cache import entry_files, traced
from .integrations import inductor_settings
from .runtime.variants import Variants, transformed, without_values

_graphs = itertools.count()


def alt(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured. Raises UnknownOption, BadOptionValue, UnknownMode."""
    cfg, frozen = freezing.decided(resolve(mode, options, settings=inductor_settings.values()), example_inputs)
    compile_cuda.settle(cfg)
    for name, reason in notes(options):
        logging.getLogger(__name__).info("option %s has no effect here: %s", name, reason)
    number = next(_graphs)
    trace = Trace(f"graph{number}", cfg)
    trace.decision("freezing", trace.graph_name, str(cfg.freezing), frozen)
    with trace.stage("cache"):
        asked = traced.ask(gm, example_inputs, cfg)
    if isinstance(asked, str):
        trace.decision("warm start", trace.graph_name, "not looked up", asked)
    else:
        with torch_api.no_collection(), trace.stage("bind"):
            otherwise = _otherwise(gm, cfg, trace)
            call = traced.find(asked, gm, cfg, trace, _binder(cfg, number), otherwise)
        if call is not None:
            trace.finish()
            return transformed(call, otherwise)
    if any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in example_inputs):
        compile_cuda.warm(cfg)  # while the compiler is imported and the graph is traced
    # The compiler is imported only by those who compile.
    return altbackend.trace_and_compile(gm, example_inputs, cfg, number, traced.Recording(asked, trace))


def _otherwise(gm: torch.fx.GraphModule, cfg: Config, trace: Trace) -> Variants:
    """What runs for inputs that overlap in another way than the first call's; it imports the compiler when called."""

    def compiled(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        recording = traced.Recording("inputs overlap in another way than at the first call", trace)
        return altbackend.compile_again(graph, inputs, cfg, next(_graphs), recording)

    return Variants(without_values(gm), compiled, cfg.strict)


def _binder(cfg: Config, number: int) -> traced.Bind:
    def bind_(code: Code, held: Mapping[str, Any]) -> traced.Call:
        job = Job(held["kind"], tuple(held["static_inputs"]), held["user_outputs"])
        trace = Trace(f"graph{number}_{job.kind}", cfg)
        call = bind(code, cfg, trace, job)
        trace.finish()
        return call

    return bind_


def start_workers_early() -> None:
    """Start the workers, in the background, where a GPU is in use and nothing is kept that could make them needless.

    Done at the first look-up of the backend: Dynamo then traces for longer than a worker takes to start.
    """
    if not torch_api.gpu_in_use():
        return
    with contextlib.suppress(AltError):  # the call itself says what is wrong with the options
        cfg = resolve()
        if entry_files.holds_nothing(open_store(cfg)):
            compile_cuda.start_workers_early(cfg)


start_workers_early()
