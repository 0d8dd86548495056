"""Gradients of images and volumes in narrow groups or of few filters, as convolutions of generated kernels of a GPU.

    dx[n, c, q] = sum over o, t of grad[n, o, q + padding - t] * w[o, c, t]

is a convolution of the gradient, in the same groups, with weights that are turned over. The library runs one
convolution for each group of a volume, and converts images several times. It keeps the gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ..aten.narrow_groups import in_generated_kernel, in_plain_kernel, is_depthwise_image
from .context import Context
from .gradient_call import GradientCall, replace_gradients
from .graph import aten, insert, val
from .mixed_layouts import FORMATS, is_channels_last


def run(joint: GraphModule, ctx: Context) -> int:
    """Replace the gradients of images that generated kernels compute; return their number."""
    return replace_gradients(joint, 0, lambda n, call: _gradient(joint, n, call) if _suits(call) else None)


def _suits(call: GradientCall) -> bool:
    """Return whether the gradient of the image is a convolution of stride 1 that a generated kernel computes."""
    image, weight = val(call.grad), val(call.w)
    if call.transposed or {*call.stride, *call.dilation} != {1}:
        return False
    if not all(isinstance(k, int) for k in (*image.shape, *weight.shape)):
        return False
    written, width, *taps = weight.shape
    sizes = (width * call.groups, written // call.groups, *taps)
    if min(_reach(call)) < 0:
        return False
    if is_depthwise_image(written, call.groups, sizes):  # `depthwise` has the gradients of channels-last images
        return in_plain_kernel(sizes, image.dtype) and not is_channels_last(image)
    return in_generated_kernel(written, call.groups, sizes, image.dtype)


def _reach(call: GradientCall) -> list[int]:
    """Return the padding of the gradient: the elements of a window behind those that pad the image."""
    return [k - 1 - p for k, p in zip(val(call.w).shape[2:], call.padding, strict=True)]


def _gradient(joint: GraphModule, before: Node, call: GradientCall) -> Node:
    """Insert the gradient of the image in the layout of the library's gradient, and return it."""
    gradient = _convolution(joint, before, call)
    library = val(before)[0]
    if val(gradient).stride() == library.stride():
        return gradient
    memory_format = FORMATS[library.dim()] if is_channels_last(library) else torch.contiguous_format
    return insert(joint.graph, before, aten.clone.default, (gradient,), {"memory_format": memory_format})


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
