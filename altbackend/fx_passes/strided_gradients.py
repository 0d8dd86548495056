"""Take the points of a stride before the gradient of the weight of a 1x1 convolution, on a CPU.

oneDNN's kernel for this gradient gathers the points of a channels-last image that the stride takes. It stores whole
vectors of channels, and writes past its workspace where an image has fewer channels than a vector
(https://github.com/uxlfoundation/oneDNN/issues/6035). The gradient is that of a convolution without a stride over these
points: dw[o, i] = sum over n, p of grad[n, o, p] * x[n, i, stride * p].
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .context import Context
from .graph import aten, insert, replace, val

VECTOR = 16  # channels that the kernel stores at a time, of float32 with AVX-512; it stores 8 with AVX2


def run(gm: GraphModule, ctx: Context) -> int:
    """Split such gradients into that of the image and that of the weight; return their number."""
    gradients = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    writing_past = [n for n in gradients if _writes_past_workspace(n)]
    for n in writing_past:
        _split(gm, n)
    return len(writing_past)


def _writes_past_workspace(n: Node) -> bool:
    """Return whether oneDNN's kernel writes past its workspace if the image or the weight is channels-last."""
    _, image, weight, _, stride, padding, _, transposed, _, _, mask = n.args
    if transposed or not isinstance(mask, Sequence) or not mask[1] or val(image).dim() < 4:
        return False
    one_point = all(statically_known_true(size == 1) for size in val(weight).shape[2:])
    few = not statically_known_true(val(weight).shape[1] >= VECTOR)
    return one_point and few and _all(padding, 0) and not _all(stride, 1)


def _all(numbers: object, n: int) -> bool:
    assert isinstance(numbers, Sequence)
    return all(isinstance(x, int) and x == n for x in numbers)


def _split(gm: GraphModule, n: Node) -> None:
    grad, image, weight, bias, stride, padding, dilation, transposed, added, groups, mask = n.args
    assert isinstance(image, Node)
    assert isinstance(stride, Sequence)
    assert isinstance(mask, Sequence)
    points = image
    for k, step in enumerate(stride):
        points = insert(gm.graph, n, aten.slice.Tensor, (points, 2 + k, 0, sys.maxsize, step))
    whole = [1] * len(stride)
    target = aten.convolution_backward.default
    rest = padding, dilation, transposed, added, groups
    of_weight = insert(gm.graph, n, target, (grad, points, weight, bias, whole, *rest, [False, True, mask[2]]))
    of_image = insert(gm.graph, n, target, (grad, image, weight, bias, stride, *rest, [True, False, False]))
    for user in list(n.users):
        source = of_image if user.args[1] == 0 else of_weight
        replace(user, insert(gm.graph, user, operator.getitem, (source, user.args[1])))
    gm.graph.erase_node(n)
    for unused in (of_image, of_weight):
        if not unused.users:
            gm.graph.erase_node(unused)
