"""Rewrite transposed convolutions whose windows tile the result (kernel = stride) as matmuls.

Each point of the image gives one window of the result:  y[n, h * k + i, w * k + j, :] = x[n, h, w, :] @ W[:, i, j, :].
Padding cuts the outermost elements of `y` off. `disjoint_windows_joint` has those of training.

The library has float32 kernels of tensor cores for few such convolutions. Of 42 with windows of 2x2 on an H100, plain
images took 104 to 314 us, channels-last ones 47 to 728, and the product 34 to 115; copying its result takes about 30.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from .channels_last import keeps_layout
from .context import Context
from .graph import READ_THROUGH, Convolution, aten, convolution_of, insert, is_call, propagate, val
from .mixed_layouts import is_channels_last

MOST_CUT = 0.25  # of the product's elements that padding may cut off


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite such convolutions of static float32 images; return their number."""
    convolutions = [
        n for n in gm.graph.find_nodes(op="call_function", target=aten.convolution.default) if _suits(n, ctx)
    ]
    for n in convolutions:
        _rewrite(gm, n)
    return len(convolutions)


def _suits(n: Node, ctx: Context) -> bool:
    return is_tiled(convolution_of(n), ctx)


def is_tiled(call: Convolution, ctx: Context) -> bool:
    """Return whether a convolution is a transposed one of static float32 images whose windows tile the result."""
    x, w, _, stride, padding, dilation, transposed, added, groups = call
    image, weight = val(x), val(w)
    if not transposed or groups != 1 or image.dim() != 4 or image.dtype != torch.float32 or weight.dtype != image.dtype:
        return False
    if not ctx.product_may_replace_convolution(image.dtype) or any(added) or any(d != 1 for d in dilation):
        return False
    window, is_static = list(weight.shape[2:]), all(isinstance(s, int) for s in (*image.shape, *weight.shape))
    if not is_static or window != list(stride) or window == [1, 1]:
        return False
    left = [1 - 2 * p / (size * k) for p, size, k in zip(padding, image.shape[2:], window, strict=True)]
    return bool(math.prod(left) >= 1 - MOST_CUT)


def _rewrite(gm: GraphModule, n: Node) -> None:
    x, w, bias, _, padding, *_ = convolution_of(n)
    batch, channels, height, width = val(x).shape
    _, out, kh, kw = val(w).shape

    def call(target: Callable[..., object], *args: Argument) -> Node:
        return insert(gm.graph, n, target, args)

    rows = call(aten.reshape.default, call(aten.permute.default, x, [0, 2, 3, 1]), [batch * height * width, channels])
    weight = call(aten.reshape.default, call(aten.permute.default, w, [0, 2, 3, 1]), [channels, kh * kw * out])
    y = call(aten.view.default, call(aten.mm.default, rows, weight), [batch, height, width, kh, kw, out])
    if _is_among_channels_last(n):
        windows = call(aten.permute.default, y, [0, 1, 3, 2, 4, 5])
        last = call(aten.reshape.default, windows, [batch, height * kh, width * kw, out])
        if any(padding):
            last.meta[READ_THROUGH] = True
        image = call(aten.permute.default, last, [0, 3, 1, 2])
    else:
        windows = call(aten.permute.default, y, [0, 5, 1, 3, 2, 4])
        image = call(aten.reshape.default, windows, [batch, out, height * kh, width * kw])
    for dim, (p, size) in enumerate(zip(padding, val(n).shape[2:], strict=True), 2):
        image = call(aten.slice.Tensor, image, dim, p, p + size) if p else image
    if any(padding):
        image = call(aten.clone.default, image)  # as dense as the result of the convolution
    if bias is not None:
        image = call(aten.add.Tensor, image, call(aten.view.default, bias, [out, 1, 1]))
    n.replace_all_uses_with(image)
    gm.graph.erase_node(n)
    propagate(gm, [image])


def _is_among_channels_last(n: Node) -> bool:
    """Return whether the image of a convolution is channels-last, or will be with those of other convolutions."""
    return is_channels_last(val(n.args[0])) or is_among_images(n)


def is_among_images(n: Node) -> bool:
    """Return whether another convolution reads or writes the images that a convolution writes or reads."""
    x = n.args[0]
    assert isinstance(x, Node)
    before = _meets_convolution(x, lambda m: m.all_input_nodes[:1])
    return before or any(_meets_convolution(u, lambda m: list(m.users)) for u in n.users)


def _meets_convolution(n: Node, neighbours: Callable[[Node], list[Node]]) -> bool:
    """Return whether operators that keep the layout lead from a node to a convolution."""
    waiting, seen = [n], set[Node]()
    while waiting:
        m = waiting.pop()
        if is_call(m, aten.convolution.default):
            return True
        if m not in seen and keeps_layout(m):
            seen.add(m)
            waiting += neighbours(m)
    return False
