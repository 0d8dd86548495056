"""Convolutions of images with as many channels, or channels of a group, as the library has fast kernels for.

    y[n, g, k] = sum over c < w of x[n, g, c] * W[g, k, c]  =  sum over c < w' of x'[n, g, c] * W'[g, k, c]

`x'` and `W'` have zeros for the channels from w to w'. The filters that are added to W give channels that nothing
reads. The kernel that computes an image writes the padded one, and the readers of a result leave channels out.
Channels of other groups are no part of a sum, so that a number which is not finite stays in its group. A convolution
without groups is one group, whose filters may be padded to another number than its channels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ..aten.narrow_groups import padded_width, pads_generated, trains_padded
from ..aten.odd_channels import ConvolutionSizes, padded_channels, trains_padded_channels
from ..compat import torch_api
from .channels_last import is_generated
from .context import Context
from .conv_bias import split_bias
from .gradient_call import convolution_of_gradient, gradient_of
from .graph import (
    KEEPS_LAYOUT,
    READ_THROUGH,
    Convolution,
    aten,
    convolution_of,
    insert,
    is_call,
    like_argument,
    propagate,
    replace,
    val,
)


class Width(NamedTuple):
    """The channels or the filters of a group, before and after they are padded."""

    narrow: int
    wide: int


@dataclass(frozen=True)
class Groups:
    """The number of groups, their widths, and the node in front of which calls are inserted."""

    gm: GraphModule
    before: Node
    number: int
    channels: Width
    filters: Width

    def call(self, target: Callable[..., object], *args: Argument) -> Node:
        """Insert a call."""
        return insert(self.gm.graph, self.before, target, args)


def run(gm: GraphModule, ctx: Context) -> int:
    """Pad the channels of convolutions of an inference graph where wider ones are faster; return their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if not is_call(n, aten.convolution.default) or _stays_generated(n):
            continue
        if (wide := _padded_widths(convolution_of(n))) is not None:
            _pad_convolution(gm, n, wide)
            count += 1
    return count


def run_joint(joint: GraphModule, ctx: Context) -> int:
    """Pad convolutions and their gradients where wider groups train faster; return the number of both."""
    count = 0
    for n in list(joint.graph.nodes):
        if is_call(n, aten.convolution.default) and not _stays_generated(n):
            call, pad = convolution_of(n), _pad_convolution
        elif is_call(n, aten.convolution_backward.default) and not n.args[10][2]:
            call, pad = convolution_of_gradient(gradient_of(n)), _pad_gradient
        else:
            continue
        wide = _padded_widths(call)
        trains = trains_padded if call.groups > 1 else trains_padded_channels
        if wide is not None and trains(val(call.weight).shape, wide[0]):
            pad(joint, n, wide)
            count += 1
    return count


def _stays_generated(n: Node) -> bool:
    """Return whether a generated kernel computes a convolution faster than the library computes a padded one."""
    if not is_generated(n):
        return False
    call = convolution_of(n)
    weight = val(call.weight)
    return call.groups == 1 or not pads_generated(call.groups, weight.shape, weight.dtype)


def _padded_widths(call: Convolution) -> tuple[int, int] | None:
    """Return the channels and the filters that a padded group has; None for a convolution that stays as it is."""
    x, w = val(call.x), val(call.weight)
    if call.transposed or x.dim() != 4 or x.dtype != w.dtype:
        return None
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if not all(isinstance(s, int) for s in (*x.shape, *w.shape)):
        return None
    if x.dtype == torch.float32 and not torch_api.allows_tf32_convolutions():
        return None
    if call.groups == 1:
        return padded_channels(ConvolutionSizes(x.shape, w.shape, call.stride), x.dtype)
    wide = padded_width(x.shape, w.shape, x.dtype)
    return None if wide is None else (wide, wide)


def _groups(gm: GraphModule, n: Node, call: Convolution, wide: tuple[int, int]) -> Groups:
    filters, channels = val(call.weight).shape[:2]
    return Groups(gm, n, call.groups, Width(channels, wide[0]), Width(filters // call.groups, wide[1]))


def _pad_convolution(gm: GraphModule, n: Node, wide: tuple[int, int]) -> None:
    if n.args[2] is not None:
        split_bias(gm, n)
    call = convolution_of(n)
    groups = _groups(gm, n, call, wide)
    operands = _padded_image(groups, call.x, groups.channels), _padded_weight(groups, call.weight)
    result = groups.call(aten.convolution.default, *operands, *n.args[2:])
    result.meta[KEEPS_LAYOUT] = True
    result.meta["val"] = like_argument(result, val(result))
    _replace(groups, n, _trimmed_image(groups, result, groups.filters))


def _pad_gradient(gm: GraphModule, n: Node, wide: tuple[int, int]) -> None:
    call = gradient_of(n)
    groups = _groups(gm, n, convolution_of_gradient(call), wide)
    images = _padded_image(groups, call.grad, groups.filters), _padded_image(groups, call.x, groups.channels)
    both = groups.call(aten.convolution_backward.default, *images, _padded_weight(groups, call.w), *n.args[3:])
    for part in [u for u in n.users if is_call(u, operator.getitem)]:
        if val(part) is not None:
            gradient = groups.call(operator.getitem, both, part.args[1])
            is_weight = bool(part.args[1])
            new = _trimmed_weight(groups, gradient) if is_weight else _trimmed_image(groups, gradient, groups.channels)
            _replace(groups, part, new)


def _replace(groups: Groups, before: Node, new: Node) -> None:
    replace(before, new)
    propagate(groups.gm, [new])


def _padded_image(groups: Groups, x: Node, width: Width) -> Node:
    """Return a channels-last image with zeros behind the channels of each group."""
    rows = groups.call(aten.permute.default, x, [0, 2, 3, 1])
    points = list(val(rows).shape[:3])
    apart = groups.call(aten.reshape.default, rows, [*points, groups.number, width.narrow])
    padded = groups.call(aten.constant_pad_nd.default, apart, [0, width.wide - width.narrow], 0.0)
    joined = groups.call(aten.reshape.default, padded, [*points, groups.number * width.wide])
    return groups.call(aten.permute.default, joined, [0, 3, 1, 2])


def _padded_weight(groups: Groups, w: Node) -> Node:
    """Return a channels-last weight with zeros for more filters of a group and more channels."""
    channels, filters = groups.channels, groups.filters
    rows = groups.call(aten.permute.default, w, [0, 2, 3, 1])
    window = list(val(rows).shape[1:3])
    apart = groups.call(aten.reshape.default, rows, [groups.number, filters.narrow, *window, channels.narrow])
    padding = [0, channels.wide - channels.narrow, 0, 0, 0, 0, 0, filters.wide - filters.narrow]
    padded = groups.call(aten.constant_pad_nd.default, apart, padding, 0.0)
    joined = groups.call(aten.reshape.default, padded, [groups.number * filters.wide, *window, channels.wide])
    return groups.call(aten.permute.default, joined, [0, 3, 1, 2])


def _trimmed_image(groups: Groups, y: Node, width: Width) -> Node:
    """Return the channels of an image that are no padding."""
    rows = groups.call(aten.permute.default, y, [0, 2, 3, 1])
    points = list(val(rows).shape[:3])
    apart = groups.call(aten.reshape.default, rows, [*points, groups.number, width.wide])
    taken = groups.call(aten.slice.Tensor, apart, 4, 0, width.narrow)
    joined = groups.call(aten.reshape.default, taken, [*points, groups.number * width.narrow])
    joined.meta[READ_THROUGH] = True
    return groups.call(aten.permute.default, joined, [0, 3, 1, 2])


def _trimmed_weight(groups: Groups, w: Node) -> Node:
    """Return the filters and channels of a weight that are no padding."""
    _, channels, *window = val(w).shape
    apart = groups.call(aten.reshape.default, w, [groups.number, groups.filters.wide, channels, *window])
    for dim, width in ((1, groups.filters), (2, groups.channels)):
        apart = groups.call(aten.slice.Tensor, apart, dim, 0, width.narrow)
    sizes = [groups.number * groups.filters.narrow, groups.channels.narrow, *window]
    return groups.call(aten.reshape.default, apart, sizes)
