"""Run convolutions channels-last: the input of the first convolution is copied once, and the layout propagates."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .context import Context
from .graph import aten, insert, is_call, propagate, update, val

_LOW = (torch.bfloat16, torch.float16)


def run(gm: GraphModule, ctx: Context) -> int:
    """Run the convolutions of an inference graph channels-last; on a GPU copy constant weights too."""
    return int(rearrange(gm, ctx.constant_nodes(gm) if ctx.device == "gpu" else None))


def run_joint(gm: GraphModule, ctx: Context) -> int:
    """Run the convolutions of a joint graph channels-last."""
    return int(rearrange_joint(gm))


def rearrange(gm: GraphModule, constant: set[Node] | None = None) -> bool:
    """Copy the inputs of convolutions to channels-last if they are not; return whether the graph changed.

    Strides are propagated, so an operator between two convolutions keeps the layout. `constant`: weights in this set
    are copied too, because the library would copy them in every call.
    """
    convs = [n for n in gm.graph.nodes if is_call(n, aten.convolution.default)]
    if not convs or not all(_suits(n, constant is not None) for n in convs):
        return False
    for n in convs:
        _rearrange_weight(gm, n, constant or set())
    changed = False
    for n in convs:
        x = n.args[0]
        assert isinstance(x, Node)
        if val(x).is_contiguous(memory_format=torch.channels_last) and val(x).stride(1) == 1:
            continue
        with gm.graph.inserting_before(n):
            moved = gm.graph.call_function(aten.clone.default, (x,), {"memory_format": torch.channels_last})
        moved.meta = dict(x.meta)
        moved.meta["val"] = val(x).contiguous(memory_format=torch.channels_last)
        n.replace_input_with(x, moved)
        propagate(gm, [moved])
        changed = True
    return changed


def rearrange_joint(gm: GraphModule) -> bool:
    """Run all convolutions of a joint graph, forward and backward, channels-last; return whether the graph changed.

    Applies only if all of them are 4-D in 16 bits with static shapes.
    """
    convs = [n for n in gm.graph.nodes if is_call(n, aten.convolution.default, aten.convolution_backward.default)]
    if not convs or not all(_suits_joint(n) for n in convs):
        return False
    moved: dict[Node, Node] = {}
    changed: set[Node] = set()
    for n in list(gm.graph.nodes):
        if is_call(n, aten.convolution.default, aten.convolution_backward.default):
            for k in range(2 if n.target is aten.convolution.default else 3):
                x = n.args[k]
                assert isinstance(x, Node)
                if val(x).is_contiguous(memory_format=torch.channels_last):
                    continue
                if x not in moved:
                    moved[x] = insert(gm.graph, n, aten.clone.default, (x,), {"memory_format": torch.channels_last})
                    changed.add(moved[x])
                n.update_arg(k, moved[x])
        update(n, changed)  # in graph order, so that the next convolution sees inputs that are channels-last already
    return bool(moved)


def _suits_joint(n: Node) -> bool:
    backward = n.target is aten.convolution_backward.default
    x, transposed = val(n.args[1 if backward else 0]), n.args[7 if backward else 6]
    return x.dtype in _LOW and x.dim() == 4 and not transposed and all(isinstance(s, int) for s in x.shape)


def _suits(n: Node, low: bool) -> bool:
    x = val(n.args[0])
    dtype_ok = x.dtype == torch.float32 or (low and x.dtype in _LOW)
    return dtype_ok and x.dim() == 4 and not n.args[6] and all(isinstance(s, int) for s in x.shape)


def _rearrange_weight(gm: GraphModule, n: Node, constant: set[Node]) -> None:
    w = n.args[1]
    if not isinstance(w, Node) or w not in constant or val(w).is_contiguous(memory_format=torch.channels_last):
        return
    moved = insert(gm.graph, n, aten.clone.default, (w,), {"memory_format": torch.channels_last})
    n.replace_input_with(w, moved)
    constant.add(moved)
