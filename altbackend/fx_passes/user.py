"""The passes of the user, as rows of the table: each option holds callables that change a graph in place."""

from __future__ import annotations

from torch.fx import GraphModule

from ..config.options import Passes
from .context import Context
from .graph import complete


def pre_grad(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `pre_grad_custom_pass` over the captured graph, which has no ATen operators yet."""
    for user_pass in ctx.config.pre_grad_custom_pass:
        user_pass(gm.graph)
    return len(ctx.config.pre_grad_custom_pass)


def joint_pre(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `joint_custom_pre_pass`."""
    return _run(ctx.config.joint_custom_pre_pass, gm)


def joint_post(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `joint_custom_post_pass`."""
    return _run(ctx.config.joint_custom_post_pass, gm)


def post_grad_pre(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `post_grad_custom_pre_pass`."""
    return _run(ctx.config.post_grad_custom_pre_pass, gm)


def post_grad_post(gm: GraphModule, ctx: Context) -> int:
    """Run the passes of the option `post_grad_custom_post_pass`."""
    return _run(ctx.config.post_grad_custom_post_pass, gm)


def _run(passes: Passes, gm: GraphModule) -> int:
    """Run passes over an ATen graph and compute the fake values of the nodes that they add."""
    for user_pass in passes:
        user_pass(gm.graph)
    if passes:
        complete(gm)
    return len(passes)
