"""Which ATen decompositions run during tracing, and why the others do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

aten = torch.ops.aten

# Kept whole: a fused library kernel is faster, or the lowering states the operator better than its parts.
_KEPT = (
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "baddbmm.default",
    "embedding_dense_backward.default",
    "silu.default",
    "hardswish.default",
    "hardsigmoid.default",
    "leaky_relu.default",
    "addcmul.default",
    "addcdiv.default",
    "lerp.Scalar",
    "lerp.Tensor",
    "masked_fill.Scalar",
    "masked_fill.Tensor",
    "logsumexp.default",
    "square.default",
    "sigmoid_backward.default",
    "tanh_backward.default",
    "threshold_backward.default",
    "gelu_backward.default",
    "silu_backward.default",
    "native_dropout_backward.default",
    "tril.default",
    "triu.default",
    "logaddexp.default",
    "upsample_nearest2d.default",
    "repeat_interleave.self_Tensor",
    "ones_like.default",
    "zeros_like.default",
    "empty_like.default",
    "floor_divide.default",
    "floor_divide.Scalar",
    "clamp_min.default",
    "clamp_max.default",
    "clamp_min.Tensor",
    "clamp_max.Tensor",
    "rsub.Scalar",
    "rsub.Tensor",
    "bernoulli.default",
    "rrelu.default",
    "sum.default",
    "select_scatter.default",
    "relu6.default",
    "roll.default",
    "unbind.int",
    "t.default",
    "transpose.int",
    "detach.default",
    "squeeze.default",
    "squeeze.dim",
    # their indices need no check, so that their loops run as vectors
    "_unsafe_index.Tensor",
    "_unsafe_index_put.default",
)

# Beyond the core set: operators that the loop IR handles through simpler ones.
_ADDED = (
    aten._native_batch_norm_legit,
    aten.native_batch_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm_backward,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten.native_batch_norm_backward,
    aten.batch_norm_backward,
    aten.frobenius_norm,
    aten.linalg_vector_norm,
    aten._foreach_add,
    aten.count_nonzero,
    aten.log_sigmoid_forward,
    aten.max_pool2d_with_indices_backward,
    aten.dist,
    aten.special_log_ndtr,
    aten._fused_rms_norm,
    aten.rms_norm,
)
_ADDED_NOT = frozenset({"max_pool2d_with_indices_backward", "_foreach_add"})


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """Overload -> decomposition, as `aot_autograd` takes it."""
    chosen: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    added = [op for op in _ADDED if op.__name__ not in _ADDED_NOT]
    chosen.update(get_decompositions(added))
    for name in _KEPT:
        packet, which = name.split(".")
        op = getattr(getattr(aten, packet, None), which, None)
        chosen.pop(op, None)
    return chosen
