"""Convolutions of images that are no larger than their windows, and the gradients of weights, as matrix products.

With one row for each image, X [n, channels * points] and Y [n, filters * results],

    Y = X @ M,  dX = dY @ M^T,  dM = X^T @ dY,      M[(c, h), (k, i)] = w[k, c, h - stride * i + padding].

Only a convolution whose windows all cover the image is such a product as a whole: M has no zeros then, which would
spread a number that is not finite. The gradient of the weight adds elements of dM, and leaves out those of no window.

The library computes such convolutions with a tile of points for each element of a window, most of them padding. For
166,666 images of 3x4x4 with windows of 7x7, each of the three takes an H200 0.6 to 7.9 ms. The products take 0.06 to
0.11 ms (docs/decisions/small-images.md).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from .context import Context
from .conv_bias import split_bias
from .gradient_call import GradientCall, convolution_of_gradient, gradient_of, replace_gradients
from .graph import Convolution, aten, convolution_of, insert, is_call, propagate, replace, val
from .mixed_layouts import is_channels_last

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_DATA = 1 << 20  # elements of X and Y: smaller convolutions wait for the processor, which launches more kernels
MOST_OF_DATA = 0.3  # elements of M, at most, for each of X and Y
# Terms of the product for each of the convolution, times the channels or the filters, whichever are fewer: the library
# computes few of them as if they were 64 and more. With 64 of both and a factor of 2 both took the same time.
MOST_TERMS = 128


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite the convolutions of a graph whose windows cover their images, and their gradients; return their number.

    The graph is an inference graph or a joint one.
    """
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten.convolution.default):
            call, result, rewrite = convolution_of(n), val(n), _rewrite_convolution
        elif is_call(n, aten.convolution_backward.default) and not n.args[10][2]:
            gradient = gradient_of(n)
            call, result, rewrite = convolution_of_gradient(gradient), val(gradient.grad), _rewrite_gradient
        else:
            continue
        if (w := _windows(gm, n, call, result, ctx)) is not None and w.cover_images and w.gain:
            rewrite(w)
            count += 1
    return count


def run_weight_gradients(joint: GraphModule, ctx: Context) -> int:
    """Compute gradients of weights over small images as products; return their number."""

    def product(n: Node, call: GradientCall) -> Node | None:
        w = _windows(joint, n, convolution_of_gradient(call), val(call.grad), ctx)
        return w.weight_gradient(call.grad) if w is not None and w.gain else None

    return replace_gradients(joint, 1, product)


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution, and the node in front of which calls are inserted.

    `image`, `window`, `result`: the points of each dimension. `image_last`, `result_last`: whether rows of X and of Y
    hold the channels of a point side by side, as channels-last images do.
    """

    gm: GraphModule
    before: Node
    call: Convolution
    image: tuple[int, ...]
    window: tuple[int, ...]
    result: tuple[int, ...]
    image_last: bool
    result_last: bool

    def insert(self, target: Callable[..., object], *args: Argument) -> Node:
        """Insert a call."""
        return insert(self.gm.graph, self.before, target, args)

    @property
    def channels(self) -> tuple[int, int]:
        """Return the channels of the image, and those of the result."""
        filters, channels = val(self.call.weight).shape[:2]
        return channels, filters

    @property
    def dims(self) -> list[tuple[int, int, int, int, int]]:
        """Return for each dimension the points of the image, the window and the result, the stride and the padding."""
        return list(zip(self.image, self.window, self.result, self.call.stride, self.call.padding, strict=True))

    @property
    def cover_images(self) -> bool:
        """Return whether every window sees all points of its image."""
        return all(p >= s * (r - 1) and h + p <= k for h, k, r, s, p in self.dims)

    @property
    def gain(self) -> bool:
        """Return whether products are faster than the library."""
        channels, filters = self.channels
        rows, columns = channels * math.prod(self.image), filters * math.prod(self.result)
        data = val(self.call.x).shape[0] * (rows + columns)
        terms = math.prod(self.image) / math.prod(self.window)
        is_cheap = terms <= 1 or terms * min(channels, filters) <= MOST_TERMS
        return is_cheap and data >= LEAST_DATA and rows * columns <= MOST_OF_DATA * data

    def rows(self, x: Node, last: bool) -> Node:
        """Return images as the rows of a matrix, a view where `last` is their layout."""
        n, _, *points = val(x).shape
        if last:
            x = self.insert(aten.permute.default, x, [0, *range(2, 2 + len(points)), 1])
        return self.insert(aten.reshape.default, x, [n, math.prod(val(x).shape[1:])])

    def images(self, rows: Node, channels: int, points: Sequence[int], last: bool) -> Node:
        """Return the images whose rows are given."""
        n, rank = val(rows).shape[0], len(points)
        if not last:
            return self.insert(aten.reshape.default, rows, [n, channels, *points])
        apart = self.insert(aten.reshape.default, rows, [n, *points, channels])
        return self.insert(aten.permute.default, apart, [0, rank + 1, *range(1, rank + 1)])

    def matrix(self) -> Node:
        """Return M: [channels * points, filters * results].

        The windows of the padded weight are its elements w[k, c, h + stride * i' - ...], where i' counts backwards.
        """
        rank = len(self.image)
        padding = [n for h, k, r, s, p in reversed(self.dims) for n in (s * (r - 1) - p, h + p - k)]
        w = self.insert(aten.constant_pad_nd.default, self.call.weight, padding, 0.0)
        for d, (h, _, _, s, _) in enumerate(self.dims):
            w = self.insert(aten.unfold.default, w, 2 + d, h, s)
        w = self.insert(aten.flip.default, w, list(range(2, 2 + rank)))
        results, points = list(range(2, 2 + rank)), list(range(2 + rank, 2 + 2 * rank))
        order = [*_ordered(1, points, self.image_last), *_ordered(0, results, self.result_last)]
        turned = self.insert(aten.permute.default, w, order)
        channels, filters = self.channels
        sizes = [channels * math.prod(self.image), filters * math.prod(self.result)]
        return self.insert(aten.reshape.default, turned, sizes)

    def forward(self) -> Node:
        """Return the result of the convolution."""
        product = self.insert(aten.mm.default, self.rows(self.call.x, self.image_last), self.matrix())
        return self.images(product, self.channels[1], self.result, self.result_last)

    def image_gradient(self, grad: Node) -> Node:
        """Return dX, given dY as images."""
        turned = self.insert(aten.t.default, self.matrix())
        product = self.insert(aten.mm.default, self.rows(grad, self.result_last), turned)
        return self.images(product, self.channels[0], self.image, self.image_last)

    def weight_gradient(self, grad: Node) -> Node:
        """Return dw[k, c, a], the sum over i of dM[(c, a + stride * i - padding), (k, i)], given dY as images."""
        rank, (channels, filters) = len(self.image), self.channels
        x, y = self.rows(self.call.x, self.image_last), self.rows(grad, self.result_last)
        total = _product(self, self.insert(aten.t.default, x), y)
        sizes = [*_ordered(channels, self.image, self.image_last), *_ordered(filters, self.result, self.result_last)]
        apart = self.insert(aten.reshape.default, total, sizes)
        (c, points), (k, results) = _places(0, rank, self.image_last), _places(rank + 1, rank, self.result_last)
        g = self.insert(aten.permute.default, apart, [k, c, *points, *results])
        padding = [n for h, a, r, s, p in reversed(self.dims) for n in (p, s * (r - 1) + a - h - p)]
        g = self.insert(aten.constant_pad_nd.default, g, [*[0] * (2 * rank), *padding], 0.0)
        for d, (_, a, _, s, _) in enumerate(
            self.dims
        ):  # the windows that start at stride * i, of which number i is taken
            g = self.insert(aten.unfold.default, g, 2, a, s)
            g = self.insert(aten.diagonal.default, g, 0, 2, 2 + rank - d)
        dw = self.insert(aten.sum.dim_IntList, g, [3 + 2 * d for d in range(rank)])
        dtype = val(self.call.weight).dtype
        if val(dw).dtype != dtype:
            dw = insert(self.gm.graph, self.before, aten._to_copy.default, (dw,), {"dtype": dtype})
        return dw


def _ordered(channels: int, points: Sequence[int], last: bool) -> list[int]:
    return [*points, channels] if last else [channels, *points]


def _places(first: int, rank: int, last: bool) -> tuple[int, list[int]]:
    """Return the dimension of the channels, and those of the points, that `_ordered` laid from `first` on."""
    dims = list(range(first, first + rank + 1))
    return (dims[-1], dims[:-1]) if last else (dims[0], dims[1:])


def _product(w: Windows, a: Node, b: Node) -> Node:
    """Return a product in float32: the library adds in it, and the kernel behind it adds on."""
    if val(a).device.type == "cuda" and val(a).dtype != torch.float32:
        return w.insert(aten.mm.dtype, a, b, torch.float32)
    return w.insert(aten.mm.default, a, b)


def _windows(gm: GraphModule, before: Node, call: Convolution, result: torch.Tensor, ctx: Context) -> Windows | None:
    """Return the windows of a convolution of static sizes; None for one that stays."""
    x, weight = val(call.x), val(call.weight)
    if call.transposed or call.groups != 1 or any(d != 1 for d in call.dilation) or x.dim() != weight.dim():
        return None
    if x.dtype not in _DTYPES or weight.dtype != x.dtype or not ctx.product_may_replace_convolution(x.dtype):
        return None
    if not all(isinstance(s, int) for s in (*x.shape, *weight.shape)) or 0 in (*x.shape, *weight.shape):
        return None
    sizes = tuple(x.shape[2:]), tuple(weight.shape[2:]), tuple(result.shape[2:])
    return Windows(gm, before, call, *sizes, is_channels_last(x), is_channels_last(result))


def _rewrite_convolution(w: Windows) -> None:
    if w.before.args[2] is not None:
        split_bias(w.gm, w.before)
    _replace(w, w.before, w.forward())


def _rewrite_gradient(w: Windows) -> None:
    grad = gradient_of(w.before).grad
    for part in [u for u in w.before.users if is_call(u, operator.getitem) and val(u) is not None]:
        _replace(w, part, w.weight_gradient(grad) if part.args[1] else w.image_gradient(grad))
    w.gm.graph.erase_node(w.before)


def _replace(w: Windows, before: Node, new: Node) -> None:
    replace(before, new)
    propagate(w.gm, [new])
