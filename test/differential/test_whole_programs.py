"""Programs around graphs: optimizer steps, compiled autograd, functions with gradients of their own, threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from altbackend.report import stats
from test.compare import compiled, difference
from test.torch_versions import since

T = torch.Tensor
STRICT: dict[str, Any] = {"backend": "alt", "options": {"strict": True, "verify_ir": True}}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x: T) -> T:
        y: T = self.second(torch.tanh(self.first(x)))
        return y


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps(name: str) -> None:
    """Parameters and the optimizer's state after three steps, the step compiled."""
    mine = Net()
    theirs = copy.deepcopy(mine)
    before = stats.snapshot()
    states = []
    for net, through in ((mine, lambda f: torch.compile(f, **STRICT)), (theirs, lambda f: f)):
        opt = OPTIMIZERS[name](net.parameters())
        step = through(opt.step)
        for k in range(3):
            opt.zero_grad()
            net(torch.arange(24.0).view(4, 6).sin() * (k + 1)).square().sum().backward()
            step()
        held = [x for state in opt.state.values() for x in state.values() if isinstance(x, T)]
        states.append([*(p.detach() for p in net.parameters()), *held])
    assert (stats.snapshot() - before).kernels
    assert not [text for a, b in zip(*states, strict=True) if (text := difference(a, b, strides=False))]


def test_compiled_autograd() -> None:
    """The whole backward as one graph, gradients accumulated over two calls."""
    mine = Net()
    theirs = copy.deepcopy(mine)
    x = torch.randn(4, 6)

    def step(net: nn.Module) -> None:
        net(x).square().sum().backward()

    for _ in range(2):
        step(theirs)
    before = stats.snapshot()
    with torch._dynamo.config.patch(compiled_autograd=True):
        run = torch.compile(lambda: step(mine), **STRICT)
        for _ in range(2):
            run()
    assert (stats.snapshot() - before).graphs >= 2
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert not difference(a.grad, b.grad, strides=False)


class Clamped(torch.autograd.Function):
    """x below 1, with a gradient that passes everywhere, twice as large."""

    @staticmethod
    def forward(ctx: Any, x: T, scale: float) -> T:
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.clamp(max=1) * scale

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        (x,) = ctx.saved_tensors
        return 2 * ctx.scale * grad + 0 * x, None


def test_a_function_with_a_gradient_of_its_own() -> None:
    def fn(x: T) -> T:
        y: T = Clamped.apply(x.sin() * 3, 0.5)
        return y.exp()

    x = torch.randn(5, 7)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = compiled(fn)(a), fn(b)
    got.sum().backward()
    want.sum().backward()
    assert a.grad is not None
    assert not difference(got.detach(), want.detach())
    assert not difference(a.grad, b.grad)


def test_a_tensor_subclass_with_gradients() -> None:
    def fn(x: T) -> T:
        return torch.softmax(x * 2, -1).sin()

    def run(f: Callable[[T], T]) -> tuple[T, T]:
        torch.manual_seed(1)
        x = TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()
        y = f(x)
        assert type(y) is TwoTensor
        y.sum().backward()
        assert type(x.grad) is TwoTensor
        return y.detach(), x.grad

    got: Any
    want: Any
    for got, want in zip(run(compiled(fn)), run(fn), strict=True):
        assert not difference(got.a, want.a)
        assert not difference(got.b, want.b)


@since(2, 13, "threads cannot trace at once")
def test_threads_that_compile_and_run_at_once() -> None:
    """Each its own functions, with gradients, and all of them one that is compiled already."""
    shared = compiled(lambda x: torch.softmax(x, -1) * 3)
    shared(torch.randn(8, 16))
    errors: list[str] = []
    start = threading.Barrier(3)

    def work(k: int) -> None:
        try:
            start.wait(30)
            for turn in range(2):
                factor = 1.0 + k + 10 * turn
                run = compiled(lambda x, factor=factor: (x * factor).sin().sum(0))
                x = torch.randn(8, 16, requires_grad=True)
                y = run(x)
                y.sum().backward()
                torch.testing.assert_close(y, (x * factor).sin().sum(0))
                torch.testing.assert_close(x.grad, factor * (x * factor).cos().detach(), atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(shared(x), torch.softmax(x, -1) * 3)
        except BaseException as cause:
            errors.append(f"thread {k}: {type(cause).__name__}: {cause}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(100)
    assert not errors
    assert not any(t.is_alive() for t in threads)
