"""Rewrite convolutions of sequences as convolutions of images of one row.

oneDNN packs weights of images and volumes alone, and channels-last sequences are as fast as channels-last images.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from .context import Context
from .graph import aten, convolution_of, insert, propagate, val
from .onednn import computes


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite the convolutions of sequences whose weights are constant; return their number."""
    constant = ctx.constant_nodes(gm)
    count = 0
    for n in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, w = n.args[:2]
        if val(x).dim() == 3 and w in constant and val(x).dtype == val(w).dtype and computes(val(x).dtype):
            _rewrite(gm, n)
            count += 1
    return count


def _rewrite(gm: GraphModule, n: Node) -> None:
    x, w, bias, stride, padding, dilation, transposed, output_padding, groups = convolution_of(n)
    image = insert(gm.graph, n, aten.unsqueeze.default, (x, 2))
    weight = insert(gm.graph, n, aten.unsqueeze.default, (w, 2))
    geometry = ([1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups)
    wide = insert(gm.graph, n, aten.convolution.default, (image, weight, bias, *geometry))
    row = insert(gm.graph, n, aten.squeeze.dim, (wide, 2))
    n.replace_all_uses_with(row)
    gm.graph.erase_node(n)
    propagate(gm, [row])
