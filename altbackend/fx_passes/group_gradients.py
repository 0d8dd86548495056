"""Gradients of images and volumes in narrow groups, as convolutions that generated kernels of a GPU compute.

    dx[n, c, q] = sum over o, t of grad[n, o, q + padding - t] * w[o, c, t]

is a convolution of the gradient, in the same groups, with weights that are turned over. The library runs one
convolution for each group of a volume, and converts images several times. It keeps the gradients of the weights.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ..aten.narrow_groups import in_generated_kernel
from .context import Context
from .gradient_call import GradientCall
from .graph import aten, insert, is_call, replace, val


def run(joint: GraphModule, ctx: Context) -> int:
    """Replace the gradients of images that generated kernels compute; return their number."""
    count = 0
    for n in joint.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        call = GradientCall(*n.args)
        images = [u for u in n.users if is_call(u, operator.getitem) and u.args[1] == 0]
        if not images or not _suits(call):
            continue
        gradient = _convolution(joint, n, call)
        n.update_arg(10, [False, *call.mask[1:]])
        n.meta["val"] = (None, *val(n)[1:])
        for u in images:
            replace(u, gradient)
        count += 1
    return count


def _suits(call: GradientCall) -> bool:
    """Return whether the gradient of the image is a convolution of stride 1 that a generated kernel computes."""
    image, weight = val(call.grad), val(call.w)
    if not call.mask[0] or call.transposed or {*call.stride, *call.dilation} != {1}:
        return False
    if not all(isinstance(k, int) for k in (*image.shape, *weight.shape)):
        return False
    written, width, *taps = weight.shape
    sizes = (width * call.groups, written // call.groups, *taps)
    return min(_reach(call)) >= 0 and in_generated_kernel(written, call.groups, sizes, image.dtype)


def _reach(call: GradientCall) -> list[int]:
    """Return the padding of the gradient: the elements of a window behind those that pad the image."""
    return [k - 1 - p for k, p in zip(val(call.w).shape[2:], call.padding, strict=True)]


def _convolution(joint: GraphModule, before: Node, call: GradientCall) -> Node:
    """Insert the convolution that is the gradient of the image, and return it."""
    groups, (written, width, *taps) = call.groups, val(call.w).shape

    def add(target: Callable[..., object], *args: Argument) -> Node:
        return insert(joint.graph, before, target, args)

    apart = add(aten.view.default, call.w, [groups, written // groups, width, *taps])
    turned = add(aten.transpose.int, apart, 1, 2)
    whole = add(aten.reshape.default, turned, [groups * width, written // groups, *taps])
    flipped = add(aten.flip.default, whole, list(range(2, 2 + len(taps))))
    none = [0] * len(taps)
    arguments = (call.stride, _reach(call), call.dilation, False, none, groups)
    return add(aten.convolution.default, call.grad, flipped, None, *arguments)
