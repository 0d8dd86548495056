"""Graphs inside a graph: the bodies of its control flow, each compiled as a graph of its own, equal ones once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from ..config.options import Config
from ..debug.trace import Trace
from ..errors import FallbackWarning, Unsupported
from ..fx_passes.graph import snapshot
from ..graph_cache.json_values import NotCacheable
from ..graph_cache.key import content_of
from ..ir.loops import Program
from ..lowering.subgraphs import called
from .artifact import Body, Code

Translate = Callable[[GraphModule, Config, Trace], Code]
FALLBACK = "operator by operator"


@dataclass(frozen=True)
class Inner:
    """The bodies of a program. `left`: names of those that are not compiled."""

    bodies: tuple[Body, ...]
    left: tuple[str, ...]


def compiled(p: Program, constants: Mapping[str, Any], cfg: Config, trace: Trace, translate: Translate) -> Inner:
    """The code of the graphs that a program calls; the graphs stay as they are.

    A graph that `translate` cannot express is left to run operator by operator, with the reason recorded. Raises what
    else `translate` does if `strict`; with a warning such a graph is left, too, if not.
    """
    same: dict[Any, list[str]] = {}
    graphs = called(p, dict(constants))
    for name, gm in graphs.items():
        same.setdefault(_identity(gm), []).append(name)
    # a body is no function of its own to CUDA graphs: the call around it is recorded whole, or not at all
    cfg = replace(cfg, cudagraphs=False)
    for name, held in constants.items():
        if isinstance(held, GraphModule) and name not in graphs:
            trace.decision("body", name, FALLBACK, "its operator has no form here that takes compiled bodies")
    found: list[Body] = []
    left: list[str] = []
    for names in same.values():
        code = _translated(graphs[names[0]], names[0], cfg, trace, translate)
        if code is None:
            left += names
        else:
            trace.decision("body", ", ".join(names), "compiled", f"{code.kernels} kernels")
            found.append(Body(tuple(names), code))
    return Inner(tuple(found), tuple(left))


def _identity(gm: GraphModule) -> Any:
    """Equal for graphs of equal calls, values and constants."""
    try:
        return content_of(gm)
    except NotCacheable:
        return id(gm)


def _translated(gm: GraphModule, name: str, cfg: Config, trace: Trace, translate: Translate) -> Code | None:
    own = Trace(f"{trace.graph_name}_{name}", cfg)
    copy = GraphModule(gm, snapshot(gm.graph)())  # passes change what they are given
    try:
        code = translate(copy, cfg, own)
    except Unsupported as cause:
        trace.decision("body", name, FALLBACK, cause.headline)
        return None
    except Exception as cause:
        if cfg.strict:
            raise
        warnings.warn(f"{own.graph_name} runs {FALLBACK}: {cause}", FallbackWarning, stacklevel=2)
        trace.decision("body", name, FALLBACK, f"{type(cause).__name__}: {cause}")
        return None
    own.finish()
    return code


def attached(code: Code, inner: Inner) -> Code:
    """`code` with its bodies, which replace the graphs that it was bound to."""
    if not inner.bodies and not inner.left:
        return code
    names = {name for body in inner.bodies for name in body.names}
    recording = code.recording
    if recording is not None and not recording.refusal:
        recording = replace(recording, refusal=_why_not_recorded(inner))
    bound = {name: held for name, held in code.bound.items() if name not in names}
    return replace(code, bodies=inner.bodies, bound=bound, recording=recording)


def _why_not_recorded(inner: Inner) -> str:
    """Why a call that runs these bodies cannot be replayed from a CUDA graph, or ''."""
    if inner.left:
        return f"{inner.left[0]} runs {FALLBACK}"
    for body in inner.bodies:
        facts = body.code.recording
        if facts is None:
            return f"{body.names[0]} works on the CPU"
        if facts.refusal:
            return f"{body.names[0]}: {facts.refusal}"
        if body.code.names_lines:
            return f"{body.names[0]} checks its indices"
    return ""
