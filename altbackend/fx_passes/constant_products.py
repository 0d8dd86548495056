"""Convolutions and matmuls whose weight and bias are constant, as one form for the passes that change these."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

from .graph import aten, convolution_of, is_call, val


@dataclass(frozen=True)
class Product:
    """A call with a constant weight. `weight_axis`, `result_axis`: the dimension of its output channels in both."""

    call: Node
    weight: Node
    bias: Node | None
    weight_axis: int
    result_axis: int

    @property
    def channels(self) -> int:
        """Return the number of output channels."""
        return int(val(self.weight).shape[self.weight_axis])

    @property
    def along(self) -> list[int]:
        """Return the shape in which one value per channel broadcasts to the weight."""
        shape = [1] * val(self.weight).dim()
        shape[self.weight_axis] = -1
        return shape


def product_of(n: Node, constant: set[Node]) -> Product | None:
    """Return a convolution or a matmul whose weight and bias are constant but whose input is not, or None."""
    if is_call(n, aten.convolution.default):
        x, w, b, *_, transposed, _, groups = convolution_of(n)
        if transposed and groups != 1:  # the channels of all groups share the second dimension of the weight
            return None
        product = Product(n, w, b, 1 if transposed else 0, 1)
    elif is_call(n, aten.mm.default, aten.addmm.default) and not n.kwargs:
        operands: tuple[Any, ...] = n.args
        *biases, x, w = operands
        product = Product(n, w, biases[0] if biases else None, 1, -1)
    else:
        return None
    parts = [p for p in (product.weight, product.bias) if p is not None]
    if x in constant or any(p not in constant for p in parts) or not val(n).dtype.is_floating_point:
        return None
    if not isinstance(val(product.weight).shape[product.weight_axis], int):
        return None
    if product.bias is not None and tuple(val(product.bias).shape) != (product.channels,):
        return None
    return product
