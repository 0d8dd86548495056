"""Subgraphs of control flow operators. Each is compiled as a graph of its own; equal subgraphs are compiled once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch.fx import GraphModule

from altbackend.lazy_dataclass import dataclass

from ..config.options import Config
from ..debug.trace import DecisionKind, Trace
from ..errors import FallbackWarning, Unsupported
from ..fx_passes.graph import snapshot
from ..graph_cache.json_values import NotCacheable
from ..graph_cache.key import content_of
from ..ir.loops import Program
from ..lowering.subgraphs import called
from .artifact import Code, Subgraph

Translate = Callable[[GraphModule, Config, Trace], Code]
FALLBACK = "operator by operator"


@dataclass(frozen=True)
class CompiledSubgraphs:
    """The subgraphs of a program. `uncompiled`: names of those that run operator by operator."""

    compiled: tuple[Subgraph, ...]
    uncompiled: tuple[str, ...]


def compile_subgraphs(
    p: Program, constants: Mapping[str, object], cfg: Config, trace: Trace, translate: Translate
) -> CompiledSubgraphs:
    """Return the code of the graphs that a program calls, without changing these graphs.

    A graph that raises Unsupported runs operator by operator, with the reason recorded. Other errors of `translate`
    are raised if `strict`; otherwise such a graph also runs operator by operator, with a warning.
    """
    equal: dict[object, list[str]] = {}
    graphs = called(p, dict(constants))
    for name, gm in graphs.items():
        equal.setdefault(_identity(gm), []).append(name)
    # CUDA graphs record the call around a subgraph, never the subgraph alone
    cfg = replace(cfg, cudagraphs=False)
    for name, value in constants.items():
        if isinstance(value, GraphModule) and name not in graphs:
            trace.decision(DecisionKind.SUBGRAPH, name, FALLBACK, "its operator takes no compiled subgraphs")
    subgraphs: list[Subgraph] = []
    uncompiled: list[str] = []
    for names in equal.values():
        code = _translated(graphs[names[0]], names[0], cfg, trace, translate)
        if code is None:
            uncompiled += names
        else:
            trace.decision(DecisionKind.SUBGRAPH, ", ".join(names), "compiled", f"{code.kernels} kernels")
            subgraphs.append(Subgraph(tuple(names), code))
    return CompiledSubgraphs(tuple(subgraphs), tuple(uncompiled))


def _identity(gm: GraphModule) -> object:
    """Return a value that is equal for graphs with equal calls, values and constants."""
    try:
        return content_of(gm)
    except NotCacheable:
        return id(gm)


def _translated(gm: GraphModule, name: str, cfg: Config, trace: Trace, translate: Translate) -> Code | None:
    own = Trace(f"{trace.graph_name}_{name}", cfg)
    copy = GraphModule(gm, snapshot(gm.graph)())  # passes change the graph that they are given
    try:
        code = translate(copy, cfg, own)
    except Unsupported as cause:
        trace.decision(DecisionKind.SUBGRAPH, name, FALLBACK, cause.headline)
        return None
    except Exception as cause:
        if cfg.strict:
            raise
        warnings.warn(f"{own.graph_name} runs {FALLBACK}: {cause}", FallbackWarning, stacklevel=2)
        trace.decision(DecisionKind.SUBGRAPH, name, FALLBACK, f"{type(cause).__name__}: {cause}")
        return None
    own.finish()
    return code


def attach(code: Code, inner: CompiledSubgraphs) -> Code:
    """Return `code` with its compiled subgraphs, which replace the traced graphs among its constants."""
    if not inner.compiled and not inner.uncompiled:
        return code
    names = {name for subgraph in inner.compiled for name in subgraph.names}
    recording = code.recording
    if recording is not None and not recording.refusal:
        recording = replace(recording, refusal=_replay_refusal(inner))
    constants = {name: value for name, value in code.constants.items() if name not in names}
    return replace(code, subgraphs=inner.compiled, constants=constants, recording=recording)


def _replay_refusal(inner: CompiledSubgraphs) -> str:
    """Return why a call that runs these subgraphs cannot be replayed from a CUDA graph, or ""."""
    if inner.uncompiled:
        return f"{inner.uncompiled[0]} runs {FALLBACK}"
    for subgraph in inner.compiled:
        facts = subgraph.code.recording
        if facts is None:
            return f"{subgraph.names[0]} works on the CPU"
        if facts.refusal:
            return f"{subgraph.names[0]}: {facts.refusal}"
        if subgraph.code.names_lines:
            return f"{subgraph.names[0]} checks its indices"
    return ""
