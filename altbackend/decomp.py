"""The table of ATen decompositions that run during tracing, and the reasons for the operators that are left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch._decomp import get_decompositions
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from . import decomp_qparams
from .aten.name import operator_name
from .aten.pointwise import ONE_KERNEL, is_tagged
from .compat import aot_autograd
from .compat.torch_api import unannotated

aten = torch.ops.aten

# Not decomposed: a fused library kernel is faster, or the lowering of the operator is better than that of its parts.
_NOT_DECOMPOSED = (
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
    # the decompositions accept negative indices, or write out of bounds, for which eager raises
    "index_add.default",
    "index_copy.default",
    "max_unpool2d.default",
    "max_unpool3d.default",
    # their indices need no check, so their loops are vectorised
    "_unsafe_index.Tensor",
    "_unsafe_index_put.default",
)

# In addition to the core set: operators that are lowered through simpler ones.
_ADDED = (
    aten._native_batch_norm_legit,
    aten.native_batch_norm,
    aten.native_layer_norm_backward,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten._log_softmax,  # a backward can then recompute it from its input and two numbers per row
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

# numerics="eager": eager computes a pointwise operator in one kernel. It may round where the decomposition does not,
# and contract steps that the decomposition rounds. The decompositions of these operators are the same steps as the
# kernel.
_SAME_STEPS = (
    "__and__ __or__ __xor__ clip deg2rad float_power frac hardshrink heaviside isfinite isneginf isposinf ldexp max "
    "min nan_to_num rad2deg sgn true_divide"
)
# _foreach_X -> X on each tensor, so that the loop of a tensor fuses with its neighbours.
_SAME_NAME = (
    "abs acos add asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1 floor frac lerp lgamma log "
    "log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc"
)
_EACH: dict[str, Callable[..., object]] = {name: getattr(aten, name) for name in _SAME_NAME.split()} | {
    "addcdiv": lambda x, a, b, value=1: aten.addcdiv(x, a, b, value=value),
    "addcmul": lambda x, a, b, value=1: aten.addcmul(x, a, b, value=value),
    "max": aten.amax,
    "norm": aten.linalg_vector_norm,
    "zero": aten.zeros_like,
}
# operators that have another name if the second argument is a number
_EACH_NUMBER = {"maximum": aten.clamp_min, "minimum": aten.clamp_max}


def _per_tensor(op: torch._ops.OpOverload, single: Callable[..., object]) -> Callable[..., object]:
    def each(*args: object, **kwargs: object) -> object:
        if op._overloadname == "Tensor" and single in (_EACH["addcdiv"], _EACH["addcmul"]):
            return NotImplemented  # the factors of all tensors are elements of one tensor
        n = next(len(a) for a in args if isinstance(a, (list, tuple)))

        def at(k: int, a: object) -> object:
            return a[k] if isinstance(a, (list, tuple)) else a

        return [single(*(at(k, a) for a in args), **kwargs) for k in range(n)]

    return each


def _foreach() -> dict[torch._ops.OpOverload, Callable[..., object]]:
    decompositions: dict[torch._ops.OpOverload, Callable[..., object]] = {}
    for name, single in _EACH.items():
        packet = getattr(aten, f"_foreach_{name}", None)
        for which in packet.overloads() if packet is not None else ():
            if which.endswith("out"):
                continue
            op = getattr(packet, which)
            by_number = which in ("Scalar", "ScalarList")
            decompositions[op] = _per_tensor(op, _EACH_NUMBER.get(name, single) if by_number else single)
    return decompositions


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: object) -> object:
    """Decompose `index_fill` into one `index_put`, whose result has the strides of `x`.

    torch's own decomposition writes in place to a new tensor, which AOTAutograd refuses in a functional graph.
    """
    if x.dim() == 0:
        return aten.squeeze.dim(_index_fill(aten.unsqueeze(x, 0), 0, index, value), 0)
    if isinstance(value, torch.Tensor):
        value = value.to(device=x.device, dtype=x.dtype)
    else:
        value = aten.full([], value, dtype=x.dtype, device=x.device)
    return aten.index_put(x, [None] * (dim % x.dim()) + [aten.reshape(index, [-1])], value)


def _unique(x: torch.Tensor, sorted: bool = True, return_inverse: bool = False) -> object:
    """Decompose `_unique` into `_unique2`, for which all versions of torch trace an unbacked size."""
    return aten._unique2(x, sorted, return_inverse, False)[:2]


def _batch_norm_with_update(
    x: torch.Tensor, weight: object, bias: object, mean: torch.Tensor, var: torch.Tensor, momentum: float, eps: float
) -> object:
    """Decompose `_batch_norm_with_update_functional`; the running statistics keep their dtype.

    torch traces them as float32, but the library call returns their own dtype. Float32 statistics on a GPU stay with
    the library call, since cuDNN returns a buffer that its backward needs.
    """
    if x.device.type == "cuda" and mean.dtype == var.dtype == torch.float32:
        return NotImplemented
    out, saved_mean, saved_rstd, new_mean, new_var = aten._native_batch_norm_legit_functional(
        x, weight, bias, mean, var, True, momentum, eps
    )
    empty = aten.empty([0], dtype=torch.uint8, device=x.device)
    return out, saved_mean, saved_rstd, empty, new_mean.to(mean.dtype), new_var.to(var.dtype)


SCANNED_BY_ONE = 1 << 16  # most elements of a scan that a single program of a GPU computes


def _not_decomposed(mask: torch.Tensor, *others: torch.Tensor) -> bool:
    """Return whether the library call is faster at counting the elements under a mask, or a size is unbacked."""
    if any(has_free_unbacked_symbols(t) for t in (mask, *others)):
        return True
    return mask.device.type != "cpu" and (isinstance(mask.numel(), torch.SymInt) or mask.numel() > SCANNED_BY_ONE)


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> object:
    """Decompose `masked_scatter`: element k under the mask takes source[number of earlier elements under the mask]."""
    if _not_decomposed(mask, x, source) or mask.dtype != torch.bool:  # which the library refuses
        return NotImplemented
    sizes = unannotated(torch.broadcast_shapes)(x.shape, mask.shape)
    x, mask = aten.expand(x, sizes), aten.expand(mask, sizes)
    if source.numel() == 0 or x.numel() == 0:
        return aten.clone(x, memory_format=torch.contiguous_format)  # the source may be empty if the mask is
    position = aten.clamp_min(_before(mask), 0)
    # a gather, since eager raises RuntimeError, not IndexError, for a source with too few elements
    values = aten.reshape(aten.gather(aten.reshape(source, [-1]), 0, position), sizes)
    return aten.clone(aten.where(mask, values, x), memory_format=torch.contiguous_format)


def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> object:
    """Decompose the gradient of the source: the gradients under the mask in order, then zeros.

    The other gradients are written to one extra element, which is sliced off.
    """
    if _not_decomposed(mask, grad) or any(isinstance(n, torch.SymInt) for n in sizes):
        return NotImplemented
    mask = aten.expand(mask, grad.shape)
    count = math.prod(sizes)
    position = aten.where(aten.reshape(mask, [-1]), _before(mask), count)
    padded = aten.index_put(aten.new_zeros(grad, [count + 1]), [position], aten.reshape(grad, [-1]))
    return aten.reshape(aten.slice(padded, 0, 0, count), sizes)


def _before(mask: torch.Tensor) -> torch.Tensor:
    """Return for each element, in row-major order, the number of elements up to it that are under the mask, minus 1."""
    counted: torch.Tensor = aten.cumsum(aten.to(aten.reshape(mask, [-1]), torch.int64), 0)
    return counted - 1


def _nll_loss_backward(steps: Callable[..., object]) -> Callable[..., object]:
    """Return torch's decomposition with +0 in ignored rows, where torch's has -1 * 0 at one class."""

    def backward(
        grad: object, x: torch.Tensor, target: torch.Tensor, weight: object, how: int, ignore: object, n: object
    ) -> object:
        where = aten.reshape(target, []) if x.dim() == 1 else aten.unsqueeze(target, 1)
        return aten.where(aten.ne(where, ignore), steps(grad, x, target, weight, how, ignore, n), 0)

    return backward


def _smooth_l1_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, how: int, beta: float
) -> object:
    """Apply torch's decomposition, but return NaN for a NaN difference; torch's takes the sign, which is 0."""
    difference = aten.sub(x, target)
    steps = _SMOOTH_L1(grad, x, target, how, beta)
    return aten.where(aten.ne(difference, difference), difference, steps)


def _binary_cross_entropy(x: torch.Tensor, target: object, weight: object = None, reduction: int = 1) -> object:
    """Apply torch's decomposition behind the check that eager's kernel makes, and torch's decomposition drops."""
    in_range = aten.all(aten.logical_and(aten.ge(x, 0), aten.le(x, 1)))
    aten._assert_async.msg(in_range, "all elements of input should be between 0 and 1")
    return _BCE(x, target, weight, reduction)


def _eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **place: object) -> object:
    """Return the identity matrix [n, m] as a comparison of positions.

    torch's decomposition compares `arange` of the narrowest unsigned dtype, which eager has no kernel for at 16 bits.
    """
    rows, columns = (
        aten.arange.default(size, dtype=torch.int64, device=place.get("device")) for size in (n, n if m is None else m)
    )
    return aten.to.dtype(rows.unsqueeze(1) == columns, dtype or torch.get_default_dtype())


def _frac(x: torch.Tensor) -> object:
    """Return x - trunc(x): exact, and +0 for whole numbers, where torch 2.11 decomposes into signed zeros."""
    return aten.sub(x, aten.trunc(x))


def _group_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    batch: int,
    channels: int,
    size: int,
    groups: int,
    wanted: Sequence[bool],
) -> object:
    """Decompose the gradients of a group normalisation into sums of `grad` and of `grad` times the normalised input.

    With y = (x - mean) rstd and g = grad weight: dx = rstd (g - mean(g) - y mean(g y)), means over a group. No term is
    large where the mean of the input is; torch subtracts sum(grad) mean from sum(grad x).
    """
    if any(isinstance(n, int) and n == 0 for n in x.shape[:2]):  # torch's divides by the points of an image
        return _GROUP_NORM(grad, x, mean, rstd, weight, batch, channels, size, groups, wanted)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    split, statistic = [batch, groups, channels // groups, size], [batch, groups, 1, 1]
    share = channels // groups * size  # elements of a group
    g, centred = aten.reshape(grad.to(wide), split), aten.reshape(x.to(wide), split)
    centred, rstd = centred - aten.reshape(mean.to(wide), statistic), aten.reshape(rstd.to(wide), statistic)
    # of every channel of every image
    sums, products = aten.sum(g, [3], True), aten.sum(g * centred, [3], True) * rstd
    factor = 1 if weight is None else aten.reshape(weight.to(wide), [1, groups, channels // groups, 1])
    dx = None
    if wanted[0]:
        mean_g, mean_gy = (aten.sum(t * factor, [2], True) / share for t in (sums, products))
        dx = aten.reshape((g * factor - mean_g - centred * (mean_gy * rstd)) * rstd, x.shape).to(x.dtype)
    dtype = x.dtype if weight is None else weight.dtype
    dw, db = (
        aten.reshape(aten.sum(t, [0]), [channels]).to(dtype) if asked else None
        for t, asked in zip((products, sums), wanted[1:], strict=True)
    )
    return dx, dw, db


_BCE, _SMOOTH_L1, _GROUP_NORM, _NLL, _NLL_2D = (
    get_decompositions([op])[op.default]
    for op in (
        aten.binary_cross_entropy,
        aten.smooth_l1_loss_backward,
        aten.native_group_norm_backward,
        aten.nll_loss_backward,
        aten.nll_loss2d_backward,
    )
)

# Our own decompositions, which replace those of torch.
_OWN: dict[torch._ops.OpOverload, Callable[..., object]] = {
    aten.eye.default: _eye,
    aten.eye.m: _eye,
    aten.frac.default: _frac,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten._unique.default: _unique,
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten._batch_norm_with_update_functional.default: _batch_norm_with_update,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.nll_loss_backward.default: _nll_loss_backward(_NLL),
    aten.nll_loss2d_backward.default: _nll_loss_backward(_NLL_2D),
}
# Our own decompositions of pointwise operators, which numerics="eager" does not decompose.
_OWN_POINTWISE: dict[torch._ops.OpOverload, Callable[..., object]] = {
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
}


def table(numerics: str = "fast") -> dict[torch._ops.OpOverload, Callable[..., object]]:
    """Return the table overload -> decomposition for AOTAutograd. `numerics`: the option; "eager" decomposes less."""
    return _fixed_table(numerics) | decomp_qparams.decompositions()


@functools.cache
def _fixed_table(numerics: str) -> dict[torch._ops.OpOverload, Callable[..., object]]:
    decompositions: dict[torch._ops.OpOverload, Callable[..., object]] = aot_autograd.core_decompositions()
    added = [op for op in _ADDED if op.__name__ not in _ADDED_NOT]
    table_of = get_decompositions(added)
    decompositions.update({op: steps for op, steps in table_of.items() if isinstance(op, torch._ops.OpOverload)})
    decompositions.update(_foreach())
    decompositions.update(_OWN_POINTWISE)
    for name in _NOT_DECOMPOSED:
        packet, which = name.split(".")
        op = getattr(getattr(aten, packet, None), which, None)
        if op is not None:
            decompositions.pop(op, None)
    if numerics == "eager":
        decompositions = {op: steps for op, steps in decompositions.items() if not _one_kernel(op)}
    return decompositions | _OWN


def taken_apart(numerics: str) -> tuple[torch._ops.OpOverload, ...]:
    """Return operators that tracing decomposes by itself but must not; for `compat.aot_autograd.undecomposed`.

    Eager's vector loop of `softshrink` returns +0 where its decomposition returns a zero with the operand's sign.
    """
    return (aten.softshrink.default,) if numerics == "eager" else ()


def _one_kernel(op: object) -> bool:
    """Return whether eager has one kernel for an operator whose decomposition does not give the same bits."""
    name = operator_name(op)
    pointwise = is_tagged(op) and not name.startswith("_foreach")
    return name in ONE_KERNEL or (pointwise and name not in _SAME_STEPS.split())
