"""Passes over the functional ATen graph, in order."""

from __future__ import annotations

import torch

from ..config import Config
from ..debug import Trace


def post_grad(gm: torch.fx.GraphModule, cfg: Config, trace: Trace) -> torch.fx.GraphModule:
    """Run the passes on a forward, backward or inference graph; the graph is changed in place."""
    for user_pass in cfg.post_grad_custom_pre_pass:
        user_pass(gm.graph)
    gm.graph.eliminate_dead_code()
    for user_pass in cfg.post_grad_custom_post_pass:
        user_pass(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return gm
