"""Split the bias of a convolution into an addition.

On a GPU the library adds the bias in a separate pass over memory. A generated kernel adds it together with the
activation that follows. The gradient of the bias, which the library sums in another pass, becomes a generated sum.

The library's kernel of plain depthwise images adds the bias before it rounds to 16 bits. There the bias stays: a sum of
a rounded result and a bias has another sign in one of a thousand elements, which changes an activation's gradient.

On a CPU the library adds every bias before it rounds, so that only gradients are split off. Its own sums over
channels-last images of float32 had relative errors of 4e-5.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from .context import Context
from .graph import aten, insert, is_call, replace, val


def run(gm: GraphModule, ctx: Context) -> int:
    """Split off the biases of an inference graph."""
    return split_biases(gm)


def run_joint(gm: GraphModule, ctx: Context) -> int:
    """Split off the gradients of biases, and on a GPU the biases too; return the number of both."""
    return split_gradients(gm) + (0 if ctx.device == "cpu" else split_biases(gm))


def split_gradients(gm: GraphModule) -> int:
    """Sum the gradients of biases outside of the convolutions' gradients; return their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if not is_call(n, aten.convolution_backward.default) or not n.args[10][2]:
            continue
        grad = n.args[0]
        total = insert(gm.graph, n, aten.sum.dim_IntList, (grad, [0, *range(2, val(grad).dim())]))
        n.update_arg(3, None)
        n.update_arg(10, [*n.args[10][:2], False])
        n.meta["val"] = (*val(n)[:2], None)
        for part in [u for u in n.users if is_call(u, operator.getitem) and u.args[1] == 2]:
            replace(part, total)
        count += 1
    return count


def split_biases(gm: GraphModule) -> int:
    """Split off the biases; return their number."""
    split = [n for n in gm.graph.nodes if is_call(n, aten.convolution.default) and n.args[2] is not None]
    split = [n for n in split if not _is_added_before_rounding(n)]
    for n in split:
        split_bias(gm, n)
    return len(split)


def split_bias(gm: GraphModule, n: Node) -> None:
    """Add the bias of a convolution behind it."""
    bias = n.args[2]
    n.update_arg(2, None)
    following = n.next
    shape = [1, -1] + [1] * (val(n).dim() - 2)
    wide = insert(gm.graph, following, aten.view.default, (bias, shape))
    total = insert(gm.graph, following, aten.add.Tensor, (n, wide))
    n.replace_all_uses_with(total, delete_user_cb=lambda u: u is not total)


def _is_added_before_rounding(n: Node) -> bool:
    image, groups = val(n.args[0]), n.args[8]
    rounds = image.dtype in (torch.bfloat16, torch.float16)
    depthwise = groups != 1 and groups == image.shape[1] and not n.args[6]
    return bool(rounds and depthwise and image.is_contiguous())
