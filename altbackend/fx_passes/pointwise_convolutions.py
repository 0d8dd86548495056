"""Rewrite convolutions with a 1x1 kernel as matrix products: y[n, h, w, :] = W x[n, h, w, :].

The pixels of a channels-last image are the rows of a matrix. On a GPU the product takes an epilogue, and its library
kernels are better than those of convolutions. Generated kernels that read the result add the bias: with it the
library's kernel of 262,144 rows, 128 terms and 128 columns in bfloat16 takes 65 us, without it 35.

On a CPU a call of a linear takes 8 us less than one of a convolution: 32 for 40, for 240 channels of 14 x 14 pixels in
float32. A convolution stays where oneDNN can accumulate into what is added.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from . import onednn
from .context import Context
from .conv_bias import split_bias
from .graph import aten, convolution_of, insert, is_call, layout, only_user, update, val
from .mixed_layouts import is_channels_last
from .pad_matmul import takes_strides


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite 1x1 convolutions whose pixels are rows; return their number."""
    count, changed = 0, set[Node]()
    for n in list(gm.graph.nodes):
        update(n, changed)  # in the same walk: one through the graph for each product takes quadratic time
        if is_call(n, aten.convolution.default) and _suits(n) and _gains(n, ctx):
            if ctx.device == "gpu" and n.args[2] is not None and all(map(takes_strides, n.users)):
                split_bias(gm, n)
            if (result := _rewrite(gm, n)) is not None:
                changed.add(result)
            count += 1
    return count


def _gains(n: Node, ctx: Context) -> bool:
    return _gains_on_cpu(n) if ctx.device == "cpu" else ctx.product_may_replace_convolution(val(n).dtype)


def _gains_on_cpu(n: Node) -> bool:
    """Return whether a product takes no longer than the convolution.

    A dtype that oneDNN lacks on this processor has slow products: 35 ms for 12, for 64 channels of 28 x 28 pixels in
    bfloat16 with AVX2.
    """
    dtype = val(n).dtype
    return (dtype.itemsize > 2 or onednn.computes(dtype)) and not _is_added(n)


def _is_added(n: Node) -> bool:
    user = only_user(n)
    return is_call(user, aten.add.Tensor) and user is not None and all(isinstance(a, Node) for a in user.args)


def _suits(n: Node) -> bool:
    x, w, _, stride, padding, _, transposed, _, groups = convolution_of(n)
    image, weight = val(x), val(w)
    if transposed or groups != 1 or any(padding) or not image.dtype.is_floating_point or image.dim() < 4:
        return False
    if any(s != 1 for s in weight.shape[2:]) or image.dtype != weight.dtype:
        return False
    if sum(not isinstance(s, int) for s in image.shape) > 1:  # a view leaves out one size at most
        return False
    if all(statically_known_true(s == 1) for s in image.shape[2:]):
        return True
    # without oneDNN for its dtype, a CPU gives a plain image for a channels-last one
    return all(s == 1 for s in stride) and is_channels_last(image) and is_channels_last(val(n))


def _rewrite(gm: GraphModule, n: Node) -> Node | None:
    """Replace a convolution by a product; return the result if its layout differs."""
    x, w, bias, *_ = n.args
    image = val(x)
    batch, channels, *pixels = image.shape
    out = val(w).shape[0]

    def call(target: Callable[..., object], *args: Argument) -> Node:
        return insert(gm.graph, n, target, args)

    last = [0, *range(2, image.dim()), 1]
    rows = call(aten.reshape.default, call(aten.permute.default, x, last), [-1, channels])
    weight = call(aten.t.default, call(aten.reshape.default, w, [out, channels]))
    y = call(aten.mm.default, rows, weight) if bias is None else call(aten.addmm.default, bias, rows, weight)
    sizes = [batch, *pixels, out]
    shaped = call(aten.view.default, y, [s if isinstance(s, int) else -1 for s in sizes])
    result = call(aten.permute.default, shaped, [0, image.dim() - 1, *range(1, image.dim() - 1)])
    same = layout(val(result)) == layout(val(n))
    n.replace_all_uses_with(result)
    gm.graph.erase_node(n)
    return None if same else result
