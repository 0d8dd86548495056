"""The passes of the user, as rows of the table: each option holds callables that change a graph in place.

A pass over a joint or captured graph also runs over the graphs inside it, for example the branches of a condition. Its
nodes may stand in any order; they are sorted behind it. The graphs have the form that the pattern matcher of torch
expects, so that its passes can be given to these options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Graph, GraphModule

from ..config.options import Passes
from ..debug.trace import DecisionKind
from .context import Context
from .graph import complete
from .pattern.rules import Rewrite, Rules
from .pattern.sort import sort

_TAKES_MODULE = "CustomGraphModulePass"  # torch's base classes of passes, by name: importing them is not needed
_TAKES_MODE = "CustomInferenceAwareGraphPass"


def pre_grad(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `pre_grad_custom_pass` over the captured graph, which has no ATen operators yet."""
    return _run(ctx.config.pre_grad_custom_pass, _graphs(gm), ctx, lambda gm: None)


def joint_pre(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `joint_custom_pre_pass`."""
    return _run(ctx.config.joint_custom_pre_pass, _graphs(gm), ctx, complete)


def joint_post(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `joint_custom_post_pass`."""
    return _run(ctx.config.joint_custom_post_pass, _graphs(gm), ctx, complete)


def post_grad_pre(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `post_grad_custom_pre_pass`."""
    return _run(ctx.config.post_grad_custom_pre_pass, [gm], ctx, complete)


def post_grad_post(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `post_grad_custom_post_pass`."""
    return _run(ctx.config.post_grad_custom_post_pass, [gm], ctx, complete)


def _graphs(gm: GraphModule) -> list[GraphModule]:
    """Return a module and the modules inside it whose graphs its calls run."""
    return [m for m in gm.modules() if isinstance(m, GraphModule)]


def _run(passes: Passes, modules: Iterable[GraphModule], ctx: Context, finish: Callable[[GraphModule], None]) -> int:
    """Run passes over graphs, sort the nodes, and `finish` each graph: compute the values of the nodes they add."""
    if not passes:
        return 0
    for gm in modules:
        for user_pass in passes:
            for rewrite in _call(user_pass, gm, ctx):
                ctx.trace.decision(DecisionKind.SIMPLIFY, rewrite.rule, "applied", str(rewrite))
            sort(gm.graph)
        finish(gm)
        gm.recompile()
    return len(passes)


def _call(user_pass: Callable[..., object], gm: GraphModule, ctx: Context) -> list[Rewrite]:
    """Run one pass in the form that it has; return the rewrites of a set of rules."""
    if isinstance(user_pass, Rules):
        return user_pass.apply(gm)
    names = {base.__name__ for base in type(user_pass).__mro__}
    before = _size(gm.graph)
    if _TAKES_MODULE in names:
        user_pass(gm)
    elif _TAKES_MODE in names:
        user_pass(gm.graph, _is_inference(gm.graph))
    else:
        user_pass(gm.graph)
    after = _size(gm.graph)
    if before != after:
        name = getattr(user_pass, "__name__", type(user_pass).__name__)
        reason = f"{before} calls before, {after} after"
        ctx.trace.decision(DecisionKind.SIMPLIFY, f"pass {name}", "ran", reason)
    return []


def _size(graph: Graph) -> int:
    return len(graph.nodes)


def _is_inference(graph: Graph) -> bool:
    """Return whether a graph is neither joint nor one half of a joint graph."""
    names = [n.name for n in graph.find_nodes(op="placeholder")]
    return not any(name.startswith(("primals", "tangents")) for name in names)
