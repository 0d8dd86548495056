"""Depthwise convolutions on a GPU, for which generated kernels compute the result and each gradient separately."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import GraphModule, Node

from ..aten.depthwise import WIDEST, WIDEST_GRADIENT, reads_channels_last
from .context import Context
from .gradient_call import GradientCall, gradient_of, replace_gradients
from .graph import aten, insert, is_call, propagate, val
from .mixed_layouts import is_channels_last


def run(gm: GraphModule, ctx: Context) -> int:
    """Store constant weights of depthwise convolutions for generated kernels."""
    return turn_weights(gm, ctx.constant_nodes(gm))


def run_joint(gm: GraphModule, ctx: Context) -> int:
    """Split the backward of depthwise convolutions, and let gradients of weights read channels-last images."""
    return split_gradients(gm) + _copy_images(gm)


def split_gradients(joint: GraphModule) -> int:
    """Split the backward of a depthwise convolution into two calls, one per gradient; return the number.

    Each is a generated kernel (`lowering.operators.depthwise`), and readers of one do not wait for the other.
    """

    def of_image(n: Node, call: GradientCall) -> Node | None:
        dilated = any(d != 1 for d in call.dilation)
        if not call.mask[1] or dilated or call.transposed:
            return None
        if not _suits(call.x, call.w, call.groups, WIDEST_GRADIENT):
            return None
        alone = call._replace(bias_sizes=None, mask=[True, False, False])
        both = insert(joint.graph, n, aten.convolution_backward.default, tuple(alone))
        return insert(joint.graph, n, operator.getitem, (both, 0))

    return replace_gradients(joint, 0, of_image)


def _copy_images(joint: GraphModule) -> int:
    """Let gradients of weights with wide windows read channels-last copies of plain images; return their number.

    Neighbouring threads then have neighbouring channels, each with its own totals.
    """
    count, copies = 0, list[Node]()
    for n in joint.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        call = gradient_of(n)
        if list(call.mask) != [False, True, False] or {*call.dilation} != {1} or call.transposed:
            continue
        if not _suits(call.x, call.w, call.groups, WIDEST_GRADIENT) or not reads_channels_last(val(call.w).shape[2:]):
            continue
        plain = [k for k in (0, 1) if not is_channels_last(val(n.args[k]))]
        for k in plain:
            copy = (n.args[k],), {"memory_format": torch.channels_last}
            copies.append(insert(joint.graph, n, aten.clone.default, *copy))
            n.update_arg(k, copies[-1])
        count += bool(plain)
    propagate(joint, copies)
    return count


def turn_weights(gm: GraphModule, constant: set[Node]) -> int:
    """Store constant weights [C, 1, KH, KW] with the channel as the fastest dimension; return their number."""
    turned: dict[Node, Node] = {}
    for n in list(gm.graph.nodes):
        if not is_call(n, aten.convolution.default) or n.args[1] not in constant or n.args[6]:
            continue
        if not _suits(n.args[0], n.args[1], n.args[8], WIDEST) or not is_channels_last(val(n.args[0])):
            continue
        w = n.args[1]
        if w not in turned:
            by_tap = insert(gm.graph, n, aten.permute.default, (w, [2, 3, 1, 0]))
            dense = insert(gm.graph, n, aten.clone.default, (by_tap,), {"memory_format": torch.contiguous_format})
            turned[w] = insert(gm.graph, n, aten.permute.default, (dense, [3, 2, 0, 1]))
            constant.update((by_tap, dense, turned[w]))
        n.update_arg(1, turned[w])
    return len(turned)


def _suits(x: object, w: object, groups: int, widest: int) -> bool:
    """Return whether a convolution is a depthwise one of images with windows of at most `widest` elements."""
    image, weight = val(x), val(w)
    if image.dim() != 4 or image.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if not all(isinstance(k, int) for k in (*image.shape, *weight.shape)):
        return False
    small = math.prod(weight.shape[2:]) <= widest
    return bool(small and groups == image.shape[1] == weight.shape[0] > 1)
