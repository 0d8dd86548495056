"""The table of scalar operators: one row holds every fact about an operator.

The interpreter, the printers, dtype propagation and the fuzzer read these rows and nothing else.

`ref` is the torch function that defines the operator. `cpp` and `triton` are spellings with `{0}`, `{1}`... for the
arguments and `{T}` for the type of the result in that language. All arguments have one dtype.

`triton` is for floats. `triton_double`, `triton_int` and `triton_bool` replace it if the argument is a float64, an
integer or a bool; "" means that Triton has no spelling. `triton_fast` is a cheaper form for float32 with a relative
error below 2^-15, an eighth of float16's rounding error (in a sum: relative to its largest term). A function without a
module is from `runtime.tile_math`. The functions of libdevice are those that eager's CUDA kernels call.

`decided` says for which floats every loop of eager's kernels computes the same bits:
    ALWAYS  for all floats
    WIDE    for float32 and float64; in 16 bits eager's vector loops and scalar loops round at different steps
    ""      for none: functions of a vector library; roots, which MKL does not always round correctly; the larger of
            two zeros or NaNs
Integers are always decided. docs/numerics.md says more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from altbackend.lazy_dataclass import dataclass

from . import philox

SAME, BOOL, FLOAT32, FLOAT64 = "same", "bool", "float32", "float64"
ALWAYS, WIDE = "always", "wide"


@dataclass(frozen=True)
class OpSpec:
    """One scalar operator. `result`: the dtype, SAME as the arguments, BOOL, FLOAT32 or FLOAT64.

    `flops`: the approximate cost of one evaluation, in float additions.
    """

    name: str
    arity: int
    result: str
    ref: Callable[..., torch.Tensor]
    cpp: str
    triton: str
    flops: int = 1
    triton_double: str | None = None
    triton_int: str | None = None
    triton_bool: str | None = None
    triton_fast: str | None = None
    decided: str = ""


def _row(
    name: str,
    arity: int,
    ref: Callable[..., torch.Tensor],
    cpp: str = "",
    triton: str | None = None,
    result: str = SAME,
    **facts: Any,
) -> OpSpec:
    """Return a row; an operator without spellings is `alt::name(...)` in C++ and `libdevice.name(...)` in Triton."""
    holes = ", ".join(f"{{{i}}}" for i in range(arity))
    return OpSpec(
        name,
        arity,
        result,
        ref,
        cpp or f"alt::{name}({holes})",
        f"libdevice.{name}({holes})" if triton is None else triton,
        **facts,
    )


def rounded_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers rounded to the 11 bits of TF32, ties away from zero."""
    bits = (x.view(torch.int32) + 0x1000) & -0x2000
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def _unary(names: str, flops: int, source: object = torch) -> list[OpSpec]:
    return [_row(n, 1, getattr(source, n), flops=flops) for n in names.split()]


_ROWS: list[OpSpec] = [
    # On bools these are `or` and `and`; Triton's sum of two int1 would be one bit.
    _row("add", 2, torch.add, "({0} + {1})", "({0} + {1})", triton_bool="({0} | {1})", decided=ALWAYS),
    _row("sub", 2, torch.sub, "({0} - {1})", "({0} - {1})", decided=ALWAYS),
    _row("mul", 2, torch.mul, "({0} * {1})", "({0} * {1})", triton_bool="({0} & {1})", decided=ALWAYS),
    _row(
        "truediv",
        2,
        torch.true_divide,
        "({0} / {1})",
        "tl.div_rn({0}, {1})",
        flops=4,
        triton_double="({0} / {1})",
        triton_fast="({0} / {1})",
        decided=ALWAYS,
    ),
    _row(
        "floor_divide",
        2,
        torch.floor_divide,
        triton="floor_divide_float({0}, {1})",
        flops=6,
        triton_int="floor_divide({0}, {1})",
        decided=WIDE,
    ),
    _row(
        "trunc_divide",
        2,
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        triton="libdevice.trunc(libdevice.div_rn({0}, {1}))",
        flops=6,
        triton_int="({0} // {1})",
        decided=WIDE,
    ),
    _row(
        "remainder",
        2,
        torch.remainder,
        triton="remainder_float({0}, {1})",
        flops=8,
        triton_int="remainder({0}, {1})",
        decided=WIDE,
    ),
    _row("fmod", 2, torch.fmod, flops=8, triton_int="({0} % {1})", decided=WIDE),
    _row("pow", 2, torch.pow, flops=30, triton_int=""),
    _row("atan2", 2, torch.atan2, flops=25),
    _row("hypot", 2, torch.hypot, flops=10),
    _row("copysign", 2, torch.copysign, decided=ALWAYS),
    _row("nextafter", 2, torch.nextafter, flops=6, decided=ALWAYS),
    _row("maximum", 2, torch.maximum, triton="largest({0}, {1})", triton_bool="({0} | {1})"),
    _row("minimum", 2, torch.minimum, triton="smallest({0}, {1})", triton_bool="({0} & {1})"),
    _row("fmax", 2, torch.fmax, triton="tl.maximum({0}, {1})"),
    _row("fmin", 2, torch.fmin, triton="tl.minimum({0}, {1})"),
    _row("eq", 2, torch.eq, "({0} == {1})", "({0} == {1})", BOOL, decided=ALWAYS),
    _row("ne", 2, torch.ne, "({0} != {1})", "({0} != {1})", BOOL, decided=ALWAYS),
    _row("lt", 2, torch.lt, "({0} < {1})", "({0} < {1})", BOOL, decided=ALWAYS),
    _row("le", 2, torch.le, "({0} <= {1})", "({0} <= {1})", BOOL, decided=ALWAYS),
    _row("gt", 2, torch.gt, "({0} > {1})", "({0} > {1})", BOOL, decided=ALWAYS),
    _row("ge", 2, torch.ge, "({0} >= {1})", "({0} >= {1})", BOOL, decided=ALWAYS),
    _row("logical_and", 2, torch.logical_and, "({0} & {1})", "({0} & {1})", BOOL, decided=ALWAYS),
    _row("logical_or", 2, torch.logical_or, "({0} | {1})", "({0} | {1})", BOOL, decided=ALWAYS),
    _row("logical_not", 1, torch.logical_not, "(!{0})", "({0} == 0)", BOOL, decided=ALWAYS),
    _row("bitwise_and", 2, torch.bitwise_and, "({T})({0} & {1})", "({0} & {1})", decided=ALWAYS),
    _row("bitwise_or", 2, torch.bitwise_or, "({T})({0} | {1})", "({0} | {1})", decided=ALWAYS),
    _row("bitwise_xor", 2, torch.bitwise_xor, "({T})({0} ^ {1})", "({0} ^ {1})", decided=ALWAYS),
    _row("bitwise_not", 1, torch.bitwise_not, "alt::bitwise_not({0})", "(~{0})", decided=ALWAYS),
    _row(
        "left_shift",
        2,
        torch.bitwise_left_shift,
        triton="tl.where(({1} < 0) | ({1} >= {bits}), {0} * 0, {0} << {1})",
        decided=ALWAYS,
    ),
    _row(
        "right_shift",
        2,
        torch.bitwise_right_shift,
        triton="({0} >> tl.where(({1} < 0) | ({1} >= {bits}), {bits} - 1, {1}))",
        decided=ALWAYS,
    ),
    _row("gcd", 2, torch.gcd, triton="", flops=40, decided=ALWAYS),
    _row(  # a float of the host program is passed to a kernel as an integer
        "float64_of_bits",
        1,
        lambda bits: bits.view(torch.float64),
        "alt::detail::bit_cast<double>({0})",
        "",
        FLOAT64,
        triton_int="tl.cast({0}, tl.float64, bitcast=True)",
        decided=ALWAYS,
    ),
    _row("to_tf32", 1, rounded_to_tf32, triton="to_tf32({0})", flops=3, triton_double=""),
    # Triton's -x is 0 - x, which loses the sign of 0
    _row("neg", 1, torch.neg, "(-{0})", "({0} * -1.0)", triton_int="(-{0})", decided=ALWAYS),
    _row("abs", 1, torch.abs, triton="tl.abs({0})", decided=ALWAYS),
    _row(
        "sign",
        1,
        torch.sign,
        triton="(tl.cast({0} > 0, {T}) - tl.cast({0} < 0, {T}))",
        triton_bool="({0})",
        decided=ALWAYS,
    ),
    _row("relu", 1, torch.relu, triton="largest({0}, tl.full([], 0, {T}))", decided=ALWAYS),
    _row(
        "sqrt",
        1,
        torch.sqrt,
        triton="tl.sqrt_rn({0})",
        flops=6,
        triton_double="tl.sqrt({0})",
        triton_fast="tl.sqrt({0})",
    ),
    _row("rsqrt", 1, torch.rsqrt, flops=8, decided=WIDE),
    _row(
        "reciprocal",
        1,
        torch.reciprocal,
        "({T}(1) / {0})",
        "reciprocal({0})",
        flops=4,
        triton_fast="(1.0 / {0})",
        decided=ALWAYS,
    ),
    _row("exp", 1, torch.exp, flops=12, triton_fast="tl.exp({0})"),
    _row("log", 1, torch.log, flops=16),
    _row("sin", 1, torch.sin, flops=20),
    _row("cos", 1, torch.cos, flops=20),
    _row("erf", 1, torch.erf, flops=25),
    _row(
        "one_plus_erf",
        1,
        lambda x: torch.erf(x) + 1,
        triton="(1.0 + libdevice.erf({0}))",
        flops=22,
        triton_fast="one_plus_erf_fast({0})",
    ),
    _row("sigmoid", 1, torch.sigmoid, triton="sigmoid({0})", flops=16, triton_fast="sigmoid_fast({0})"),
    _row("floor", 1, torch.floor, decided=ALWAYS),
    _row("ceil", 1, torch.ceil, decided=ALWAYS),
    _row("round", 1, torch.round, triton="libdevice.nearbyint({0})", decided=ALWAYS),
    _row("trunc", 1, torch.trunc, decided=ALWAYS),
    _row("isnan", 1, torch.isnan, triton="({0} != {0})", result=BOOL, decided=ALWAYS),
    _row("isinf", 1, torch.isinf, triton='(tl.abs({0}) == float("inf"))', result=BOOL, decided=ALWAYS),
    _row(
        "signbit",
        1,
        torch.signbit,
        triton="(libdevice.signbit({0}) != 0)",
        result=BOOL,
        triton_int="({0} < 0)",
        decided=ALWAYS,
    ),
    _row("logaddexp", 2, torch.logaddexp, triton="log_add_exp({0}, {1})", flops=30),
    _row("where", 3, torch.where, "({0} ? {1} : {2})", "tl.where({0}, {1}, {2})", decided=ALWAYS),
    _row("tanh", 1, torch.tanh, flops=20, triton_fast="tanh_fast({0})"),
    *_unary("exp2 expm1 log2 log10 log1p erfc erfinv tan asin acos atan sinh cosh asinh acosh atanh", 20),
    _row("lgamma", 1, torch.lgamma, flops=60),
    _row("digamma", 1, torch.digamma, triton="", flops=60),
    _row("i0", 1, torch.special.i0, triton="libdevice.cyl_bessel_i0({0})", flops=30),
    _row("i0e", 1, torch.special.i0e, triton="", flops=30),
    _row("i1", 1, torch.special.i1, triton="libdevice.cyl_bessel_i1({0})", flops=30),
    _row("i1e", 1, torch.special.i1e, triton="", flops=30),
    # Arguments: (seed, counter), both int64. Equal arguments give equal numbers, so a value may be recomputed.
    _row(
        "philox_uniform", 2, philox.uniform, triton="philox_uniform({0}, {1})", result=FLOAT32, flops=60, decided=ALWAYS
    ),
    _row("philox_radius", 2, philox.radius, triton="philox_radius({0}, {1})", result=FLOAT32, flops=60, decided=ALWAYS),
    _row("philox_turn", 2, philox.turn, triton="philox_turn({0}, {1})", result=FLOAT32, flops=60, decided=ALWAYS),
    _row("philox_bits", 2, philox.bits, triton="philox_bits({0}, {1})", flops=60, decided=ALWAYS),
]

OPS: dict[str, OpSpec] = {row.name: row for row in _ROWS}

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


# Atomic operations of a GPU whose result equals torch's; its atomic maxima of floats ignore NaN, so they are left out.
ATOMIC: dict[str, tuple[torch.dtype, ...]] = {
    "add": (torch.float32, torch.float64, torch.int32, torch.int64),
    "max": (torch.int32, torch.int64),
    "min": (torch.int32, torch.int64),
}


def result_dtype(spec: OpSpec, argument: torch.dtype) -> torch.dtype:
    """Return the dtype of the operator's result for arguments of dtype `argument`."""
    return {SAME: argument, BOOL: torch.bool, FLOAT32: torch.float32, FLOAT64: torch.float64}[spec.result]


def triton_spelling(op: str, dtype: torch.dtype) -> str:
    """Return the Triton text of an operator on arguments of `dtype`, or "" (libdevice has functions of floats only)."""
    spec = OPS[op]
    kind: str | None = None
    if dtype == torch.bool:
        kind = spec.triton_bool if spec.triton_bool is not None else spec.triton_int
    elif not dtype.is_floating_point:
        kind = spec.triton_int
    elif dtype == torch.float64:
        kind = spec.triton_double
    text = spec.triton if kind is None else kind
    return "" if "libdevice" in text and not dtype.is_floating_point else text


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a scalar of `dtype` is computed: float32 for floats of 8 and 16 bits, else itself."""
    return torch.float32 if dtype in LOW_PRECISION or dtype in FLOAT8 else dtype
