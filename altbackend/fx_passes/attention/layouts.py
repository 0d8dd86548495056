"""The pass: fused attentions read operands whose last dimension is contiguous, whatever layouts passes have chosen.

torch checks that before it calls a fused kernel. The kernels do not: they take elements of a head to be neighbours.
Passes that run after the choice may turn an image channels-last, and with it the heads that are views of it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...aten.name import operator_name
from ..context import Context
from ..graph import aten, insert, propagate, val

FUSED, UNFUSED = "_scaled_dot_product_", "_scaled_dot_product_attention_math"


def run(gm: GraphModule, ctx: Context) -> int:
    """Copy operands of fused attentions whose last dimension is not contiguous; return the number of copies."""
    copies: dict[Node, Node] = {}
    for n in list(gm.graph.nodes):
        label = operator_name(n.target)
        if not label.startswith(FUSED) or label.startswith(UNFUSED):
            continue
        for x in n.all_input_nodes:
            if not _has_strided_heads(val(x)):
                continue
            if x not in copies:
                plain = {"memory_format": torch.contiguous_format}
                copies[x] = insert(gm.graph, n, aten.clone.default, (x,), plain)
            n.replace_input_with(x, copies[x])
    propagate(gm, copies.values())
    return len(copies)


def _has_strided_heads(x: object) -> bool:
    """Return whether `x` is a tensor [batch, heads, length, elements] whose elements have a stride."""
    if not isinstance(x, torch.Tensor) or x.dim() != 4 or not x.is_floating_point():
        return False
    return not statically_known_true(x.stride(-1) == 1) and not statically_known_true(x.shape[-1] == 1)
