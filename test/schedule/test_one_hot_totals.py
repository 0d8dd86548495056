"""Totals over rows of one element are that element, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir.loops import Program, Reduction
from altbackend.schedule import one_hot_totals
from test import triton_run
from test.compare import check, check_gradients, difference
from test.graphs import trace

T = torch.Tensor


def gradient(x: T, t: T) -> T:
    """The gradient of a cross-entropy before its mean."""
    hot = torch.where(torch.arange(x.shape[1]) == t[:, None].remainder(x.shape[1]), -1.0, 0.0)
    row = hot * t[:, None].to(x.dtype)
    return row - x.exp() * row.sum(1, keepdim=True)


def loss(x: T, t: T) -> T:
    return F.cross_entropy(x, t)


def smooth(x: T, t: T) -> T:
    return F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=2)


def weighted(x: T, t: T) -> T:
    return F.nll_loss(x.log_softmax(1), t, weight=torch.arange(1.0, x.shape[1] + 1), reduction="none")


LOSSES: dict[str, Callable[..., T]] = {"loss": loss, "smooth": smooth, "weighted": weighted}


@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 4, 3)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_losses(name: str, shape: tuple[int, ...]) -> None:
    t = torch.randint(0, 5, (shape[0], *shape[2:]))
    t.view(-1)[0] = 2
    check_gradients(LOSSES[name], torch.randn(shape), t)
    if len(shape) == 4:
        check_gradients(LOSSES[name], torch.randn(shape).to(memory_format=torch.channels_last), t)


def test_ignored_labels_and_low_precision() -> None:
    t = torch.randint(0, 7, (9,))
    t[3] = -100
    check_gradients(loss, torch.randn(9, 7), t)
    check_gradients(loss, torch.randn(9, 7).bfloat16(), t)


def programs(fn: Callable[..., Any], inputs: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return how many sums the programs of a training step have, before and after."""
    seen: list[tuple[int, int]] = []
    original = one_hot_totals.without_one_hot_totals

    def count(p: Program) -> int:
        return sum(isinstance(n, Reduction) and n.op == "sum" for n in p.nodes)

    def watch(p: Program) -> Program:
        seen.append((count(p), count(original(p))))
        return original(p)

    monkeypatch.setattr("altbackend.pipeline.without_one_hot_totals", watch)
    torch._dynamo.reset()
    out = torch.compile(fn, backend="alt", options={"cache_graphs": False, "strict": True})(*inputs)
    out.sum().backward()
    return seen


def test_the_gradient_of_a_cross_entropy_sums_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 5, requires_grad=True)
    assert programs(loss, (x, torch.randint(0, 5, (6,))), monkeypatch)[-1] == (1, 0)


def test_on_a_gpu() -> None:
    x, t = torch.randn(9, 40), torch.randint(0, 40, (9,))
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    (got,) = torch.autograd.grad(triton_run.compiled(loss)(mine, t), mine)
    (want,) = torch.autograd.grad(loss(theirs, t), theirs)
    assert difference(got, want, None, 2e-6) == ""


def several(x: T, t: T) -> T:
    """A row of two elements, and one whose factor varies along it."""
    n = torch.arange(x.shape[1])
    two = torch.where((n == t[:, None].remainder(5)) | (n == 0), 1.0, 0.0)
    varying = torch.where(n == t[:, None].remainder(5), x, 0.0)
    return two * two.sum(1, keepdim=True) + varying * varying.sum(1, keepdim=True)


def test_other_rows_are_summed() -> None:
    x, t = torch.randn(6, 5), torch.randint(0, 5, (6,))
    check(several, x, t)
    check(gradient, x, t)
    assert trace(several, x, t)
