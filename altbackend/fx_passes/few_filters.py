"""Gradients of the weights of volumes with few filters, by the library's kernels of tensor cores.

    dw[k, c, t] = sum over n, q of a[n, k, q] * b[n, c, stride * q - padding + t]

`a` has a channel for each of the K filters: it is the gradient of the result, or the volume of a transposed
convolution. For up to 16 filters, the library takes a kernel without tensor cores where the other operand has 64
channels, or where windows of an even length have at most 64. `a` is therefore padded with channels of zeros, and the
gradients of filters that do not exist are dropped. Measured on an H200 (docs/decisions/few-filters.md).
"""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import GraphModule, Node

from .context import Context
from .gradient_call import GradientCall, replace_gradients
from .graph import aten, insert, val

MOST_FILTERS, PADDED = 16, 32  # filters that may have the slow kernel, and those of the padded call
MOST_CHANNELS, FEWEST_CHANNELS = 64, 33  # channels of a window for which it is taken
FEWEST_PRODUCTS = 1 << 24  # of all filters, below which three more launches take as long
VOLUME = 5  # dimensions of a volume and of its weights


def run(joint: GraphModule, ctx: Context) -> int:
    """Pad the operands of such gradients; return their number."""
    return replace_gradients(joint, 1, lambda n, call: _padded(joint, n, call) if _suits(call) else None)


def _suits(call: GradientCall) -> bool:
    image, weight = val(call.x), val(call.w)
    if call.groups != 1 or weight.dim() != VOLUME or not image.dtype.is_floating_point:
        return False
    if image.dtype == torch.float64 or not all(isinstance(k, int) for k in (*image.shape, *weight.shape)):
        return False
    filters, channels, *windows = weight.shape
    points = math.prod(val(call.x if call.transposed else call.grad).shape[2:]) * image.shape[0]
    is_large = filters * channels * math.prod(windows) * points >= FEWEST_PRODUCTS
    is_even = any(k % 2 == 0 and k > 2 for k in windows)
    least = 0 if is_even else FEWEST_CHANNELS
    return bool(is_large and filters <= MOST_FILTERS and least <= channels <= MOST_CHANNELS)


def _padded(joint: GraphModule, before: Node, call: GradientCall) -> Node:
    """Insert the gradient of a weight with more filters, and return the part that exists."""
    filters, *terms = val(call.w).shape
    operand = call.x if call.transposed else call.grad
    zeros = [0, 0] * len(call.stride) + [0, PADDED - filters]
    wide = insert(joint.graph, before, aten.constant_pad_nd.default, (operand, zeros, 0.0))
    weight = insert(joint.graph, before, aten.new_zeros.default, (call.w, [PADDED, *terms]))
    grad, x = (call.grad, wide) if call.transposed else (wide, call.x)
    rest = call._replace(grad=grad, x=x, w=weight, mask=[False, True, False])
    both = insert(joint.graph, before, aten.convolution_backward.default, tuple(rest))
    gradient = insert(joint.graph, before, operator.getitem, (both, 1))
    return insert(joint.graph, before, aten.slice.Tensor, (gradient, 0, 0, filters))
