"""Rewrite instance normalisations by their own statistics as group normalisations with a channel a group.

torch computes them by joining batch and channels to one dimension. In a channels-last image these are not neighbours,
so the image would be copied. A group normalisation reads it as it lies, and its kernel stores the contiguous result
that torch returns. The gradients of both are equally exact, since `decomp.py` has a gradient of group normalisations
without large terms.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..compat import torch_api
from .context import Context

DEVICES = ("cuda", "cpu")
# of torch.nn.functional.instance_norm, with their defaults
PARAMETERS = {
    "input": None,
    "running_mean": None,
    "running_var": None,
    "weight": None,
    "bias": None,
    "use_input_stats": True,
    "momentum": 0.1,
    "eps": 1e-5,
}


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite the instance normalisations of a captured graph; return their number."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, GraphModule)]
    return sum(_rewrite_graph(graph) for graph in graphs)


def _rewrite_graph(graph: Graph) -> int:
    calls = graph.find_nodes(op="call_function", target=torch.nn.functional.instance_norm)
    if not calls or _under_autocast(graph):
        return 0
    count = sum(_rewrite(n) for n in calls)
    if count and graph.owning_module is not None:
        graph.owning_module.recompile()
    return count


def _under_autocast(graph: Graph) -> bool:
    """Return whether calls may run under autocast, which chooses other dtypes for a group normalisation."""
    entered = any("autocast" in getattr(n.target, "__name__", "") for n in graph.nodes)
    return entered or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def _rewrite(n: Node) -> bool:
    args: dict[str, Any] = PARAMETERS | dict(zip(PARAMETERS, n.args, strict=False)) | dict(n.kwargs)
    x = args["input"].meta.get("example_value")
    if not isinstance(x, torch.Tensor) or not _suits(x, args):
        return False
    with n.graph.inserting_before(n):
        call = n.graph.call_function(
            torch.nn.functional.group_norm,
            (args["input"], int(x.shape[1]), args["weight"], args["bias"], args["eps"]),
        )
        # torch's result is contiguous whatever its input; later operators and the caller see those strides
        result = call if x.is_contiguous() else n.graph.call_method("contiguous", (call,))
    call.meta, result.meta = dict(n.meta), dict(n.meta)
    n.replace_all_uses_with(result)
    n.graph.erase_node(n)
    return True


def _suits(x: torch.Tensor, args: dict[str, Any]) -> bool:
    """Return whether the call uses its input's statistics alone, and group norm computes the same in one dtype."""
    parameters = [p.meta["example_value"] for name in ("weight", "bias") if (p := args[name]) is not None]
    has_several_points = math.prod(x.shape[2:]) > 1  # else torch raises an error
    return (
        args["use_input_stats"] is True
        and args["running_mean"] is None
        and args["running_var"] is None
        and x.device.type in DEVICES
        and x.dim() >= 3
        and not torch_api.has_symbolic_geometry(x)
        and has_several_points
        and x.numel() > 0
        and all(p.dtype == x.dtype for p in parameters)
    )
