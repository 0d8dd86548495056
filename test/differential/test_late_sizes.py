"""Sizes that only data decides: one graph, on a CPU and by the printed host program of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from test import triton_run
from test.compare import as_list, compiled

pytestmark = pytest.mark.sample(3)

T = torch.Tensor


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    both: dict[str, Any] = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(both):
        yield


def build(way: str, fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    torch._dynamo.reset()
    return compiled(fn, dynamic=dynamic) if way == "cpu" else triton_run.compiled(fn, dynamic=dynamic, host=True)


def positions(x: T) -> tuple[T, ...]:
    i = (x > 0).nonzero()
    return (i.float() + 1).cumsum(0), i.sum(), torch.ones(i.shape[0]) * 2, x.flatten()[: i.shape[0]]


def selected(x: T) -> tuple[T, ...]:
    return x[x > 0] * 2, torch.masked_select(x, x < 0).sin().sum()


def values(x: T) -> T:
    return torch.unique((x * 3).int())


def counted(x: T) -> tuple[T, ...]:
    n = int((x > 0).sum().item())
    return torch.arange(n) + 1, x * n


def numbers(x: T) -> tuple[Any, ...]:
    """A number from data in a kernel, in a library call and as a result."""
    k = x.max().item()
    return x * k, torch.full((2, 3), k), k


def repeated(x: T) -> T:
    return torch.repeat_interleave(x, torch.tensor([1, 2, 3, 0]), 0) * 2


def multiplied(x: T) -> tuple[T, ...]:
    """A library call takes what is named after data; the input `t` has the name of a variable of the host program."""
    kept = x[x[:, 0] > 0]
    return kept @ x.t(), x.argwhere()


FUNCTIONS = [positions, selected, values, counted, numbers, repeated, multiplied]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("way", ["cpu", "triton"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_results(way: str, fn: Callable[..., Any], dynamic: bool) -> None:
    run = build(way, fn, dynamic)
    for n in range(3):
        x = torch.randn(4, 5 + dynamic * n, generator=torch.Generator().manual_seed(n))
        x = -x.abs() if n == 2 else x  # nothing is positive
        torch.testing.assert_close(run(x), fn(x))


@pytest.mark.parametrize("way", ["cpu", "triton"])
@pytest.mark.parametrize("fn", [selected, repeated, multiplied], ids=lambda f: f.__name__)
def test_gradients(way: str, fn: Callable[..., Any]) -> None:
    def gradient(f: Callable[..., Any]) -> T:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
        outs = [o for o in as_list(f(x)) if o.requires_grad]
        (g,) = torch.autograd.grad([o.square().sum() for o in outs], x)
        return g

    torch.testing.assert_close(gradient(build(way, fn, False)), gradient(fn))


def test_inputs_named_like_the_host_programs_variables() -> None:
    def fn(t: T, L: T, stream: T, flag: T, kernel0: T) -> T:
        return (t @ L) * stream + flag / kernel0

    xs = [torch.randn(4, 4) for _ in range(5)]
    torch.testing.assert_close(build("triton", fn, False)(*xs), fn(*xs))

    def linear(x: T, w: T) -> T:
        return x @ w.t()  # the transposed weight is saved under the name `t`

    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    got = torch.autograd.grad(build("triton", linear, False)(x, w).square().sum(), (x, w))
    torch.testing.assert_close(got, torch.autograd.grad(linear(x, w).square().sum(), (x, w)))
