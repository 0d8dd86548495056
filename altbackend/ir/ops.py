"""The scalar-operator table: one row holds every fact about an operator.

The interpreter, the printers, dtype propagation and the fuzzer read these rows and nothing else.
`ref` is the torch function that defines the meaning; `cpp` and `triton` are spellings with `{0}`, `{1}`...
for the arguments and `{T}` for the result's C++ type. Arguments arrive already promoted to one dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SAME, BOOL = "same", "bool"


@dataclass(frozen=True)
class OpSpec:
    """One scalar operator. `flops`: rough cost of one evaluation, in float additions."""

    name: str
    arity: int
    result: str
    ref: Callable[..., Any]
    cpp: str
    triton: str
    flops: int = 1


def _row(
    name: str,
    arity: int,
    ref: Callable[..., Any],
    cpp: str = "",
    triton: str = "",
    result: str = SAME,
    flops: int = 1,
) -> OpSpec:
    holes = ", ".join(f"{{{i}}}" for i in range(arity))
    return OpSpec(
        name, arity, result, ref, cpp or f"alt::{name}({holes})", triton or f"libdevice.{name}({holes})", flops
    )


def _unary(names: str, flops: int, source: Any = torch) -> list[OpSpec]:
    return [_row(n, 1, getattr(source, n), flops=flops) for n in names.split()]


_ROWS: list[OpSpec] = [
    _row("add", 2, torch.add, "({0} + {1})", "({0} + {1})"),
    _row("sub", 2, torch.sub, "({0} - {1})", "({0} - {1})"),
    _row("mul", 2, torch.mul, "({0} * {1})", "({0} * {1})"),
    _row("truediv", 2, torch.true_divide, "({0} / {1})", "({0} / {1})", flops=4),
    _row("floor_divide", 2, torch.floor_divide, flops=6),
    _row("trunc_divide", 2, lambda a, b: torch.div(a, b, rounding_mode="trunc"), flops=6),
    _row("remainder", 2, torch.remainder, flops=8),
    _row("fmod", 2, torch.fmod, flops=8),
    _row("pow", 2, torch.pow, flops=30),
    _row("atan2", 2, torch.atan2, flops=25),
    _row("hypot", 2, torch.hypot, flops=10),
    _row("copysign", 2, torch.copysign),
    _row("nextafter", 2, torch.nextafter, flops=6),
    _row("maximum", 2, torch.maximum, triton="tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    _row("minimum", 2, torch.minimum, triton="tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"),
    _row("fmax", 2, torch.fmax, triton="tl.maximum({0}, {1})"),
    _row("fmin", 2, torch.fmin, triton="tl.minimum({0}, {1})"),
    _row("eq", 2, torch.eq, "({0} == {1})", "({0} == {1})", BOOL),
    _row("ne", 2, torch.ne, "({0} != {1})", "({0} != {1})", BOOL),
    _row("lt", 2, torch.lt, "({0} < {1})", "({0} < {1})", BOOL),
    _row("le", 2, torch.le, "({0} <= {1})", "({0} <= {1})", BOOL),
    _row("gt", 2, torch.gt, "({0} > {1})", "({0} > {1})", BOOL),
    _row("ge", 2, torch.ge, "({0} >= {1})", "({0} >= {1})", BOOL),
    _row("logical_and", 2, torch.logical_and, "({0} & {1})", "({0} & {1})", BOOL),
    _row("logical_or", 2, torch.logical_or, "({0} | {1})", "({0} | {1})", BOOL),
    _row("logical_not", 1, torch.logical_not, "(!{0})", "({0} == 0)", BOOL),
    _row("bitwise_and", 2, torch.bitwise_and, "({T})({0} & {1})", "({0} & {1})"),
    _row("bitwise_or", 2, torch.bitwise_or, "({T})({0} | {1})", "({0} | {1})"),
    _row("bitwise_xor", 2, torch.bitwise_xor, "({T})({0} ^ {1})", "({0} ^ {1})"),
    _row("bitwise_not", 1, torch.bitwise_not, "alt::bitwise_not({0})", "(~{0})"),
    _row("left_shift", 2, torch.bitwise_left_shift, triton="({0} << {1})"),
    _row("right_shift", 2, torch.bitwise_right_shift, triton="({0} >> {1})"),
    _row("gcd", 2, torch.gcd, flops=40),
    _row("neg", 1, torch.neg, "(-{0})", "(-{0})"),
    _row("abs", 1, torch.abs, triton="tl.abs({0})"),
    _row("sign", 1, torch.sign),
    _row("relu", 1, torch.relu, triton="tl.maximum({0}, 0, propagate_nan=tl.PropagateNan.ALL)"),
    _row("sqrt", 1, torch.sqrt, triton="tl.sqrt_rn({0})", flops=6),
    _row("rsqrt", 1, torch.rsqrt, triton="tl.rsqrt({0})", flops=8),
    _row("reciprocal", 1, torch.reciprocal, "({T}(1) / {0})", "(1.0 / {0})", flops=4),
    _row("exp", 1, torch.exp, triton="tl.exp({0})", flops=12),
    _row("log", 1, torch.log, triton="tl.log({0})", flops=16),
    _row("sin", 1, torch.sin, triton="tl.sin({0})", flops=20),
    _row("cos", 1, torch.cos, triton="tl.cos({0})", flops=20),
    _row("erf", 1, torch.erf, triton="tl.erf({0})", flops=25),
    _row("one_plus_erf", 1, lambda x: torch.erf(x) + 1, triton="(1.0 + tl.erf({0}))", flops=22),
    _row("sigmoid", 1, torch.sigmoid, triton="tl.sigmoid({0})", flops=16),
    _row("floor", 1, torch.floor, triton="tl.floor({0})"),
    _row("ceil", 1, torch.ceil, triton="tl.ceil({0})"),
    _row("round", 1, torch.round, triton="libdevice.nearbyint({0})"),
    _row("trunc", 1, torch.trunc),
    _row("isnan", 1, torch.isnan, triton="({0} != {0})", result=BOOL),
    _row("isinf", 1, torch.isinf, result=BOOL),
    _row("signbit", 1, torch.signbit, result=BOOL),
    _row("logaddexp", 2, torch.logaddexp, flops=30),
    _row("where", 3, torch.where, "({0} ? {1} : {2})", "tl.where({0}, {1}, {2})"),
    *_unary("exp2 expm1 log2 log10 log1p tanh erfc erfinv tan asin acos atan sinh cosh asinh acosh atanh", 20),
    *_unary("lgamma digamma", 60),
    *_unary("i0 i0e i1 i1e", 30, torch.special),
]

OPS: dict[str, OpSpec] = {row.name: row for row in _ROWS}

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
FLOAT8 = frozenset(
    getattr(torch, n)
    for n in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, n)
)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a scalar of `dtype` is computed: float32 for the 16-bit floats, else itself."""
    return torch.float32 if dtype in LOW_PRECISION else dtype
