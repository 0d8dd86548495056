"""Autograd requests to a compiled function besides one gradient: compiled, and loaded from the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian

from altbackend.errors import FallbackWarning
from test import ways

T = torch.Tensor
W = torch.arange(16.0).sin().view(4, 4)


def fn(x: T) -> T:
    return torch.tanh(x @ W) * x


def two(x: T) -> tuple[T, T]:
    y = x.exp()
    return y * 2, (y * x).sum()


@pytest.fixture
def forms(tmp_path: Path) -> Callable[..., Iterator[Callable[..., Any]]]:
    """A function compiled anew, and after a reset from the cache."""

    def made(f: Callable[..., Any], **options: Any) -> Iterator[Callable[..., Any]]:
        for hit in (False, True):
            torch._dynamo.reset()
            with ways.Verdicts() as seen:
                yield torch.compile(
                    f, backend="alt", options={"cache_dir": str(tmp_path), "cache_graphs": True, **options}
                )
            assert ("hit" in [verdict for verdict, _ in seen.found]) == hit

    return made


@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_of_several_cotangents_at_once(forms: Any, rows: int) -> None:
    x, cotangents = torch.randn(4, requires_grad=True), torch.randn(rows, 4)
    want = torch.autograd.grad(fn(x), x, cotangents, is_grads_batched=True)
    for compiled in forms(fn, strict=True):
        y = compiled(x)
        results = torch.autograd.grad(y, x, cotangents, is_grads_batched=True, retain_graph=True)
        torch.testing.assert_close(results, want)
        once = torch.autograd.grad(y, x, cotangents[0])  # and one by itself afterwards
        torch.testing.assert_close(once[0], want[0][0])


def test_vectorized_jacobians(forms: Any) -> None:
    x = torch.randn(4)
    for compiled in forms(fn, strict=True):
        torch.testing.assert_close(jacobian(compiled, x, vectorize=True), jacobian(fn, x))
    for compiled in forms(two, strict=True):  # one cotangent is batched, the other is not
        torch.testing.assert_close(jacobian(compiled, x, vectorize=True), jacobian(two, x))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_forward_mode_tangents_are_kept(forms: Any, needs_grad: bool) -> None:
    x, tangent = torch.randn(4), torch.randn(4)
    for compiled in forms(fn):
        compiled(x.clone().requires_grad_(needs_grad)).sum().backward() if needs_grad else compiled(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(needs_grad), tangent)
            want = forward_ad.unpack_dual(fn(dual))
            with pytest.warns(FallbackWarning, match="forward-mode tangents"):
                results = forward_ad.unpack_dual(compiled(dual))
            torch.testing.assert_close(results, want)
            assert not forward_ad.unpack_dual(compiled(x.clone().requires_grad_(needs_grad))).tangent


def test_dynamo_does_not_trace_a_backward_that_runs_in_a_traced_function(forms: Any) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def noting(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def outer(y: T, x: T) -> T:
        y.sum().backward()
        assert x.grad is not None
        return x.grad * 2

    for compiled in forms(fn, strict=True):
        x = torch.randn(4, requires_grad=True)
        compiled(x).sum().backward()  # the backward is compiled by now
        x.grad = None
        y = compiled(x)
        got = torch.compile(outer, backend=noting)(y, x)
        torch.testing.assert_close(got, 2 * torch.autograd.grad(fn(x).sum(), x)[0])
        files = [str(n.meta.get("stack_trace")) for gm in graphs for n in gm.graph.nodes]
        assert not [f for f in files if "altbackend" in f.replace("test_autograd_modes", "")]


def test_whole_training_steps(forms: Any) -> None:
    """The backward of a compiled step runs while Dynamo is active, from the second call on by our own wrapper."""
    weight = torch.randn(4, 4, requires_grad=True)

    def step(x: T) -> T:
        loss = torch.tanh(x @ weight).square().sum()
        loss.backward()
        return loss * 2

    for compiled in forms(step):
        for _ in range(3):
            x, weight.grad = torch.randn(3, 4), None
            loss = compiled(x)
            got, weight.grad = weight.grad, None
            torch.testing.assert_close(loss, step(x))
            torch.testing.assert_close(got, weight.grad)
