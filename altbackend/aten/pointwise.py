"""Pointwise operators: those that torch's tag `pointwise` leaves out, and the costly ones."""

from __future__ import annotations

import torch

from .name import operator_name, words

# Pointwise operators without torch's tag.
UNTAGGED = words(
    "_to_copy fill copy clone lift_fresh_copy hardswish hardswish_backward hardsigmoid hardsigmoid_backward",
    "leaky_relu_backward tril triu",
)
# Those without the tag that compute a number, in the layout of their operands.
COMPUTED_UNTAGGED = words(
    "hardswish hardswish_backward hardsigmoid_backward hardtanh_backward leaky_relu_backward elu_backward",
    "mish_backward softplus_backward hardshrink_backward softshrink_backward log_sigmoid_backward",
)
# Operators whose every element is a constant or one element of an argument.
FILLS = words(
    "full full_like zeros_like ones_like new_zeros zeros ones scalar_tensor arange iota empty empty_like empty_strided"
)
MOVES = words(
    "cat constant_pad_nd select_backward slice_backward select_scatter slice_scatter repeat roll flip",
)
LOOKUPS = words("index _unsafe_index gather embedding index_select")
# Operators that compute a transcendental function, a root or a quotient.
COSTLY = words(
    "exp expm1 log log1p log2 tanh sigmoid erf erfc gelu gelu_backward silu silu_backward pow sin cos tan softplus",
    "mish tanh_backward sigmoid_backward rsqrt sqrt div",
)
# Operators whose every element combines a window of an argument, so that each reader would read the window anew.
WINDOWS = words(
    "convolution avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d",
    "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d upsample_bilinear2d upsample_bicubic2d",
    "upsample_linear1d upsample_trilinear3d grid_sampler_2d grid_sampler_3d",
)
# Operators without torch's tag that are one kernel in eager, pointwise or not.
ONE_KERNEL = words(
    "_log_softmax _log_softmax_backward_data _softmax_backward_data binary_cross_entropy binary_cross_entropy_backward",
    "elu_backward glu glu_backward hardsigmoid_backward hardswish_backward hardtanh_backward huber_loss",
    "huber_loss_backward leaky_relu_backward log_sigmoid_backward log_sigmoid_forward mish_backward mse_loss_backward",
    "smooth_l1_loss smooth_l1_loss_backward soft_margin_loss_backward softplus_backward",
)
# Operators of several steps that all of eager's 16-bit CPU loops compute in float32 and round once.
ROUNDED_ONCE = words("addcdiv hardsigmoid hardswish native_dropout_backward")


def is_tagged(target: object) -> bool:
    """Return whether torch tags an operator as pointwise."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def is_pointwise(target: object) -> bool:
    """Return whether an operator computes each element of the result from one element of each argument."""
    return is_tagged(target) or operator_name(target) in COMPUTED_UNTAGGED


def is_elementwise(target: object) -> bool:
    """Return whether each element of the result needs a bounded number of elements of the arguments."""
    return is_tagged(target) or operator_name(target) in UNTAGGED | FILLS | MOVES | LOOKUPS
