"""Depthwise convolutions on a GPU, for which generated kernels compute the result and each gradient separately."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import GraphModule, Node

from .context import Context
from .gradient_call import GradientCall, replace_gradients
from .graph import aten, insert, is_call, val

WIDEST = 36  # elements of a window, as in `lowering.operators.depthwise`


def run(gm: GraphModule, ctx: Context) -> int:
    """Store constant weights of depthwise convolutions for generated kernels."""
    return turn_weights(gm, ctx.constant_nodes(gm))


def run_joint(gm: GraphModule, ctx: Context) -> int:
    """Split the backward of depthwise convolutions."""
    return split_gradients(gm)


def split_gradients(joint: GraphModule) -> int:
    """Split the backward of a channels-last depthwise convolution into two calls, one per gradient; return the number.

    Each is a generated kernel (`lowering.operators.depthwise`), and readers of one do not wait for the other.
    """

    def of_image(n: Node, call: GradientCall) -> Node | None:
        dilated = any(d != 1 for d in call.dilation)
        if not call.mask[1] or dilated or call.transposed or not _channels_last(val(call.grad)):
            return None
        if not _suits(call.x, call.w, call.groups):
            return None
        alone = call._replace(bias_sizes=None, mask=[True, False, False])
        both = insert(joint.graph, n, aten.convolution_backward.default, tuple(alone))
        return insert(joint.graph, n, operator.getitem, (both, 0))

    return replace_gradients(joint, 0, of_image)


def turn_weights(gm: GraphModule, constant: set[Node]) -> int:
    """Store constant weights [C, 1, KH, KW] with the channel as the fastest dimension; return their number."""
    turned: dict[Node, Node] = {}
    for n in list(gm.graph.nodes):
        if not is_call(n, aten.convolution.default) or n.args[1] not in constant or n.args[6]:
            continue
        if not _suits(n.args[0], n.args[1], n.args[8]):
            continue
        w = n.args[1]
        if w not in turned:
            by_tap = insert(gm.graph, n, aten.permute.default, (w, [2, 3, 1, 0]))
            dense = insert(gm.graph, n, aten.clone.default, (by_tap,), {"memory_format": torch.contiguous_format})
            turned[w] = insert(gm.graph, n, aten.permute.default, (dense, [3, 2, 0, 1]))
            constant.update((by_tap, dense, turned[w]))
        n.update_arg(1, turned[w])
    return len(turned)


def _suits(x: object, w: object, groups: int) -> bool:
    image, weight = val(x), val(w)
    if image.dim() != 4 or image.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if not all(isinstance(k, int) for k in (*image.shape, *weight.shape)):
        return False
    small = math.prod(weight.shape[2:]) <= WIDEST
    return small and groups == image.shape[1] == weight.shape[0] > 1 and _channels_last(image)


def _channels_last(image: torch.Tensor) -> bool:
    return image.is_contiguous(memory_format=torch.channels_last)
