"""Random numbers in checkpointed regions: drawn once, the same in forward and backward, whoever draws them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from test.compare import compiled

T = torch.Tensor

# every one is a product of x (or of a function with derivative c at f, f = c x) and of numbers that are drawn
REGIONS: dict[str, Callable[[T], T]] = {
    "dropout": lambda x: functional.dropout(x * 1.5, 0.5),
    "two dropouts": lambda x: functional.dropout(functional.dropout(x, 0.3) * 2, 0.3),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(x.shape),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
    "randint": lambda x: x * torch.randint(1, 9, x.shape),
    "randperm": lambda x: x * torch.randperm(x.numel()).view(x.shape),
    "multinomial": lambda x: x * torch.multinomial(torch.ones(4, 8), 16, replacement=True),
}


def inside(region: Callable[[T], T], **more: Any) -> Callable[[T], T]:
    return lambda x: checkpoint(region, x, use_reentrant=False, **more)


def result_and_gradient(run: Callable[[T], T], x: T) -> tuple[T, T]:
    torch.manual_seed(5)
    y = run(x)
    return y.detach(), torch.autograd.grad(y.sum(), x)[0]


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("eagers", [False, True], ids=["own numbers", "eager's numbers"])
@pytest.mark.parametrize("name", REGIONS)
def test_the_backward_meets_the_numbers_of_the_forward(name: str, eagers: bool) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    run = compiled(inside(REGIONS[name]), fallback_random=eagers)
    for _ in range(2):
        y, grad = result_and_gradient(run, x)
        torch.testing.assert_close(grad * x.detach(), y)
    again = result_and_gradient(run, x)
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], grad)
    if eagers:
        for got, want in zip(again, result_and_gradient(REGIONS[name], x), strict=True):
            torch.testing.assert_close(got, want)
    else:
        assert not torch.equal(run(x), run(x))


def test_a_policy_that_saves_what_is_drawn() -> None:
    def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in (torch.ops.aten.native_dropout.default, torch.ops.aten.rand_like.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, keep)
    x = torch.randn(4, 16, requires_grad=True)
    for name in ("dropout", "rand_like"):
        torch._dynamo.reset()
        y, grad = result_and_gradient(compiled(inside(REGIONS[name], context_fn=context)), x)
        torch.testing.assert_close(grad * x.detach(), y)


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_one_after_another(dynamic: bool) -> None:
    def layers(x: T) -> T:
        for _ in range(3):
            x = checkpoint(REGIONS["dropout"], x, use_reentrant=False)
        return functional.dropout(x, 0.1)

    run = compiled(layers, dynamic=dynamic)
    for rows in (64, 65) if dynamic else (64,):
        x = torch.randn(rows, 8, requires_grad=True)
        y, grad = result_and_gradient(run, x)
        torch.testing.assert_close(grad * x.detach(), y)
        assert 0.04 < float((y != 0).float().mean()) < 0.2  # 0.5^3 * 0.9 of them are left
