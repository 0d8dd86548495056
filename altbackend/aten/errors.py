"""Operators that raise errors of the data when they run, as a position out of range does."""

from __future__ import annotations

import torch

from .collective import is_collective
from .name import OWN_OPERATORS, operator_name, words
from .pointwise import FILLS, MOVES, UNTAGGED, is_tagged
from .reduction import is_normalisation, is_reduction
from .view import is_view_operator

# Pointwise operators of which those of integers raise an error, for a zero.
DIVISIONS = words("div floor_divide remainder fmod pow")
# Other operators whose errors depend on sizes, dtypes and devices alone; tracing has raised those.
CALM = words(
    "mm addmm bmm baddbmm mv addmv addr dot vdot _int_mm _scaled_mm _weight_int8pack_mm _weight_int4pack_mm_for_cpu",
    "convolution _convolution convolution_backward _convolution_pointwise _convolution_transpose_pointwise",
    "_linear_pointwise _mkl_linear mkldnn_rnn_layer",
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward",
    "native_batch_norm cudnn_batch_norm cudnn_batch_norm_backward _native_batch_norm_legit _batch_norm_with_update",
    "_native_batch_norm_legit_no_training _native_batch_norm_legit_functional",
    "sort topk cumsum cumprod logcumsumexp _fft_r2c _fft_c2r _fft_c2c avg_pool2d max_pool2d_with_indices",
    "native_dropout rand randn rand_like randn_like randint randint_like randperm",
)


def may_raise(target: object) -> bool:
    """Return whether a library call may raise an error that its data, or the code of a custom operator, decides.

    Functions of the runtime do not count: those that check numbers keep their order as calls with an effect.
    """
    if not isinstance(target, torch._ops.OpOverload) or is_collective(target):
        return False
    if target.namespace not in OWN_OPERATORS:
        return True
    name = operator_name(target)
    if name in DIVISIONS:
        return True
    if name in UNTAGGED | FILLS | MOVES | CALM or is_tagged(target):
        return False
    return not (is_reduction(target) or is_normalisation(target) or is_view_operator(target))
