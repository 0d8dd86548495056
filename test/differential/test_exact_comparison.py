"""A value that is compared for equality is the same in all kernels, so that an extremum is among its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

pytestmark = pytest.mark.sample(2)

T = torch.Tensor
R = TypeVar("R")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms(x: T) -> T:
    return x * (x.square().mean(1, keepdim=True) + 1e-5).rsqrt()


def compiled(fn: Callable[..., R]) -> Callable[..., R]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="alt", options={"strict": True})


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(0, 2), (1,), (2,)])
@pytest.mark.parametrize("extremum", [torch.amax, torch.amin])
def test_gradients_of_extrema_go_to_their_elements(
    dtype: torch.dtype, dims: tuple[int, ...], extremum: Callable[[T, tuple[int, ...]], T]
) -> None:
    def fn(x: T) -> T:
        y = rms(x * 1.7 + 0.3)
        return extremum(y - y.abs().clamp(max=1.25), dims)

    torch.manual_seed(0)
    x = torch.randn(12, 24, 40).to(dtype).requires_grad_()
    loss = compiled(fn)(x).float().sum()
    (gradient,) = torch.autograd.grad(loss, x)
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(fn(exact).sum(), exact)
    assert gradient.isfinite().all()
    if dtype == torch.float32:  # 16-bit results have ties that exact ones lack
        torch.testing.assert_close(gradient, expected.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_holds_its_maximum(dtype: torch.dtype) -> None:
    def fn(x: T) -> T:
        y = rms(x * 1.1 + 0.3).sigmoid()
        return (y == y.amax(-1, keepdim=True)).sum(-1)

    x = torch.randn(64, 16, 33).to(dtype)
    assert (compiled(fn)(x) >= 1).all()


def floor_division(x: T) -> T:
    return torch.div(x, 0.7, rounding_mode="floor")


@pytest.mark.parametrize("operator", [torch.floor, torch.ceil, torch.round, torch.trunc, floor_division])
def test_functions_with_jumps_read_rounded_values(operator: Callable[[T], T]) -> None:
    def fn(x: T) -> T:
        return operator(x * 3)

    x = torch.linspace(-9, 9, 4001).bfloat16()
    torch.testing.assert_close(compiled(fn)(x), fn(x), rtol=0, atol=0)


def test_comparisons_read_rounded_values() -> None:
    def fn(x: T, y: T) -> tuple[T, T, T]:
        z = x * 1.7
        return z >= y, z < 2.5, z != y

    x = torch.randn(4096).bfloat16()
    y = x * 1.7
    for ours, eager in zip(compiled(fn)(x, y), fn(x, y), strict=True):
        assert torch.equal(ours, eager)
