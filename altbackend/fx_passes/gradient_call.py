"""The arguments of the gradient of a convolution, and the replacement of one of its results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from .graph import Convolution, aten, is_call, replace, val


class GradientCall(NamedTuple):
    """The arguments of `convolution_backward`.

    `grad`: [N, results, points]. `x`: [N, channels, points]. `w`: the weight. `mask`: whether the gradients of the
    image, of the weight and of the bias are wanted.
    """

    grad: Node
    x: Node
    w: Node
    bias_sizes: Argument
    stride: Any
    padding: Any
    dilation: Any
    transposed: bool
    output_padding: Any
    groups: int
    mask: Any


def gradient_of(n: Node) -> GradientCall:
    """Return the arguments of a call of `aten.convolution_backward`."""
    arguments: tuple[Any, ...] = n.args
    return GradientCall(*arguments)


def convolution_of_gradient(call: GradientCall) -> Convolution:
    """Return the arguments of the convolution that has this gradient, without its bias."""
    window = call.stride, call.padding, call.dilation
    return Convolution(call.x, call.w, None, *window, call.transposed, call.output_padding, call.groups)


def replace_gradients(joint: GraphModule, place: int, gradient: Callable[[Node, GradientCall], Node | None]) -> int:
    """Compute results number `place` of gradients of convolutions by other calls; return the number of these results.

    `gradient` inserts the calls in front of a node and returns their result, or None where the result is to stay.
    """
    count = 0
    for n in joint.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        call = gradient_of(n)
        users = [u for u in n.users if is_call(u, operator.getitem) and u.args[1] == place]
        new = gradient(n, call) if users and call.mask[place] else None
        if new is None:
            continue
        n.update_arg(10, [wanted and k != place for k, wanted in enumerate(call.mask)])
        n.meta["val"] = tuple(None if k == place else value for k, value in enumerate(val(n)))
        for u in users:
            replace(u, new)
        count += 1
    return count
