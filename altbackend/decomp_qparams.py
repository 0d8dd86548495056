"""Decompositions of `quantized_decomposed.choose_qparams*`: a scale and a zero point from the range of a tensor.

Tracing an operator relies on the dtypes that it declares, and some of these declare float64 where they return float32.
A decomposition has the dtypes that eager returns. Each step is rounded to the operand's dtype, as eager rounds it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .aten.name import operator_of

aten = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., object]]:
    """Return the decompositions of those operators that this process has defined so far."""
    operators = ((operator_of(f"quantized_decomposed::{name}"), steps) for name, steps in _STEPS.items())
    return {op: steps for op, steps in operators if op is not None}


def _round(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 values as a tensor of `dtype` holds them."""
    return x if dtype == torch.float32 else x.to(dtype).to(torch.float32)


def _range(low: torch.Tensor, high: torch.Tensor) -> Pair:
    """Return the ends of the range from `low` to `high`, widened to contain zero, in float32."""
    low, high = low.to(torch.float32), high.to(torch.float32)
    return aten.minimum(low, torch.zeros_like(low)), aten.maximum(high, torch.zeros_like(high))


def _of_tensor(symmetric: bool) -> Callable[..., object]:
    def steps(x: torch.Tensor, qmin: int, qmax: int, eps: float, dtype: torch.dtype) -> object:
        """Return scale (float64) and zero point (int64) of a tensor, both of shape (1,)."""
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or not qmin <= 0 <= qmax or qmin >= qmax:
            return NotImplemented  # eager raises
        if not statically_known_true(x.numel() > 0):
            return NotImplemented  # eager refuses a tensor without elements
        low, high = _range(aten.amin(x), aten.amax(x))
        least = torch.full([1], eps, dtype=torch.float32, device=x.device)
        if symmetric:
            scale = aten.div(aten.maximum(aten.neg(low), high), float(qmax - qmin) / 2)
            scale = aten.maximum(_round(scale, x.dtype), least)
            middle = 128 if dtype == torch.uint8 else 0
            return scale.to(torch.float64), torch.full_like(scale, middle, dtype=torch.int64)
        scale = aten.div(_round(aten.sub(high, low), x.dtype), float(qmax - qmin))
        scale = aten.maximum(_round(scale, x.dtype), least)
        moved = aten.rsub(aten.round(aten.div(low, scale)).to(torch.int32), qmin)
        return scale.to(torch.float64), aten.clamp(moved, qmin, qmax).to(torch.int64)

    return steps


def _per_token(x: torch.Tensor, dtype: torch.dtype) -> object:
    """Return scales and zero points (all 0) of rows, (..., 1): float32 for float16, else of the dtype of `x`."""
    if dtype != torch.int8 or not x.is_floating_point():
        return NotImplemented
    own = torch.float32 if x.dtype == torch.float16 else x.dtype
    wide = torch.float64 if own == torch.float64 else torch.float32
    least = 21 * 2**-21 if own == torch.bfloat16 else 1e-5  # 1e-5 as bfloat16 holds it
    largest = aten.amax(aten.abs(x), [-1], True).to(wide)
    scales = aten.div(aten.clamp_min(largest, least), 127).to(own)
    return scales, torch.zeros_like(scales)


def _per_token_asymmetric(x: torch.Tensor, dtype: torch.dtype) -> object:
    """Return scales (float64) and zero points (int64) of rows, (..., 1), for values from -128 to 127."""
    own = x.dtype
    if own not in (torch.float32, torch.bfloat16):
        return NotImplemented
    low, high = _range(aten.amin(x, [-1], True), aten.amax(x, [-1], True))
    scale = _round(aten.div(_round(aten.sub(high, low), own), 255.0), own)
    scale = aten.clamp_min(scale, torch.finfo(torch.float32).eps)
    at_low, at_high = (_round(aten.div(end, scale), own) for end in (low, high))
    error = _round(aten.add(_round(aten.add(at_low, -128), own), _round(aten.add(at_high, 127), own)), own)
    zero = aten.where(aten.gt(error, 0), _round(aten.rsub(at_low, -128), own), _round(aten.rsub(at_high, 127), own))
    return scale.to(torch.float64), aten.round(aten.clamp(zero, -128, 127)).to(torch.int64)


_STEPS: dict[str, Callable[..., object]] = {
    "choose_qparams.tensor": _of_tensor(symmetric=False),
    "choose_qparams_symmetric.tensor": _of_tensor(symmetric=True),
    "choose_qparams_per_token.default": _per_token,
    "choose_qparams_per_token_asymmetric.default": _per_token_asymmetric,
}
