"""Pointwise operators: a table of those that are one scalar operator, and equations for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.ops import BOOL, LOW_PRECISION, OPS, compute_dtype
from ...ir.value import Value
from .. import exact
from .. import scalar as s
from ..context import Ctx
from ..registry import LOWERINGS, FallBack, lowers
from ..tensor import Operand, Size, Tensor, as_view, expand, same_strides

# ATen operator -> row of `ir.ops`, for all overloads that exist.
_DIRECT: dict[str, str] = {
    n: n
    for n in [
        "abs",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "ceil",
        "copysign",
        "cos",
        "cosh",
        "digamma",
        "eq",
        "erf",
        "erfc",
        "erfinv",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "fmax",
        "fmin",
        "fmod",
        "gcd",
        "ge",
        "gt",
        "hypot",
        "isinf",
        "isnan",
        "le",
        "lgamma",
        "log",
        "log10",
        "log1p",
        "log2",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "reciprocal",
        "relu",
        "remainder",
        "rsqrt",
        "sigmoid",
        "sign",
        "signbit",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
        "trunc",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_not",
        "i0",
        "logaddexp",
        "round",
    ]
} | {
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    "special_i0e": "i0e",
    "special_i1": "i1",
    "special_i1e": "i1e",
    "__lshift__": "left_shift",
    "__rshift__": "right_shift",
}
_INT_IDENTITY = frozenset({"ceil", "floor", "round", "trunc"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
# Operators with jumps. Their 16-bit operands are rounded as in memory: otherwise the elements that equal a stored
# maximum, for example, would be none, and the gradient of `amax` would divide by their number.
_WITH_JUMPS = _COMPARISONS | {"ceil", "floor", "trunc", "round", "fmod", "remainder", "isinf"}


def elementwise(
    ctx: Ctx,
    fn: Callable[..., Value],
    *args: Operand,
    common: torch.dtype | None = None,
    condition: Value | None = None,
) -> Tensor:
    """Apply `fn` to the scalars of broadcast arguments, in the compute dtype of `common` (default: the result's dtype).

    The result has the shape and dtype of the traced node. `condition`: another operand, which `fn` captures.
    Under numerics="eager", raises FallBack if only eager's own kernel gives eager's bits.
    """
    out = ctx.result
    sizes, common = ctx.shape(out.shape), common or out.dtype
    scalars = [scalar_arg(ctx, a, sizes, compute_dtype(common)) for a in args]
    if exact.is_eager(ctx) and common in LOW_PRECISION:
        scalars = [exact.operand(ctx, a, k, v, common) for k, (a, v) in enumerate(zip(args, scalars, strict=True))]
    value = fn(*scalars)
    if exact.is_eager(ctx):
        exact.check(ctx, value, {*scalars, condition}, common)
    return finish(ctx, sizes, out.dtype, value)


def finish(ctx: Ctx, sizes: tuple[Index, ...], dtype: torch.dtype, value: Value) -> Tensor:
    """Return a tensor of a computed scalar; under numerics="eager" a 16-bit result is rounded after every operator."""
    if value.dtype != compute_dtype(dtype):
        value = va.cast(value, compute_dtype(dtype) if value.dtype != dtype else dtype)
    if dtype in LOW_PRECISION and ctx.cfg.numerics == "eager" and value.dtype != dtype:
        value = s.round_to(value, dtype)
    return Tensor(sizes, dtype, value)


def scalar_arg(ctx: Ctx, a: Operand, sizes: tuple[Index, ...], dtype: torch.dtype) -> Value:
    """Return an argument, a tensor or a number, as a scalar of `dtype` at the points of `sizes`."""
    if isinstance(a, Tensor):
        return expand(a, sizes).computed(dtype)
    if isinstance(a, (torch.SymInt, ex.Expr)):
        return va.cast(va.index(ctx.index(a)), dtype)
    return va.cast(a, dtype) if isinstance(a, Value) else va.const(a, dtype)


def promoted(args: tuple[object, ...], node: torch.fx.Node) -> torch.dtype:
    """Return the dtype to which torch promotes the arguments of a comparison, from the traced values."""
    fakes: list[Any] = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args if a is not None]
    return torch.result_type(fakes[0], fakes[1 if len(fakes) > 1 else 0])


def _direct(name: str, op: str) -> Callable[..., Tensor]:
    arity, result = OPS[op].arity, OPS[op].result

    def lower(ctx: Ctx, *args: Operand, **kwargs: object) -> Tensor:
        node = ctx.node
        common = promoted(args, node) if result == BOOL else None
        if op in _WITH_JUMPS and not _compares_with_zero(op, args):
            args = _rounded(*args)
        if op == "nextafter" and node.meta["val"].dtype in LOW_PRECISION:
            raise FallBack("kernels compute in float32, whose next number is not that of a 16-bit dtype")
        if op in ("logical_and", "logical_or", "logical_not"):
            return elementwise(ctx, lambda *v: va.apply(op, *(_truth(x) for x in v)), *args[:arity], common=common)
        if op in _INT_IDENTITY and not node.meta["val"].dtype.is_floating_point:
            assert isinstance(args[0], Tensor)
            return args[0]
        if op in ("isinf", "isnan") and common is not None and not common.is_floating_point:
            return elementwise(ctx, lambda x: va.const(False, torch.bool), *args[:1], common=common)
        if op in ("fmod", "remainder"):
            return elementwise(ctx, lambda x, y: va.apply(op, x, _divisor(ctx, y)), *args[:arity], common=common)
        return elementwise(ctx, lambda *v: va.apply(op, *v), *args[:arity], common=common)

    lower.__name__ = name
    return lower


def _rounded(*args: Operand) -> tuple[Operand, ...]:
    """Return the operands as memory holds them."""
    return tuple(a.rounded() if isinstance(a, Tensor) else a for a in args)


def _compares_with_zero(op: str, args: tuple[Operand, ...]) -> bool:
    """Return whether the operator asks for a sign, which rounding does not change."""
    return op in _COMPARISONS and any(isinstance(a, (int, float)) and a == 0 for a in args)


def _truth(x: Value) -> Value:
    return x if x.dtype == torch.bool else s.binary("ne", x, 0)


def register_direct() -> None:
    variants = ("default", "Tensor", "Scalar", "Scalar_Tensor", "Tensor_Scalar", "Tensor_Tensor")
    for name, op in _DIRECT.items():
        packet = getattr(torch.ops.aten, name, None)
        for v in variants:
            if packet is not None and v in packet.overloads():
                LOWERINGS[getattr(packet, v)] = _direct(name, op)


register_direct()


def _scaled(x: Value, factor: s.Num | Value) -> Value:
    """Return x times a number, which the host program may compute, in the dtype of `x`."""
    if isinstance(factor, Value):
        return s.mul(x, va.cast(factor, x.dtype))
    return x if factor == 1 else s.mul(x, factor)


@lowers("add.Tensor", "add.Scalar")
def add(ctx: Ctx, a: Operand, b: Operand, alpha: s.Num = 1) -> Tensor:
    return elementwise(ctx, lambda x, y: s.add(x, _scaled(y, alpha)), a, b)


@lowers("sub.Tensor", "sub.Scalar")
def sub(ctx: Ctx, a: Operand, b: Operand, alpha: s.Num = 1) -> Tensor:
    # A backward computes exp(x - logsumexp(x)). If the logsumexp was rounded to 16 bits in memory, x is rounded too:
    # with more bits, the largest x would not be near it, nor exp of their difference near 1.
    if _is_stored_per_row(ctx, a) or _is_stored_per_row(ctx, b):
        a, b = _rounded(a, b)
    return elementwise(ctx, lambda x, y: s.sub(x, _scaled(y, alpha)), a, b)


def _is_stored_per_row(ctx: Ctx, x: Operand) -> bool:
    """Return whether a 16-bit tensor is read from memory and repeated along dimensions of the result."""
    if not isinstance(x, Tensor) or x.dtype not in LOW_PRECISION or x.value.op != "load":
        return False
    return x.sizes != ctx.shape(ctx.result.shape)


@lowers("rsub.Tensor", "rsub.Scalar")
def rsub(ctx: Ctx, a: Operand, b: Operand, alpha: s.Num = 1) -> Tensor:
    return elementwise(ctx, lambda x, y: s.sub(y, _scaled(x, alpha)), a, b)


@lowers("div.Tensor", "div.Scalar", "true_divide.Tensor")
def div(ctx: Ctx, a: Operand, b: Operand) -> Tensor:
    return elementwise(ctx, s.div, a, b)


@lowers("div.Tensor_mode", "div.Scalar_mode")
def div_mode(ctx: Ctx, a: Operand, b: Operand, rounding_mode: str | None = None) -> Tensor:
    op = {None: "truediv", "floor": "floor_divide", "trunc": "trunc_divide"}[rounding_mode]
    operands = (a, b) if rounding_mode is None else _rounded(a, b)
    return elementwise(ctx, lambda x, y: va.apply(op, x, _divisor(ctx, y)), *operands)


@lowers("floor_divide.default", "floor_divide.Scalar")
def floor_divide(ctx: Ctx, a: Operand, b: Operand) -> Tensor:
    return elementwise(ctx, lambda x, y: va.apply("floor_divide", x, _divisor(ctx, y)), *_rounded(a, b))


def _divisor(ctx: Ctx, x: Value) -> Value:
    """Return a divisor; an integer that may be zero is checked on a CPU, where eager raises. A GPU divides by it."""
    if ctx.gpu or x.dtype.is_floating_point or (x.op == "const" and x.attr):
        return x
    if x.op == "index" and (ex.bounds(x.attr)[0] > 0 or ex.bounds(x.attr)[1] < 0):
        return x
    return va.make("nonzero", (x,), x.dtype)


@lowers("pow.Tensor_Tensor", "pow.Scalar")
def pow_tensor(ctx: Ctx, a: Operand, b: Operand) -> Tensor:
    return elementwise(ctx, lambda x, y: va.apply("pow", x, y), a, b)


@lowers("pow.Tensor_Scalar")
def pow_scalar(ctx: Ctx, a: Tensor, b: Operand) -> Tensor:
    if isinstance(b, (ex.Expr, Value)):  # an exponent that depends on a size
        if not ctx.result.is_floating_point():
            raise FallBack("an integer to the power of a size")
        return pow_tensor(ctx, a, b)
    if not ctx.gpu and a.dtype == torch.float16 and b in (0.5, -0.5):
        return pow_tensor(
            ctx, a, b
        )  # for float16, unlike other dtypes, eager takes no root here, which differs from pow at -0 and -infinity
    assert not isinstance(b, Tensor)
    if b < 0 and not (a.dtype.is_floating_point or ctx.result.is_floating_point()):
        raise FallBack("an integer to a negative power, which the library refuses")
    exponent = b
    most = 0 if ctx.cfg.numerics == "eager" else MOST_FACTORS
    return elementwise(ctx, lambda x: power(x, exponent, most), a)


MOST_FACTORS = 8  # of a power that is computed as a product: three roundings, where `pow` takes some 100 instructions


def power(x: Value, p: Value | Index | float, most_factors: int = 0) -> Value:
    """Return x**p for a constant p, as a product or root for those p for which eager takes them too.

    `most_factors`: a product also for other whole p up to this many factors.
    """
    if p == 1:
        return x
    if p == 2:
        return s.mul(x, x)
    if p == 3:
        return s.mul(s.mul(x, x), x)
    if x.dtype.is_floating_point:
        if p == 0.5:
            return s.unary("sqrt", x)
        if p == -0.5:
            return s.unary("rsqrt", x)
        if p == -1:
            return s.unary("reciprocal", x)
        if p == -2:
            return s.unary("reciprocal", s.mul(x, x))
        if isinstance(p, (int, float)) and 0 < abs(p) <= most_factors and p == int(p):
            product = _product(x, abs(int(p)))
            return product if p > 0 else s.unary("reciprocal", product)
    return s.binary("pow", x, p)


def _product(x: Value, n: int) -> Value:
    """Return x**n by squaring."""
    if n == 1:
        return x
    half = _product(x, n // 2)
    square = s.mul(half, half)
    return square if n % 2 == 0 else s.mul(square, x)


@lowers("where.self")
def where(ctx: Ctx, cond: Tensor, a: Operand, b: Operand) -> Tensor:
    c = _truth(expand(cond, ctx.result_sizes).computed())
    return elementwise(ctx, lambda x, y: va.where(c, x, y), a, b, condition=c)


@lowers("logical_xor.default")
def logical_xor(ctx: Ctx, a: Tensor, b: Tensor) -> Tensor:
    sizes = ctx.result_sizes
    x, y = (_truth(expand(t, sizes).computed()) for t in (a, b))
    return Tensor(sizes, torch.bool, va.apply("ne", x, y))


@lowers("clamp.default", "clamp.Tensor")
def clamp(ctx: Ctx, x: Operand, lo: Operand | None = None, hi: Operand | None = None) -> Tensor:
    def body(v: Value, *ends: Value) -> Value:
        it = iter(ends)
        if lo is not None:
            v = at_least(ctx, v, next(it))
        return v if hi is None else at_most(ctx, v, next(it))

    return elementwise(ctx, body, x, *(e for e in (lo, hi) if e is not None))


def at_least(ctx: Ctx, v: Value, low: Value) -> Value:
    """Return max(v, low), NaN if `v` is NaN."""
    # for a number as bound, eager on a CPU keeps the sign of a zero at a bound of zero; for a tensor it is unspecified
    if (exact.is_eager(ctx) or not ctx.gpu) and low.op == "const" and low.attr == low.attr:
        return s.where(s.binary("lt", v, low), low, v)
    return va.apply("maximum", v, low)


def at_most(ctx: Ctx, v: Value, high: Value) -> Value:
    """Return min(v, high), NaN if `v` is NaN."""
    if (exact.is_eager(ctx) or not ctx.gpu) and high.op == "const" and high.attr == high.attr:
        return s.where(s.binary("gt", v, high), high, v)
    return va.apply("minimum", v, high)


@lowers("clamp_min.default", "clamp_min.Tensor")
def clamp_min(ctx: Ctx, x: Operand, lo: Operand) -> Tensor:
    return elementwise(ctx, lambda v, e: at_least(ctx, v, e), x, lo)


@lowers("clamp_max.default", "clamp_max.Tensor")
def clamp_max(ctx: Ctx, x: Operand, hi: Operand) -> Tensor:
    return elementwise(ctx, lambda v, e: at_most(ctx, v, e), x, hi)


@lowers("square.default")
def square(ctx: Ctx, x: Operand) -> Tensor:
    return elementwise(ctx, s.square, x)


@lowers("native_dropout_backward.default")
def native_dropout_backward(ctx: Ctx, g: Operand, mask: Operand, scale: float) -> Tensor:
    return elementwise(ctx, lambda a, m: s.mul(s.mul(a, m), scale), g, mask)


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(ctx: Ctx, x: Operand, mask: Tensor, number: Operand) -> Tensor:
    out = ctx.result
    m = expand(mask, ctx.shape(out.shape)).computed()
    return elementwise(ctx, lambda v, n: va.where(m, n, v), x, number, condition=m)


@lowers("addcmul.default")
def addcmul(ctx: Ctx, x: Operand, a: Operand, b: Operand, value: s.Num = 1) -> Tensor:
    def body(v: Value, p: Value, q: Value) -> Value:
        return s.add(v, s.mul(_scaled(p, value), q))

    return elementwise(ctx, body, x, a, b)


@lowers("addcdiv.default")
def addcdiv(ctx: Ctx, x: Operand, a: Operand, b: Operand, value: s.Num = 1) -> Tensor:
    def body(v: Value, p: Value, q: Value) -> Value:
        return s.add(v, s.div(_scaled(p, value), q))

    return elementwise(ctx, body, x, a, b)


@lowers("prims::fma.default")
def fma(ctx: Ctx, a: Operand, b: Operand, c: Operand) -> Tensor:
    """Return a * b + c, as Dynamo captures `addcmul_`, `addcdiv_` and `add_` with an alpha."""
    return elementwise(ctx, lambda p, q, v: s.add(s.mul(p, q), v), a, b, c)


@lowers("lerp.Scalar", "lerp.Tensor")
def lerp(ctx: Ctx, a: Operand, b: Operand, w: Operand) -> Tensor:
    def body(x: Value, y: Value, t: Value) -> Value:
        # interpolate from the end that is nearer to t, as eager does for accuracy
        d = s.sub(y, x)
        near = s.binary("lt", s.unary("abs", t), 0.5)
        return s.where(near, s.add(x, s.mul(t, d)), s.sub(y, s.mul(d, s.sub(1.0, t))))

    return elementwise(ctx, body, a, b, w)


@lowers("_to_copy.default", "prims::convert_element_type.default")
def to_copy(ctx: Ctx, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    out = ctx.result
    # A cast is a barrier: a value that a 16-bit chain holds in float32 is rounded first.
    value = va.cast(x.value, x.dtype)
    if out.dtype == x.dtype:
        return Tensor(x.sizes, x.dtype, x.value)
    return Tensor(x.sizes, out.dtype, va.cast(value, out.dtype))


@lowers(
    "clone.default",
    "lift_fresh_copy.default",
    "positive.default",
    "detach.default",
    "alias.default",
    "lift_fresh.default",
)
def clone(ctx: Ctx, x: Tensor, **kwargs: object) -> Tensor:
    if kwargs.get("memory_format") not in (torch.channels_last, torch.channels_last_3d):
        return x
    stored = as_view(x)
    if stored is not None and same_strides(stored.strides, ctx.shape(ctx.result.stride()), x.sizes):
        return x
    return ctx.realize(x, ctx.result, fresh=True)  # the readers of a copy in another layout read the one copy


@lowers("full.default", "full_like.default", "scalar_tensor.default", "zeros_like.default", "ones_like.default")
def full(ctx: Ctx, *args: Operand, **kwargs: object) -> Tensor:
    out, name = ctx.result, str(ctx.node.target)
    number = 0 if "zeros" in name else 1 if "ones" in name else args[0] if "scalar_tensor" in name else args[1]
    value = scalar_arg(ctx, number, (), out.dtype)
    return Tensor(ctx.shape(out.shape), out.dtype, value)


@lowers("prims::iota.default")
def iota(ctx: Ctx, length: Size, *, start: Operand = 0, step: Operand = 1, **kwargs: object) -> Tensor:
    return arange(ctx, start, None, step)


@lowers("arange.start_step")
def arange(ctx: Ctx, start: Operand, end: Operand | None, step: Operand = 1, **kwargs: object) -> Tensor:
    out, sizes = ctx.result, ctx.result_sizes
    i = ex.ix(ex.dim(0, sizes[0]))
    if any(isinstance(a, (float, Value)) for a in (start, step)):
        acc = compute_dtype(out.dtype)
        first, by = (scalar_arg(ctx, a, (), acc) for a in (start, step))
        value = s.add(s.mul(va.cast(va.index(i), acc), by), first)
        return Tensor(sizes, out.dtype, va.cast(value, out.dtype))
    value = va.index(ex.add(ctx.index(start), ex.mul(i, ctx.index(step))))
    return Tensor(sizes, out.dtype, va.cast(value, out.dtype))


@lowers("empty.memory_format", "empty_strided.default", "empty_like.default", "new_empty_strided.default")
def empty(ctx: Ctx, *args: object, **kwargs: object) -> Tensor:
    out = ctx.result
    return Tensor(ctx.shape(out.shape), out.dtype, va.const(0, out.dtype))
