"""GELU that a program writes out, as ATen's operator, which library calls can take over as their epilogue."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .family import Form

T = torch.Tensor


def by_error_function(x: T) -> T:
    """Compute GELU: x Phi(x), as x * 0.5 * (1 + erf(x / sqrt 2))."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def by_power(x: T) -> T:
    """Compute the approximation of GELU by a hyperbolic tangent, with a power."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def by_products(x: T) -> T:
    """Compute the approximation of GELU by a hyperbolic tangent, with products."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def exact(x: T) -> T:
    """Compute GELU by ATen's operator."""
    return F.gelu(x)


def approximate(x: T) -> T:
    """Compute the approximation of GELU by ATen's operator."""
    return F.gelu(x, approximate="tanh")


def _examples() -> list[T]:
    return [torch.empty(4, 6)]


FORMS = (
    Form("by_error_function", by_error_function, exact, _examples),
    Form("by_power", by_power, approximate, _examples),
    Form("by_products", by_products, approximate, _examples),
)
