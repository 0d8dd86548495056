"""Compiled autograd: a whole backward is one graph, with hooks and accumulation, for several batch sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

T = torch.Tensor
STRICT: dict[str, Any] = {"backend": "alt", "options": {"strict": True, "verify_ir": True}}
BATCHES = (4, 7)


class Net(nn.Module):
    """A network that uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.norm = nn.Linear(6, 9), nn.Linear(9, 9), nn.LayerNorm(9)

    def forward(self, x: T) -> T:
        h = torch.tanh(self.first(x))
        h = self.shared(self.shared(h) + h)
        y: T = self.norm(h).square().mean()
        return y


class Product(torch.autograd.Function):
    """x sin(y), with a gradient for x that is twice too large."""

    @staticmethod
    def forward(ctx: Any, x: T, y: T) -> T:
        ctx.save_for_backward(x, y)
        return x * y.sin()

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, T]:
        x, y = ctx.saved_tensors
        return 2 * grad * y.sin(), grad * x * y.cos()


def hooks(net: Net, x: T) -> None:
    """Hooks of tensors, of accumulated gradients and of modules."""

    def halve(p: T) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def triple(m: nn.Module, into: Any, out: Any) -> Any:
        return (into[0] * 3,)

    def raised(m: nn.Module, out: Any) -> Any:
        return (out[0] + 1,)

    handles = [
        net.first.weight.register_hook(lambda g: g * 2),
        net.shared.weight.register_post_accumulate_grad_hook(halve),
        net.norm.register_full_backward_hook(triple),
        net.shared.register_full_backward_pre_hook(raised),
    ]
    net(x).backward()
    for h in handles:
        h.remove()


def retained(net: Net, x: T) -> None:
    loss = net(x)
    loss.backward(retain_graph=True)
    loss.backward()


def own_gradient(net: Net, x: T) -> None:
    h = net.first(x)
    y: T = Product.apply(h, net.shared(h))
    y.sum().backward()


def accumulated(net: Net, x: T) -> None:
    for k in range(3):
        (net(x * (k + 1)) / 3).backward()


def compiled_forward(net: Net, x: T) -> None:
    torch.compile(net, **STRICT)(x).backward()


def second_order(net: Net, x: T) -> None:
    (grad,) = torch.autograd.grad(net(x), net.first.weight, create_graph=True)
    grad.square().sum().backward()


PROGRAMS = (hooks, retained, own_gradient, accumulated, compiled_forward, second_order)


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_gradients(program: Callable[[Net, T], None]) -> None:
    torch._dynamo.reset()
    compiled_autograd.reset()
    torch.manual_seed(0)
    mine = Net()
    theirs = copy.deepcopy(mine)

    def compiler(graph: Any) -> Any:
        captured.append(graph)
        return torch.compile(graph, dynamic=True, **STRICT)

    captured: list[Any] = []
    for n in BATCHES:
        x = torch.randn(n, 6)
        program(theirs, x)
        with compiled_autograd._enable(compiler):
            program(mine, x)
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            if b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert captured
