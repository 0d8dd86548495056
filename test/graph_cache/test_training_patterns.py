"""Ways in which users train with compiled functions, three steps each: compiled, and loaded from the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

T = torch.Tensor
Compile = Callable[[Any], Any]
STEPS = 3


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: T) -> T:
        y: T = self.second(F.gelu(self.first(x)))
        return y


def batches() -> list[T]:
    return [torch.randn(6, 8, generator=torch.Generator().manual_seed(k)) for k in range(STEPS)]


def gradients(m: nn.Module) -> list[T]:
    taken = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in m.parameters()]
    m.zero_grad()
    return taken


def step_with_optimizer(compile_: Compile) -> list[T]:
    m = Net()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)

    def step(x: T) -> T:
        loss = m(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    f = compile_(step)
    return [f(x) for x in batches()] + [p.detach() for p in m.parameters()]


def step_of_a_compiled_model(compile_: Compile) -> list[T]:
    m = Net()
    inner = compile_(m)

    def step(x: T) -> T:
        loss = inner(x).square().mean()
        loss.backward()
        return loss.detach() * 3

    f = torch.compile(step, backend="eager")
    return [y for x in batches() for y in (f(x), *gradients(m))]


def gradient_inside(compile_: Compile) -> list[T]:
    m = Net()

    def fn(x: T) -> T:
        x = x.requires_grad_()
        return torch.autograd.grad(m(x).sum(), x)[0] * 2

    f = compile_(fn)
    return [f(x) for x in batches()]


def checkpointed(compile_: Compile) -> list[T]:
    m = Net()
    f = compile_(lambda x: checkpoint(m, x, use_reentrant=False).square().mean())
    return [y for x in batches() for y in (f(x).backward() or x, *gradients(m))]


def hooks(compile_: Compile) -> list[T]:
    m = Net()
    m.first.register_forward_hook(lambda module, inputs, result: result * 1.5)
    m.second.weight.register_hook(lambda g: g * 2)
    f, results = compile_(m), []
    for x in batches():
        y = f(x)
        y.register_hook(lambda g: g * 3)
        y.sum().backward()
        results += gradients(m)
    return results


def saved_on_cpu(compile_: Compile) -> list[T]:
    m = Net()
    f, results = compile_(m), []
    for x in batches():
        with torch.autograd.graph.save_on_cpu():
            loss = f(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results += gradients(m)
    return results


def one_of_two_results(compile_: Compile) -> list[T]:
    m = Net()
    f, results = compile_(lambda x: (m(x), m.first(x).sigmoid())), []
    for k, x in enumerate(batches()):
        f(x)[k % 2].sum().backward()
        results += gradients(m)
    return results


PATTERNS = (
    step_with_optimizer,
    step_of_a_compiled_model,
    gradient_inside,
    checkpointed,
    hooks,
    saved_on_cpu,
    one_of_two_results,
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_results_are_those_of_eager(pattern: Callable[[Compile], list[T]], tmp_path: Path) -> None:
    expected = pattern(lambda f: f)
    for _ in range(2):
        torch._dynamo.reset()
        options = {"cache_dir": str(tmp_path), "cache_graphs": True}
        got = pattern(functools.partial(torch.compile, backend="alt", options=options))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
