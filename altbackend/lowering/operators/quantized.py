"""Quantisation and dequantisation, with eager's bits: every step rounds as eager's kernel of that step does.

    quantize    clamp(round(x * (1 / scale)) + zero_point), or clamp(round(x * (1 / scale) + zero_point))
    dequantize  (q - zero_point) * scale

The operators are those of `quantized_decomposed`, which `torch.ao.quantization.fx._decomposed` or torchao define, and
those of `torchao` that tracing does not decompose. Their checks of dtypes, ranges and sizes raise errors; a call that a
check could refuse is left to the library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import FLOAT8, LOW_PRECISION, compute_dtype
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import FallBack, lowers
from ..tensor import Operand, Tensor, expand, points

Scalar = Tensor | Value | float  # a number, or a tensor of one element that eager reads with `item`
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Term:
    """The scalar of an eager tensor: a value that `dtype` holds exactly, in the compute dtype of `dtype`."""

    value: Value
    dtype: torch.dtype


def _term(x: Tensor, sizes: Sequence[Index]) -> Term:
    """Return the scalar of a tensor that is broadcast to `sizes`. Raises FallBack if it cannot be."""
    lead = len(sizes) - len(x.sizes)
    if lead < 0 or any(n not in (1, m) for n, m in zip(x.sizes, sizes[lead:], strict=True)):
        raise FallBack("scales of other sizes than the operand")
    return Term(expand(x.rounded(), sizes).computed(), x.dtype)


def _number(number: float, dtype: torch.dtype) -> Term:
    return Term(va.const(number, compute_dtype(dtype)), dtype)


def _held(value: Value, dtype: torch.dtype) -> Term:
    """Return a computed value as a tensor of `dtype` holds it."""
    value = va.cast(value, compute_dtype(dtype))
    return Term(s.round_to(value, dtype) if dtype in LOW_PRECISION else value, dtype)


def _apply(op: str, a: Term, b: Term) -> Term:
    """Return the result of an operator on two tensors, promoted and rounded as eager does."""
    if FLOAT8 & {a.dtype, b.dtype}:
        raise FallBack("eager has no arithmetic of 8-bit floats")
    dtype = torch.promote_types(a.dtype, b.dtype)
    x, y = (t.value if t.dtype == dtype else _held(t.value, dtype).value for t in (a, b))
    return _held(va.apply(op, x, y), dtype)


def _inverse(x: Term) -> Term:
    """Return 1 / x, as torch computes it for a tensor: in the dtype of `x`, or float32 for integers."""
    dtype = x.dtype if x.dtype.is_floating_point else torch.float32
    return _held(s.div(1.0, va.cast(x.value, compute_dtype(dtype))), dtype)


def _clamped(x: Term, low: Value, high: Value) -> Value:
    """Return x between two bounds; NaN stays NaN."""
    v = x.value
    v = s.where(s.binary("lt", v, low), low, v)
    return s.where(s.binary("gt", v, high), high, v)


def _between(x: Term, low: int, high: int, dtype: torch.dtype) -> Value:
    """Return `x` rounded to `dtype` between two whole numbers, which eager first rounds to the dtype of `x`."""
    ends = (_held(va.const(end, compute_dtype(x.dtype)), x.dtype).value for end in (low, high))
    return va.cast(va.cast(_clamped(x, *ends), x.dtype), dtype)


def _check_range(low: object, high: object, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bounds of quantised values. Raises FallBack unless they are numbers that eager accepts."""
    if dtype in FLOAT8:
        least, most = int(torch.finfo(dtype).min), int(torch.finfo(dtype).max)
    elif dtype in _INTEGERS:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    else:
        raise FallBack(f"quantised values of {dtype}")
    if not isinstance(low, int) or not isinstance(high, int):
        raise FallBack("bounds that data decides, which eager checks")
    if low < least or high > most:
        raise FallBack(f"bounds outside {dtype}")
    return low, high


def _item(x: Scalar) -> Value:
    """Return what Python's number holds after `item`: a float64 or an int64."""
    if isinstance(x, Value):
        return x
    if isinstance(x, Tensor):
        if any(n != 1 for n in x.sizes):
            raise FallBack("a scale or zero point of more than one element")
        wide = torch.float64 if x.dtype.is_floating_point else torch.int64
        return va.cast(x.rounded().at([0] * len(x.sizes)), wide)
    if not isinstance(x, (int, float)):
        raise FallBack("a scale or zero point that is a symbolic number")
    return va.const(x, torch.float64 if isinstance(x, float) else torch.int64)


def _inverse_item(ctx: Ctx, scale: Scalar) -> Value:
    """Return float32(1 / scale), where Python divides in float64 and raises ZeroDivisionError for zero.

    For a float32 scale, one division in float32 gives the same bits: 53 bits are more than twice 24.
    """
    v = _item(scale)
    if v.op == "const":
        if v.attr == 0:
            raise FallBack("a scale of zero")
        return va.const(1.0 / v.attr, torch.float32)
    narrow = isinstance(scale, Tensor) and scale.dtype in (torch.float32, *LOW_PRECISION)
    v = va.cast(v.args[0], torch.float32) if narrow and v.op == "cast" else va.cast(v, torch.float64)
    if not ctx.gpu:
        v = va.make("nonzero", (v,), v.dtype)
    return va.cast(s.div(1.0, v), torch.float32)


def _as_float32(x: Tensor) -> Term:
    if x.dtype not in (torch.float32, *LOW_PRECISION):
        raise FallBack(f"an operand of {x.dtype}")
    return Term(va.cast(x.rounded().value, torch.float32), torch.float32)


def _result(ctx: Ctx, value: Value) -> Tensor:
    return Tensor(ctx.result_sizes, ctx.result.dtype, value)


# --- one scale for a tensor ------------------------------------------------------------------------------------------

_D = "quantized_decomposed::"


@lowers(*(f"{_D}quantize_per_tensor.{o}" for o in ("default", "tensor", "tensor2")))
def quantize_per_tensor(
    ctx: Ctx, x: Tensor, scale: Scalar, zero: Scalar, low: object, high: object, dtype: torch.dtype
) -> Tensor:
    low, high = _check_range(_constant(low), _constant(high), dtype)
    scaled = s.unary("round", s.mul(_as_float32(x).value, _inverse_item(ctx, scale)))
    moved = s.add(scaled, va.cast(_item(zero), torch.float32))
    return _result(ctx, _between(Term(moved, torch.float32), low, high, dtype))


def _constant(x: object) -> object:
    """Return the number of a constant tensor; others unchanged."""
    return x.value.attr if isinstance(x, Tensor) and x.value.op == "const" else x


@lowers(*(f"{_D}dequantize_per_tensor.{o}" for o in ("default", "tensor", "tensor2")))
def dequantize_per_tensor(
    ctx: Ctx,
    q: Tensor,
    scale: Scalar,
    zero: Scalar,
    low: object,
    high: object,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out = out_dtype or torch.float32
    if q.dtype != dtype or dtype not in (*_INTEGERS, *FLOAT8) or not out.is_floating_point or out in FLOAT8:
        raise FallBack(f"quantised values of {q.dtype} as {dtype}")
    wide = compute_dtype(out)
    zero_value = va.cast(_item(zero), wide)
    if not ctx.gpu:  # eager's kernels on a CPU round the subtracted number, but not a factor
        zero_value = _held(zero_value, out).value
    moved = _held(s.sub(_held(q.computed(wide), out).value, zero_value), out)
    return _result(ctx, _held(s.mul(moved.value, va.cast(_item(scale), wide)), out).value)


# --- a scale for each channel, row or group --------------------------------------------------------------------------


def _along(x: Tensor, axis: int, rank: int) -> Tensor:
    """Return a vector as a tensor of `rank` dimensions that lies along `axis`. Raises FallBack for other tensors."""
    if len(x.sizes) != 1 or not 0 <= axis < rank:
        raise FallBack("scales that are no vector along a dimension")
    sizes = tuple(x.sizes[0] if k == axis else 1 for k in range(rank))
    return Tensor(sizes, x.dtype, x.at([points(sizes)[axis]]))


@lowers(f"{_D}quantize_per_channel.default")
def quantize_per_channel(
    ctx: Ctx, x: Tensor, scales: Tensor, zeros: Tensor, axis: int, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    low, high = _check_range(low, high, dtype)
    scale, zero = (_term(_along(t, axis, len(x.sizes)), x.sizes) for t in (scales, zeros))
    scaled = _apply("mul", _as_float32(x), _inverse(scale))
    whole = Term(s.unary("round", scaled.value), scaled.dtype)
    return _result(ctx, _between(_apply("add", whole, zero), low, high, dtype))


@lowers(f"{_D}dequantize_per_channel.default")
def dequantize_per_channel(
    ctx: Ctx,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    axis: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    _check_range(low, high, dtype)
    if q.dtype != dtype:
        raise FallBack(f"quantised values of {q.dtype} as {dtype}")
    scale, zero = (None if t is None else _along(t, axis, len(q.sizes)) for t in (scales, zeros))
    assert scale is not None
    return _dequantized(ctx, q, scale, zero, out_dtype or torch.float32)


def _dequantized(ctx: Ctx, q: Tensor, scale: Tensor, zero: Tensor | None, out: torch.dtype) -> Tensor:
    """Return (q - zero) * scale with the promotions of tensors, rounded to `out`."""
    moved = _term(q, q.sizes)
    if zero is not None:
        moved = _apply("sub", moved, _term(zero, q.sizes))
    wide = _apply("mul", moved, _term(scale, q.sizes))
    return _result(ctx, _held(va.cast(wide.value, wide.dtype), out).value)


@lowers(f"{_D}quantize_per_token.default")
def quantize_per_token(
    ctx: Ctx, x: Tensor, scales: Tensor, zeros: Tensor, low: int, high: int, dtype: torch.dtype
) -> Tensor:
    low, high = _check_range(low, high, dtype)
    _check_tokens(x, scales, zeros)
    scaled = _apply("mul", _term(x, x.sizes), _inverse(_term(scales, x.sizes)))
    if ctx.gpu:  # a bound between product and sum keeps a GPU from rounding the two at once
        most = va.const(_LARGEST, scaled.value.dtype)
        scaled = _held(s.where(s.binary("gt", scaled.value, most), most, scaled.value), scaled.dtype)
    moved = _apply("add", scaled, _term(zeros, x.sizes))
    whole = Term(s.unary("round", moved.value), moved.dtype)
    return _result(ctx, _between(whole, low, high, dtype))


@lowers(f"{_D}dequantize_per_token.default")
def dequantize_per_token(
    ctx: Ctx,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor,
    low: int,
    high: int,
    dtype: torch.dtype,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    _check_range(low, high, dtype)
    return _dequantized(ctx, q, scales, zeros, output_dtype)


def _check_tokens(x: Tensor, *others: Tensor) -> None:
    """Raise FallBack unless every tensor has one element for each row of `x`, which eager checks."""
    if any(ex.prod(t.sizes) != ex.prod(x.sizes[:-1]) for t in others):
        raise FallBack("scales of another number than rows")


@lowers(f"{_D}quantize_per_channel_group.default")
def quantize_per_channel_group(ctx: Ctx, *args: Operand) -> Tensor:
    raise FallBack("eager checks the operand for NaN")


@lowers(f"{_D}dequantize_per_channel_group.default")
def dequantize_per_channel_group(
    ctx: Ctx,
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    low: int,
    high: int,
    dtype: torch.dtype,
    group: int = 128,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    if len(q.sizes) != 2 or group <= 1 or not all(isinstance(n, int) for n in q.sizes):
        raise FallBack("groups of a tensor that is no static matrix")
    columns = q.sizes[1]
    assert isinstance(columns, int)
    if group > columns and scales.sizes[-1] == 1:
        group = columns
    if columns % group:
        raise FallBack("columns that are no whole groups")
    scale, zero = (None if t is None else _grouped(t, q.sizes, group) for t in (scales, zeros))
    assert scale is not None
    return _dequantized(ctx, q, scale, zero, output_dtype)


def _grouped(x: Tensor, sizes: Sequence[Index], group: int) -> Tensor:
    """Return a tensor with one element for each group of columns as one of `sizes`."""
    per_row = ex.floordiv(sizes[1], group)
    if x.sizes != (sizes[0], per_row):
        raise FallBack("scales that are no matrix of groups")
    row, column = points(sizes)
    return Tensor(tuple(sizes), x.dtype, x.at([row, ex.floordiv(column, group)]))


# --- 8-bit floats of torchao -----------------------------------------------------------------------------------------


@lowers("torchao::quantize_affine_float8_non_decomposed.default")
def quantize_float8(ctx: Ctx, x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    if dtype not in FLOAT8:
        raise FallBack(f"quantised values of {dtype}")
    wide = Term(va.cast(x.rounded().value, torch.float32), torch.float32)
    scaled = _apply("truediv", wide, _blocks(scale, x.sizes))
    most = float(torch.finfo(dtype).max)
    ends = (va.const(end, scaled.value.dtype) for end in (-most, most))
    return _result(ctx, va.cast(_clamped(scaled, *ends), dtype))


@lowers("torchao::dequantize_affine_float8_non_decomposed.default")
def dequantize_float8(ctx: Ctx, q: Tensor, scale: Tensor, output_dtype: torch.dtype = torch.float32) -> Tensor:
    wide = _apply("mul", Term(q.computed(torch.float32), torch.float32), _blocks(scale, q.sizes))
    return _result(ctx, _held(va.cast(wide.value, wide.dtype), output_dtype).value)


def _blocks(scale: Tensor, sizes: Sequence[Index]) -> Term:
    """Return the scalar of the scale of each block: of a tensor, rows, or blocks that divide the sizes."""
    if all(n == 1 for n in scale.sizes) and len(scale.sizes) <= len(sizes):
        return _term(scale, sizes)
    if len(scale.sizes) != len(sizes) or scale.dtype != torch.float32:
        raise FallBack("scales of blocks in another form")
    at: list[Index] = []
    for n, whole, i in zip(scale.sizes, sizes, points(sizes), strict=True):
        block = whole if n == 1 else 1 if n == whole else ex.exact_div(whole, n)
        if block is None or not isinstance(block, int):
            raise FallBack("scales of blocks that do not divide the sizes")
        at.append(0 if n == 1 else ex.floordiv(i, block))
    return Term(va.cast(scale.at(at), torch.float32), torch.float32)
