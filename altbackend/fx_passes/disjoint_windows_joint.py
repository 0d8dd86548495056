"""Transposed convolutions whose windows tile the result (kernel = stride), and their gradients, as matmuls.

With X as the points of images and Y as those of the windows, one window for each point,

    Y = X @ W,  dX = dY @ W^T,  dW = X^T @ dY.

A plain image is such a matrix as it lies, transposed: [channels, points]. The products of all images are a batch then.
The library converts plain images five times in a step. Some of its channels-last kernels take many times as long as
others.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import cast

from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from .context import Context
from .disjoint_windows import is_among_images, is_tiled
from .gradient_call import convolution_of_gradient, gradient_of
from .graph import Convolution, aten, convolution_of, insert, is_call, propagate, replace, val
from .mixed_layouts import is_channels_last
from .padding_cost import ALIGNED, alignment

LEAST_PLANE = 4  # points of a plane for each element of a window: dW of each image has at most a quarter of its size


def run(joint: GraphModule, ctx: Context) -> int:
    """Rewrite such convolutions without padding, and their gradients; return the number of both."""
    kinds: dict[tuple[Node, Node], Kind] = {}  # by image and weight: a gradient takes that of its convolution
    count = 0
    for n in list(joint.graph.nodes):
        if is_call(n, aten.convolution.default):
            call = convolution_of(n)
            rewrite = _rewrite_convolution
        elif is_call(n, aten.convolution_backward.default) and not n.args[10][2]:
            call = convolution_of_gradient(gradient_of(n))
            rewrite = _rewrite_gradient
        else:
            continue
        if is_tiled(call, ctx) and not any(call.padding) and call.bias is None:
            operands = call.x, call.weight
            kind = kinds.setdefault(operands, _kind(n, call))
            rewrite(kind(joint, n, call))
            count += 1
    return count


@dataclass(frozen=True)
class Windows:
    """A convolution whose windows tile the result, and the node in front of which calls are inserted."""

    joint: GraphModule
    before: Node
    call: Convolution

    def insert(self, target: Callable[..., object], *args: Argument) -> Node:
        """Insert a call."""
        return insert(self.joint.graph, self.before, target, args)

    def permuted(self, x: Node, order: list[int], sizes: list[int]) -> Node:
        """Return a tensor with its dimensions in another order, and then in other sizes."""
        return self.insert(aten.reshape.default, self.insert(aten.permute.default, x, order), sizes)

    @property
    def points(self) -> tuple[int, int, int, int]:
        """Return the sizes of the image: the number of images, the channels read, the height and the width."""
        return cast("tuple[int, int, int, int]", tuple(val(self.call.x).shape))

    @property
    def window(self) -> tuple[int, int, int]:
        """Return the channels written, and the height and width of a window."""
        return cast("tuple[int, int, int]", tuple(val(self.call.weight).shape[1:]))


class Planes(Windows):
    """Windows over plain images: X is [n, channels, points], and Y is [n, elements of a window, points]."""

    def image(self) -> Node:
        """Return X, a view."""
        n, channels, height, width = self.points
        return self.insert(aten.reshape.default, self.call.x, [n, channels, height * width])

    def weight(self) -> Node:
        """Return W for each image: [n, channels, elements of a window], a view."""
        n, channels, *_ = self.points
        matrix = self.insert(aten.reshape.default, self.call.weight, [1, channels, math.prod(self.window)])
        return self.insert(aten.expand.default, matrix, [n, channels, math.prod(self.window)])

    def result(self) -> Node:
        """Return the result of the convolution."""
        (n, _, height, width), (channels, rows, columns) = self.points, self.window
        product = self.insert(aten.bmm.default, self.insert(aten.transpose.int, self.weight(), 1, 2), self.image())
        apart = self.insert(aten.view.default, product, [n, channels, rows, columns, height, width])
        return self.permuted(apart, [0, 1, 4, 2, 5, 3], [n, channels, height * rows, width * columns])

    def gradient(self, grad: Node) -> Node:
        """Return the gradient of the result as the matrices dY."""
        (n, _, height, width), (channels, rows, columns) = self.points, self.window
        apart = self.insert(aten.reshape.default, grad, [n, channels, height, rows, width, columns])
        return self.permuted(apart, [0, 1, 3, 5, 2, 4], [n, channels * rows * columns, height * width])

    def image_gradient(self, gradient: Node) -> Node:
        """Return dX, given dY."""
        product = self.insert(aten.bmm.default, self.weight(), gradient)
        return self.insert(aten.view.default, product, list(self.points))

    def weight_gradient(self, gradient: Node) -> Node:
        """Return dW, given dY."""
        products = self.insert(aten.bmm.default, self.image(), self.insert(aten.transpose.int, gradient, 1, 2))
        total = self.insert(aten.sum.dim_IntList, products, [0])
        return self.insert(aten.view.default, total, list(val(self.call.weight).shape))


class Rows(Windows):
    """Windows over images whose points are rows of channels: X is [points, channels]."""

    def image(self) -> Node:
        """Return X, a copy unless the image is channels-last."""
        n, channels, height, width = self.points
        return self.permuted(self.call.x, [0, 2, 3, 1], [n * height * width, channels])

    def weight(self) -> Node:
        """Return W: [channels, elements of a window]."""
        return self.permuted(self.call.weight, [0, 2, 3, 1], [self.points[1], math.prod(self.window)])

    def result(self) -> Node:
        """Return the result of the convolution."""
        (n, _, height, width), (channels, rows, columns) = self.points, self.window
        product = self.insert(aten.mm.default, self.image(), self.weight())
        apart = self.insert(aten.view.default, product, [n, height, width, rows, columns, channels])
        last = self.permuted(apart, [0, 1, 3, 2, 4, 5], [n, height * rows, width * columns, channels])
        return self.insert(aten.permute.default, last, [0, 3, 1, 2])

    def gradient(self, grad: Node) -> Node:
        """Return the gradient of the result as the matrix dY."""
        (n, _, height, width), (channels, rows, columns) = self.points, self.window
        apart = self.permuted(grad, [0, 2, 3, 1], [n, height, rows, width, columns, channels])
        return self.permuted(apart, [0, 1, 3, 2, 4, 5], [n * height * width, rows * columns * channels])

    def image_gradient(self, gradient: Node) -> Node:
        """Return dX, given dY."""
        n, channels, height, width = self.points
        product = self.insert(aten.mm.default, gradient, self.insert(aten.t.default, self.weight()))
        last = self.insert(aten.view.default, product, [n, height, width, channels])
        return self.insert(aten.permute.default, last, [0, 3, 1, 2])

    def weight_gradient(self, gradient: Node) -> Node:
        """Return dW, given dY."""
        channels, rows, columns = self.window
        product = self.insert(aten.mm.default, self.insert(aten.t.default, self.image()), gradient)
        last = self.insert(aten.view.default, product, [self.points[1], rows, columns, channels])
        return self.insert(aten.permute.default, last, [0, 3, 1, 2])


Kind = type[Planes] | type[Rows]


def _kind(n: Node, call: Convolution) -> Kind:
    """Return the kind of a convolution's windows: planes where the library can align them, and they are large.

    The weight's gradients of all images of planes lie in memory, before they are added.
    """
    x, points = val(call.x), math.prod(val(call.x).shape[2:])
    is_aligned = alignment(points, x.element_size()) == ALIGNED
    is_large = points >= LEAST_PLANE * math.prod(val(call.weight).shape[1:])
    is_plain = not is_channels_last(x) and (is_call(n, aten.convolution_backward.default) or not is_among_images(n))
    return Planes if is_aligned and is_large and is_plain else Rows


def _rewrite_convolution(w: Planes | Rows) -> None:
    _replace(w, w.before, w.result())


def _rewrite_gradient(w: Planes | Rows) -> None:
    gradient = w.gradient(gradient_of(w.before).grad)
    for part in [u for u in w.before.users if is_call(u, operator.getitem) and val(u) is not None]:
        _replace(w, part, w.weight_gradient(gradient) if part.args[1] else w.image_gradient(gradient))


def _replace(w: Windows, before: Node, new: Node) -> None:
    replace(before, new)
    propagate(w.joint, [new])
