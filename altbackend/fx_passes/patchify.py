"""Rewrite convolutions whose windows tile the image (kernel = stride, no padding) as matmuls of patches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from .context import Context
from .graph import aten, convolution_of, insert, is_call, propagate, val


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite such convolutions of static 4-D float tensors; return their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten.convolution.default) and _suits(n) and ctx.product_may_replace_convolution(val(n).dtype):
            _rewrite(gm, n)
            count += 1
    return count


def _suits(n: Node) -> bool:
    x, w, _, stride, padding, dilation, transposed, _, groups = convolution_of(n)
    fx, fw = val(x), val(w)
    if fx.dim() != 4 or transposed or groups != 1 or not fx.dtype.is_floating_point:
        return False
    if any(not isinstance(s, int) for s in fx.shape) or any(padding) or any(d != 1 for d in dilation):
        return False
    kernel = list(fw.shape[2:])
    if kernel != list(stride) or kernel == [1, 1]:
        return False
    return bool(fx.shape[2] % kernel[0] == 0 and fx.shape[3] % kernel[1] == 0)


def _rewrite(gm: GraphModule, n: Node) -> None:
    x, w, bias, *_ = convolution_of(n)
    batch, channels, height, width = val(x).shape
    out, _, kh, kw = val(w).shape
    rows, columns = height // kh, width // kw

    def call(target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        return insert(gm.graph, n, target, args, kwargs)

    if val(x).is_contiguous(memory_format=torch.channels_last) and not val(x).is_contiguous():
        split = call(
            aten.view.default, call(aten.permute.default, x, [0, 2, 3, 1]), [batch, rows, kh, columns, kw, channels]
        )
        ordered = call(aten.permute.default, split, [0, 1, 3, 2, 4, 5])
        weight = call(aten.permute.default, w, [0, 2, 3, 1])
    else:
        source = x if val(x).is_contiguous() else call(aten.clone.default, x, memory_format=torch.contiguous_format)
        split = call(aten.view.default, source, [batch, channels, rows, kh, columns, kw])
        ordered = call(aten.permute.default, split, [0, 2, 4, 1, 3, 5])
        weight = w
    size = channels * kh * kw
    patches = call(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    matrix = call(aten.view.default, patches, [batch * rows * columns, size])
    flat = call(aten.view.default, call(aten.clone.default, weight, memory_format=torch.contiguous_format), [out, size])
    turned = call(aten.permute.default, flat, [1, 0])
    y = call(aten.mm.default, matrix, turned) if bias is None else call(aten.addmm.default, bias, matrix, turned)
    image = call(aten.permute.default, call(aten.view.default, y, [batch, rows, columns, out]), [0, 3, 1, 2])
    n.replace_all_uses_with(image)
    gm.graph.erase_node(n)
    propagate(gm, [image])
