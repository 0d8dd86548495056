"""The arguments of the gradient of a convolution."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.fx import Node
from torch.fx.node import Argument


class GradientCall(NamedTuple):
    """The arguments of `convolution_backward`."""

    grad: Node
    x: Node
    w: Node
    bias_sizes: Argument
    stride: Any
    padding: Any
    dilation: Any
    transposed: bool
    output_padding: Argument
    groups: int
    mask: Any
