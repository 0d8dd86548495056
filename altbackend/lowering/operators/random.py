"""Random numbers as scalars: functions of the seed of an operator and the position of an element, which fuse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...ir import expr as ex
from ...ir import value as va
from ...ir.value import Value
from ...runtime import philox as draws
from .. import scalar as s
from ..context import Ctx
from ..registry import LOWERINGS
from ..tensor import Size, Tensor, points


def _call(ctx: Ctx, op: str, seed: Tensor) -> Value:
    """Return a Philox operator at every element of the result; the counter is the row-major position."""
    sizes = ctx.result_sizes
    return va.apply(op, seed.at((0,)), va.index(ex.flatten(sizes, points(sizes))))


def _result(ctx: Ctx, value: Value) -> Tensor:
    out = ctx.result
    return Tensor(ctx.shape(out.shape), out.dtype, value)


def uniform(ctx: Ctx, seed: Tensor, shape: Sequence[Size], dtype: torch.dtype) -> Tensor:
    """Lower a uniform draw in [0, 1): 24 random bits, 53 for float64, for 16-bit floats the bits of the mantissa."""
    if dtype == torch.float64:
        top = s.binary("bitwise_and", s.binary("right_shift", _call(ctx, "philox_bits", seed), 11), 2**53 - 1)
        return _result(ctx, s.mul(va.cast(top, dtype), 2.0**-53))
    u = _call(ctx, "philox_uniform", seed)
    if dtype in draws.EXACT_BITS:
        steps = 2.0 ** draws.EXACT_BITS[dtype]
        u = s.mul(s.unary("floor", s.mul(u, steps)), 1 / steps)
    return _result(ctx, u)


def normal(ctx: Ctx, seed: Tensor, shape: Sequence[Size], dtype: torch.dtype) -> Tensor:
    """Lower a normal draw by the method of G. Box and M. Muller, 1958."""
    # sqrt(-2 log u) cos(2 pi v)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    u, v = (va.cast(_call(ctx, op, seed), wide) for op in ("philox_radius", "philox_turn"))
    radius = s.unary("sqrt", s.mul(s.unary("log", s.add(u, 2.0**-25)), -2.0))
    return _result(ctx, s.mul(radius, s.unary("cos", s.mul(v, 2 * math.pi))))


def integers(ctx: Ctx, seed: Tensor, shape: Sequence[Size], low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Lower a draw of integers in [low, high)."""
    # low + (32 bits * (high - low)) / 2^32, which fits as high - low <= 2^31
    word = s.binary("bitwise_and", _call(ctx, "philox_bits", seed), 0xFFFFFFFF)
    value = s.add(s.binary("right_shift", s.mul(word, high - low), 32), low)
    return _result(ctx, va.cast(value, dtype))


LOWERINGS[draws.philox_uniform] = uniform
LOWERINGS[draws.philox_normal] = normal
LOWERINGS[draws.philox_integers] = integers
