"""Activation functions and their gradients, as equations."""

from __future__ import annotations

import math

import torch

from ...ir import value as va
from ...ir.value import Value
from .. import scalar as s
from ..context import Ctx
from ..registry import lowers
from ..tensor import Operand, Tensor
from .pointwise import at_least, at_most, clamp, elementwise


@lowers("hardtanh.default")
def hardtanh(ctx: Ctx, x: Operand, lo: float = -1.0, hi: float = 1.0) -> Tensor:
    return clamp(ctx, x, lo, hi)


@lowers("relu6.default")
def relu6(ctx: Ctx, x: Operand) -> Tensor:
    return clamp(ctx, x, 0, 6)


@lowers("gelu.default")
def gelu(ctx: Ctx, x: Operand, approximate: str = "none") -> Tensor:
    return elementwise(ctx, gelu_tanh if approximate == "tanh" else gelu_erf, x)


def gelu_erf(x: Value) -> Value:
    # x/2 * (1 + erf(x / sqrt 2))
    return s.mul(s.mul(x, 0.5), s.add(s.unary("erf", s.mul(x, math.sqrt(0.5))), 1.0))


def gelu_tanh(x: Value) -> Value:
    # x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))
    inner = s.mul(s.add(x, s.mul(s.mul(s.mul(x, x), x), 0.044715)), math.sqrt(2 / math.pi))
    return s.mul(s.mul(x, 0.5), s.add(s.unary("tanh", inner), 1.0))


@lowers("silu.default")
def silu(ctx: Ctx, x: Operand) -> Tensor:
    # x / (1 + exp(-x))
    return elementwise(ctx, lambda v: s.div(v, s.add(s.unary("exp", s.neg(v)), 1.0)), x)


@lowers("leaky_relu.default")
def leaky_relu(ctx: Ctx, x: Operand, slope: float = 0.01) -> Tensor:
    return elementwise(ctx, lambda v: s.where(s.binary("gt", v, 0), v, s.mul(v, slope)), x)


@lowers("elu.default")
def elu(ctx: Ctx, x: Operand, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    def body(v: Value) -> Value:
        low = s.mul(s.unary("expm1", s.mul(v, input_scale)), alpha * scale)
        return s.where(s.binary("gt", v, 0), s.mul(v, scale), low)

    return elementwise(ctx, body, x)


@lowers("hardsigmoid.default")
def hardsigmoid(ctx: Ctx, x: Operand) -> Tensor:
    return elementwise(ctx, lambda v: _sixth(ctx, relu6_of(ctx, s.add(v, 3.0))), x)


@lowers("hardswish.default")
def hardswish(ctx: Ctx, x: Operand) -> Tensor:
    return elementwise(ctx, lambda v: _sixth(ctx, s.mul(v, relu6_of(ctx, s.add(v, 3.0)))), x)


def _sixth(ctx: Ctx, v: Value) -> Value:
    """Return v / 6, or v * float32(1 / 6) for eager's bits on a GPU, as eager's kernel computes it there."""
    if ctx.gpu and ctx.cfg.numerics == "eager" and v.dtype == torch.float32:
        return s.mul(v, 1.0 / 6.0)
    return s.div(v, 6.0)


def relu6_of(ctx: Ctx, v: Value) -> Value:
    return at_most(ctx, at_least(ctx, v, va.const(0.0, v.dtype)), va.const(6.0, v.dtype))


@lowers("sigmoid_backward.default")
def sigmoid_backward(ctx: Ctx, g: Operand, y: Operand) -> Tensor:
    return elementwise(ctx, lambda a, b: s.mul(s.mul(a, s.sub(1.0, b)), b), g, y)


@lowers("tanh_backward.default")
def tanh_backward(ctx: Ctx, g: Operand, y: Operand) -> Tensor:
    return elementwise(ctx, lambda a, b: s.mul(a, s.sub(1.0, s.mul(b, b))), g, y)


@lowers("threshold_backward.default")
def threshold_backward(ctx: Ctx, g: Operand, x: Operand, threshold: float) -> Tensor:
    return elementwise(ctx, lambda a, b: s.where(s.binary("le", b, threshold), 0.0, a), g, x)


@lowers("threshold.default")
def threshold(ctx: Ctx, x: Operand, limit: float, number: float) -> Tensor:
    return elementwise(ctx, lambda v: s.where(s.binary("le", v, limit), number, v), x)


@lowers("gelu_backward.default")
def gelu_backward(ctx: Ctx, g: Operand, x: Operand, approximate: str = "none") -> Tensor:
    return elementwise(ctx, _gelu_tanh_grad if approximate == "tanh" else _gelu_erf_grad, g, x)


def _gelu_erf_grad(g: Value, x: Value) -> Value:
    # d/dx = Phi(x) + x * phi(x)
    cdf = s.mul(s.add(s.unary("erf", s.mul(x, math.sqrt(0.5))), 1.0), 0.5)
    pdf = s.mul(s.unary("exp", s.mul(s.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return s.mul(g, s.add(cdf, s.mul(x, pdf)))


def _gelu_tanh_grad(g: Value, x: Value) -> Value:
    # u = k (x + c x^3); d/dx = (1 + tanh u)/2 + x/2 (1 - tanh^2 u) k (1 + 3 c x^2)
    k, c = math.sqrt(2 / math.pi), 0.044715
    x2 = s.mul(x, x)
    t = s.unary("tanh", s.mul(s.add(x, s.mul(s.mul(x2, x), c)), k))
    slope = s.mul(s.add(s.mul(x2, 3 * c), 1.0), k)
    right = s.mul(s.mul(s.mul(x, 0.5), s.sub(1.0, s.mul(t, t))), slope)
    return s.mul(g, s.add(s.mul(s.add(t, 1.0), 0.5), right))


@lowers("silu_backward.default")
def silu_backward(ctx: Ctx, g: Operand, x: Operand) -> Tensor:
    def body(a: Value, v: Value) -> Value:
        # sigma (1 + x (1 - sigma))
        sig = s.unary("sigmoid", v)
        return s.mul(a, s.mul(sig, s.add(s.mul(v, s.sub(1.0, sig)), 1.0)))

    return elementwise(ctx, body, g, x)
