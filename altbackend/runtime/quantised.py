"""Calls of oneDNN's quantised operators, for host programs and finalised graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F

Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups
Output = tuple[float, int, torch.dtype]  # scale, zero point and dtype; (1.0, 0, float32) if it is not quantised
Added = tuple[torch.Tensor, float, int]  # integers, scale and zero point of a tensor with the sizes of the result
Post = tuple[str, list[float], str]  # an activation: its name, its numbers and its algorithm

POST_OPS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        "none": torch.Tensor.contiguous,
        "relu": F.relu,
        "hardtanh": F.hardtanh,
        "hardswish": F.hardswish,
        "swish": F.silu,
    }
)


def quantised_convolution(
    x: torch.Tensor,
    x_scale: float,
    x_zero: int,
    packed: torch.Tensor,
    symmetric: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    geometry: Geometry,
    out: Output,
    post: Post,
    added: Added | None = None,
) -> torch.Tensor:
    """Return `post(convolution + bias + added)` of uint8 and int8, all dequantised, then quantised as `out` says.

    `packed`: the weight in oneDNN's layout, which has no zero points; `symmetric`: whether all of `zeros` are 0, None
    if they are. If they are not, torch computes the convolution in float32. `scales`, `zeros`: float32 and whole
    numbers of output channels. `added` has the dtype of the result. The result is channels-last.
    """
    if symmetric is None or symmetric.item():
        none = torch.zeros(scales.shape, dtype=torch.int64)
        args = (x, x_scale, x_zero, packed, scales, none)
        if added is not None:
            return convolution_added_to(added[0], *args, bias, *geometry, *out, *added[1:], "sum", 1.0, *post)
        y: torch.Tensor = torch.ops.onednn.qconv_pointwise(*args, bias, *geometry, *out, *post)
        return y
    stride, padding, dilation, groups = geometry
    wide = _dequantised(weight, scales, zeros)
    y = torch.conv2d((x.float() - x_zero) * x_scale, wide, bias, stride, padding, dilation, groups)
    if added is not None:
        y = y + (added[0].float() - added[2]) * added[1]
    y = POST_OPS[post[0]](y, *post[1])
    return _quantised(y, out).contiguous(memory_format=torch.channels_last)


def quantised_linear(
    x: torch.Tensor,
    x_scale: float | torch.Tensor,
    x_zero: int | torch.Tensor,
    packed: torch.Tensor,
    symmetric: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: Output,
    post: Post,
) -> torch.Tensor:
    """Return `post(x @ weight.T + bias)` of uint8 (..., in) and int8 (out, in), both dequantised, as `out` says.

    The other arguments are those of `quantised_convolution`. `x_scale` and `x_zero` may be tensors of one element.
    """
    if symmetric is None or symmetric.item():
        none = torch.zeros(scales.shape, dtype=torch.int64)
        args = (x, x_scale, x_zero, packed, scales, none, bias, *out, *post)
        op = torch.ops.onednn.qlinear_pointwise
        y: torch.Tensor = op.tensor(*args) if isinstance(x_scale, torch.Tensor) else op.default(*args)
        return y
    y = F.linear((x.float() - x_zero) * x_scale, _dequantised(weight, scales, zeros), bias)
    return _quantised(POST_OPS[post[0]](y, *post[1]), out)


def _dequantised(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    shape = [-1] + [1] * (weight.dim() - 1)
    wide = weight.float() if zeros is None else weight.float() - zeros.view(shape)
    return wide * scales.view(shape)


def _quantised(y: torch.Tensor, out: Output) -> torch.Tensor:
    scale, zero, dtype = out
    if dtype == torch.float32:
        return y
    limits = torch.iinfo(dtype)
    return ((y * (1.0 / scale)).round() + zero).clamp(limits.min, limits.max).to(dtype)


def convolution_added_to(accumulated: torch.Tensor, *arguments: object) -> torch.Tensor:
    """Return oneDNN's sum of a quantised convolution and `accumulated`, (N, C, H, W), in new memory.

    `arguments`: those of `onednn::qconv2d_pointwise.binary` without the tensor that it accumulates into.
    """
    x, scale, zero, weight, scales, zeros, *rest = arguments
    total = accumulated.clone(memory_format=torch.channels_last)
    with torch.no_grad():
        y: torch.Tensor = torch.ops.onednn.qconv2d_pointwise.binary(x, scale, zero, weight, scales, zeros, total, *rest)
    return y


for _function in (quantised_convolution, quantised_linear, convolution_added_to):
    vars(_function)["returns_new_memory"] = True  # read by `aten.view.returns_new_memory`
