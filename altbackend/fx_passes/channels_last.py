"""Convolution graphs run channels-last: the input of the first convolution is rearranged once."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .graph import aten, is_call, propagate, val


def run(gm: GraphModule) -> bool:
    """Rearrange the inputs of convolutions that are not channels-last yet; True if the graph changed.

    Strides follow by propagation, so an operator between two convolutions keeps the layout.
    """
    convs = [n for n in gm.graph.nodes if is_call(n, aten.convolution.default)]
    if not convs or not all(_suits(n) for n in convs):
        return False
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


def _suits(n: Node) -> bool:
    x = val(n.args[0])
    return x.dim() == 4 and not n.args[6] and all(isinstance(s, int) for s in x.shape) and x.dtype == torch.float32
