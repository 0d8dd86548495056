"""Graph passes: functions that run the rows of the table (`table.py`) at each phase of a compilation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.fx import GraphModule

from ..config.options import Config
from ..debug.trace import Trace
from ..errors import BadOptionValue
from . import check, constants, table, verify
from .context import Context, Phase
from .graph import attribute, snapshot


def run_phase(phase: Phase, gm: GraphModule, ctx: Context, without: Collection[str] = ()) -> None:
    """Run the passes of a phase in order, in place; `without` names passes to leave out."""
    disabled = disabled_passes(ctx.config)
    for row in table.PASSES:
        if row.phase is not phase or row.name in without or row.name in disabled or not row.applies(ctx):
            continue
        with contextlib.ExitStack() as checks:
            checks.enter_context(check.compared(gm, ctx, row.name, row.draws))
            if row.preserves:
                checks.enter_context(_verified(gm, ctx, row.name))
            count = row.run(gm, ctx)
        if row.decision is not None and count:
            kind, subject, verdict, reason = row.decision
            ctx.trace.decision(kind, subject, verdict, reason.format(count))


@functools.cache
def _optional() -> frozenset[str]:
    """Return the names of the passes that may be left out: those that change speed or memory alone."""
    return frozenset(row.name for row in table.PASSES if row.name not in table.REQUIRED)


def disabled_passes(cfg: Config) -> frozenset[str]:
    """Return the names in the option `disabled_passes`. Raises BadOptionValue for a name that no optional pass has."""
    names = frozenset(name.strip() for name in cfg.disabled_passes.split(",")) - {""}
    if unknown := sorted(names - _optional()):
        valid_names = ", ".join(sorted(_optional()))
        raise BadOptionValue("disabled_passes", ", ".join(unknown), f"it names passes among: {valid_names}")
    return names


@contextlib.contextmanager
def _verified(gm: GraphModule, ctx: Context, name: str) -> Iterator[None]:
    """With `verify_ir`, raise InvalidIR if the pass `name` changes results, their storage or written inputs."""
    before = verify.facts(gm) if ctx.config.verify_ir else None
    yield
    if before is not None:
        verify.check(before, gm, f"pass `{name}`")


def on_gpu(gm: GraphModule) -> bool:
    """Return whether an input of the graph is a tensor on a GPU."""
    values = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    return any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in values)


def _device(gm: GraphModule) -> str:
    return "gpu" if on_gpu(gm) else "cpu"


def pre_grad(gm: GraphModule, cfg: Config, trace: Trace | None = None) -> None:
    """Run the passes over a graph as Dynamo captured it, in place."""
    run_phase(Phase.CAPTURED, gm, Context(cfg, trace or Trace("captured", cfg)))


def before_joint(gm: GraphModule, cfg: Config, trace: Trace) -> None:
    """Run the user's passes that come before those over the joint graph."""
    run_phase(Phase.BEFORE_JOINT, gm, Context(cfg, trace))


def joint(gm: GraphModule, cfg: Config, trace: Trace, device: str = "", without: Collection[str] = ()) -> None:
    """Run the passes over a joint graph before it is split, so that forward and backward agree on saved layouts.

    They also run over the bodies of branches and loops, except for those that serve the split. `device`: "cpu" or
    "gpu", by default that of the inputs.
    """
    ctx = Context(cfg, trace, device=device or _device(gm))
    run_phase(Phase.JOINT, gm, ctx, without)
    for body in _bodies(gm):
        traced = snapshot(body.graph)
        try:
            run_phase(Phase.JOINT, body, ctx, {*without, *_FOR_THE_SPLIT})
        except Exception:  # the caller restores the outer graph
            body.graph = traced()
            raise
        body.recompile()


_FOR_THE_SPLIT = ("normalisations", "checkpointed random")
# Operators whose bodies are neither split by themselves nor read by a kernel of their own.
_CONTROL_FLOW = ("cond", "while_loop", "scan", "map_impl", "associative_scan")


def _bodies(gm: GraphModule) -> list[GraphModule]:
    """Return the graphs that control flow runs in a graph and in such graphs, each once."""
    subgraphs: dict[GraphModule, None] = {}
    pending = [gm]
    while pending:
        outer = pending.pop()
        for n in outer.graph.find_nodes(op="get_attr"):
            inner = attribute(outer, str(n.target))
            users = {getattr(u.target, "_name", "") for u in n.users}
            if isinstance(inner, GraphModule) and inner not in subgraphs and users and users <= set(_CONTROL_FLOW):
                subgraphs[inner] = None
                pending.append(inner)
    return list(subgraphs)


def after_joint(gm: GraphModule, cfg: Config, trace: Trace) -> None:
    """Run the user's passes that come after those over the joint graph."""
    run_phase(Phase.AFTER_JOINT, gm, Context(cfg, trace))


def post_grad(gm: GraphModule, cfg: Config, trace: Trace, static: Sequence[int] = ()) -> GraphModule:
    """Run the passes over a forward, backward or inference graph, in place; return it.

    `static`: positions of the parameters of an inference graph.
    """
    run_phase(Phase.POST_GRAD, gm, Context(cfg, trace, tuple(static), device=_device(gm)))
    return gm


def inference(gm: GraphModule, static: Sequence[int], cfg: Config, trace: Trace, device: str) -> constants.Split | None:
    """Run the passes over an inference graph; with freezing, split off the prologue of parameters.

    `static`: positions of the parameters. A graph without them has weights among its inputs; a GPU then still chooses
    layouts and pads products. `device`: "cpu" or "gpu". Returns None if there is no prologue.
    """
    ctx = Context(cfg, trace, tuple(static), device)
    run_phase(Phase.INFERENCE, gm, ctx)
    return constants.split(gm, static) if ctx.freezes else None


def finish(gm: GraphModule, cfg: Config, trace: Trace | None = None) -> GraphModule:
    """Run the last passes over a forward, backward or inference graph, in place; return it."""
    run_phase(Phase.LAST, gm, Context(cfg, trace or Trace("last", cfg), device=_device(gm)))
    if cfg.verify_ir:
        gm.graph.lint()
    return gm
