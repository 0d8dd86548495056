"""Which ATen decompositions run during tracing, and why the others do not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from .compat import aot_autograd

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
    "native_batch_norm_backward.default",
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
    "take.default",  # the decomposition reads the value of a single index while it traces
    # the decompositions take negative indices, or write where there is no element, and eager raises
    "index_add.default",
    "index_copy.default",
    "max_unpool2d.default",
    "max_unpool3d.default",
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
    aten._log_softmax,  # so that a backward may compute it again from its input and two numbers a row
    aten.batch_norm_backward,
    aten.frobenius_norm,
    aten.linalg_vector_norm,
    aten.count_nonzero,
    aten.log_sigmoid_forward,
    aten.max_pool2d_with_indices_backward,
    aten.dist,
    aten.ldexp,
    aten.special_log_ndtr,
    aten._fused_rms_norm,
    aten.rms_norm,
)
_ADDED_NOT = frozenset({"max_pool2d_with_indices_backward"})

# numerics="eager": eager computes a pointwise operator in one kernel, which rounds where its decomposition does not and
# may contract what the decomposition rounds. Only these decompositions are the same steps.
_SAME_STEPS = (
    "__and__ __or__ __xor__ clip deg2rad float_power frac hardshrink heaviside isfinite isneginf isposinf ldexp max "
    "min nan_to_num rad2deg sgn true_divide"
)
# Pointwise, or one kernel for other reasons, without the tag that says so.
_ALSO_ONE_KERNEL = (
    "_log_softmax _log_softmax_backward_data _softmax_backward_data binary_cross_entropy binary_cross_entropy_backward "
    "elu_backward glu glu_backward hardsigmoid_backward hardswish_backward hardtanh_backward huber_loss "
    "huber_loss_backward leaky_relu_backward log_sigmoid_backward log_sigmoid_forward mish_backward mse_loss_backward "
    "smooth_l1_loss smooth_l1_loss_backward soft_margin_loss_backward softplus_backward"
)

# _foreach_X -> X on each tensor, so that the tensors' kernels fuse with what is around them.
_SAME_NAME = (
    "abs acos add asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1 floor frac lerp lgamma log "
    "log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc"
)
_EACH: dict[str, Any] = {name: getattr(aten, name) for name in _SAME_NAME.split()} | {
    "addcdiv": lambda x, a, b, value=1: aten.addcdiv(x, a, b, value=value),
    "addcmul": lambda x, a, b, value=1: aten.addcmul(x, a, b, value=value),
    "max": aten.amax,
    "norm": aten.linalg_vector_norm,
    "zero": aten.zeros_like,
}
# the same operator under another name when its second argument is a number
_EACH_NUMBER = {"maximum": aten.clamp_min, "minimum": aten.clamp_max}


def _per_tensor(op: Any, single: Callable[..., Any]) -> Callable[..., Any]:
    def each(*args: Any, **kwargs: Any) -> Any:
        if op._overloadname == "Tensor" and single in (_EACH["addcdiv"], _EACH["addcmul"]):
            return NotImplemented  # one tensor holds the factors of all
        n = next(len(a) for a in args if isinstance(a, (list, tuple)))

        def at(k: int, a: Any) -> Any:
            return a[k] if isinstance(a, (list, tuple)) else a

        return [single(*(at(k, a) for a in args), **kwargs) for k in range(n)]

    return each


def _foreach() -> dict[Any, Callable[..., Any]]:
    found: dict[Any, Callable[..., Any]] = {}
    for name, single in _EACH.items():
        packet = getattr(aten, f"_foreach_{name}", None)
        for which in packet.overloads() if packet is not None else ():
            if which.endswith("out"):
                continue
            op = getattr(packet, which)
            chosen = _EACH_NUMBER.get(name, single) if which in ("Scalar", "ScalarList") else single
            found[op] = _per_tensor(op, chosen)
    return found


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """`index_fill` as one `index_put`, whose result keeps x's strides too.

    torch's own decomposition writes to a tensor that it has made, which AOTAutograd refuses in a functional graph.
    """
    if x.dim() == 0:
        return aten.squeeze.dim(_index_fill(aten.unsqueeze(x, 0), 0, index, value), 0)
    if isinstance(value, torch.Tensor):
        value = value.to(device=x.device, dtype=x.dtype)
    else:
        value = aten.full([], value, dtype=x.dtype, device=x.device)
    return aten.index_put(x, [None] * (dim % x.dim()) + [aten.reshape(index, [-1])], value)


def _unique(x: torch.Tensor, sorted: bool = True, return_inverse: bool = False) -> Any:
    """`_unique` under the name by which every torch knows that the size of its result depends on data."""
    return aten._unique2(x, sorted, return_inverse, False)[:2]


def _batch_norm_with_update(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, var: torch.Tensor, momentum: float, eps: float
) -> Any:
    """`_batch_norm_with_update_functional`, its running statistics in their own dtype.

    torch traces those as float32 whatever they are, and a library call gives what they are. A GPU's float32 statistics
    stay with the library call, since cuDNN returns bytes that its backward needs.
    """
    if x.device.type == "cuda" and mean.dtype == var.dtype == torch.float32:
        return NotImplemented
    out, saved_mean, saved_rstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, True, momentum, eps
    )
    empty = aten.empty([0], dtype=torch.uint8, device=x.device)
    return out, saved_mean, saved_rstd, empty, new_mean.to(mean.dtype), new_var.to(var.dtype)


SCANNED_BY_ONE = 1 << 16  # elements of one scan, which a GPU gives to a single program


def _left_whole(mask: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the library counts the elements under a mask faster, or only data decides a size."""
    if any(has_free_unbacked_symbols(t) for t in (mask, *others)):
        return True
    return mask.device.type != "cpu" and (isinstance(mask.numel(), torch.SymInt) or mask.numel() > SCANNED_BY_ONE)


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Any:
    """Element k under the mask takes source[number of elements under the mask before k], in row-major order."""
    if _left_whole(mask, x, source):
        return NotImplemented
    sizes = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    x, mask = aten.expand(x, sizes), aten.expand(mask, sizes)
    if source.numel() == 0 or x.numel() == 0:
        return aten.clone(x, memory_format=torch.contiguous_format)  # an empty source serves a mask without elements
    place = aten.clamp_min(_before(mask), 0)
    values = aten.reshape(aten.index(aten.reshape(source, [-1]), [place]), sizes)
    return aten.clone(aten.where(mask, values, x), memory_format=torch.contiguous_format)


def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Any) -> Any:
    """The gradients under the mask side by side, then zeros; what is not under it goes to a last place, cut off."""
    if _left_whole(mask, grad) or any(isinstance(n, torch.SymInt) for n in sizes):
        return NotImplemented
    mask = aten.expand(mask, grad.shape)
    count = math.prod(sizes)
    place = aten.where(aten.reshape(mask, [-1]), _before(mask), count)
    held = aten.index_put(aten.new_zeros(grad, [count + 1]), [place], aten.reshape(grad, [-1]))
    return aten.reshape(aten.slice(held, 0, 0, count), sizes)


def _before(mask: torch.Tensor) -> torch.Tensor:
    """For each element in row-major order: how many are under the mask before it, or -1 and itself not under it."""
    counted: torch.Tensor = aten.cumsum(aten.to(aten.reshape(mask, [-1]), torch.int64), 0)
    return counted - 1


def _nll_loss_backward(steps: Callable[..., Any]) -> Callable[..., Any]:
    """torch's steps with +0 in rows that count for nothing, where they have -1 * 0 at the class they took instead."""

    def backward(grad: Any, x: torch.Tensor, target: torch.Tensor, weight: Any, how: int, ignore: Any, n: Any) -> Any:
        where = aten.reshape(target, []) if x.dim() == 1 else aten.unsqueeze(target, 1)
        return aten.where(aten.ne(where, ignore), steps(grad, x, target, weight, how, ignore, n), 0)

    return backward


def _smooth_l1_loss_backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, how: int, beta: float) -> Any:
    """torch's steps, but NaN where the difference is: they take its sign, which is 0."""
    difference = aten.sub(x, target)
    steps = _SMOOTH_L1(grad, x, target, how, beta)
    return aten.where(aten.ne(difference, difference), difference, steps)


_SMOOTH_L1, _NLL, _NLL_2D = (
    get_decompositions([op])[op.default]
    for op in (aten.smooth_l1_loss_backward, aten.nll_loss_backward, aten.nll_loss2d_backward)
)

# Ours, in place of torch's.
_OWN: dict[Any, Callable[..., Any]] = {
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten._unique.default: _unique,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten._batch_norm_with_update_functional.default: _batch_norm_with_update,
    aten.nll_loss_backward.default: _nll_loss_backward(_NLL),
    aten.nll_loss2d_backward.default: _nll_loss_backward(_NLL_2D),
}
# And where pointwise operators are taken apart.
_OWN_PARTS: dict[Any, Callable[..., Any]] = {aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward}


@functools.cache
def table(numerics: str = "fast") -> dict[Any, Callable[..., Any]]:
    """Overload -> decomposition, as `aot_autograd` takes it. `numerics`: the option; "eager" leaves more whole."""
    chosen: dict[Any, Callable[..., Any]] = aot_autograd.core_decompositions()
    added = [op for op in _ADDED if op.__name__ not in _ADDED_NOT]
    chosen.update(get_decompositions(added))
    chosen.update(_foreach())
    chosen.update(_OWN_PARTS)
    for name in _KEPT:
        packet, which = name.split(".")
        op = getattr(getattr(aten, packet, None), which, None)
        chosen.pop(op, None)
    if numerics == "eager":
        chosen = {op: steps for op, steps in chosen.items() if not _one_kernel(op)}
    return chosen | _OWN


def taken_apart(numerics: str) -> tuple[Any, ...]:
    """What tracing takes apart by itself, and `numerics` wants whole; for `compat_aot.undecomposed`.

    In vectors eager's `softshrink` gives +0 where its parts give a zero of the operand's sign.
    """
    return (aten.softshrink.default,) if numerics == "eager" else ()


def _one_kernel(op: Any) -> bool:
    """Whether eager has one kernel for an operator that its decomposition does not equal bit for bit."""
    name = op.overloadpacket.__name__ if isinstance(op, torch._ops.OpOverload) else ""
    pointwise = bool(name) and torch.Tag.pointwise in op.tags and not name.startswith("_foreach")
    return name in _ALSO_ONE_KERNEL.split() or (pointwise and name not in _SAME_STEPS.split())
