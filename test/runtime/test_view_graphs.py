"""Graphs of views alone: calls rebuild the views of their inputs and run no compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from altbackend import alt
from altbackend.errors import FallbackWarning
from altbackend.runtime import aot_wrapper

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "flatten": lambda a: a.flatten(1),
    "permute": lambda a: a.permute(2, 0, 1),
    "transpose": lambda a: a.transpose(0, 2),
    "select": lambda a: a.select(1, 2),
    "slice": lambda a: a[:, 1:],
    "unsqueeze and expand": lambda a: a.unsqueeze(0).expand(3, -1, -1, -1),
    "squeeze": lambda a: a[:1].squeeze(),
    "squeeze of dimensions": lambda a: a[:1, :1].squeeze((0, 1)),
    "diagonal": lambda a: a.diagonal(0, 1, 2),
    "unfold": lambda a: a.unfold(1, 2, 1),
    "unbind": lambda a: a.unbind(0)[1],
    "split": lambda a: a.split(2, 2),
    "as strided": lambda a: a.as_strided((2, 3), (1, 2), 1),
    "another dtype": lambda a: a.view(torch.int32),
    "the input itself": lambda a: (a, a.transpose(1, 2)),
    "detached": lambda a: a.detach(),
}


# library calls, and graphs that AOTAutograd wraps
CALLED = {
    ("as strided", None),
    ("another dtype", None),
    ("unbind", True),
    ("split", True),
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return for each graph that is wrapped whether it needs no call."""
    answers: list[bool] = []
    real = aot_wrapper._needs_no_graph

    def noted(*args: Any) -> bool:
        answers.append(real(*args))
        return answers[-1]

    monkeypatch.setattr(aot_wrapper, "_needs_no_graph", noted)
    return answers


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Options of graphs that are stored: these have wrappers of their own."""
    return {"cache_dir": str(tmp_path), "cache_graphs": True}


def both(f: Callable[[Tensor], Any], a: Tensor, options: dict[str, Any]) -> None:
    expected, got = f(a), torch.compile(f, backend="alt", fullgraph=True, options=options)(a)
    wholes = [y if isinstance(y, tuple) else (y,) for y in (expected, got)]
    for e, g in zip(*wholes, strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0)
        assert (g.stride(), g.storage_offset(), g.requires_grad) == (e.stride(), e.storage_offset(), e.requires_grad)
        assert g.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        assert (g is a) == (e is a)


@pytest.mark.sample(2)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_views_of_the_input(
    name: str, requires_grad: bool, graphs: list[bool], options: dict[str, Any]
) -> None:
    a = torch.randn(4, 4, 4, requires_grad=requires_grad)
    for _ in range(2):  # compiled, and loaded from the cache
        torch._dynamo.reset()
        both(FUNCTIONS[name], a, options)
    is_called = (name, requires_grad) in CALLED or (name, None) in CALLED
    assert (graphs == [True, True]) == (not is_called)
    with torch.no_grad():
        both(FUNCTIONS[name], a, options)


def test_a_graph_that_writes_or_computes_is_called(graphs: list[bool], options: dict[str, Any]) -> None:
    a = torch.randn(4, 4)
    got, total = torch.compile(lambda a: (a.T, a.sum()), backend="alt", options=options)(a)
    assert torch.equal(got, a.T)
    torch.testing.assert_close(total, a.sum())
    b = a.clone()
    got = torch.compile(lambda b: b.add_(1).T, backend="alt", options=options)(b)
    torch.testing.assert_close(got, (a + 1).T)
    assert got._base is not None
    assert torch.equal(b, a + 1)
    assert True not in graphs


def test_gradients_and_writes_pass_through_a_view(options: dict[str, Any]) -> None:
    a = torch.randn(3, 4, requires_grad=True)
    y = torch.compile(lambda a: a.flatten(), backend="alt", options=options)(a * 1)
    (y * y).sum().backward()
    torch.testing.assert_close(a.grad, 2 * a.detach())
    b = torch.zeros(3, 4)
    torch.compile(lambda b: b.view(-1), backend="alt", options=options)(b).add_(1)
    assert b.eq(1).all()


def test_under_transforms_the_graph_runs_operator_by_operator(options: dict[str, Any]) -> None:
    compiled: list[Any] = []

    def caught(gm: Any, inputs: Any) -> Any:
        compiled.append(alt(gm, inputs, options=options))
        return compiled[-1]

    a = torch.randn(2, 3, 4)
    torch.compile(lambda a: a.transpose(0, 1), backend=caught)(a[0])
    with pytest.warns(FallbackWarning, match=r"torch\.func"):
        got = torch.func.vmap(lambda a: compiled[0](a)[0])(a)
    torch.testing.assert_close(got, a.mT)


def test_tangents_pass_through_a_view(options: dict[str, Any]) -> None:
    f = torch.compile(lambda a: a.transpose(0, 1), backend="alt", options=options)
    a, tangent = torch.randn(2, 3), torch.randn(2, 3)
    f(a)
    with forward_ad.dual_level(), pytest.warns(FallbackWarning, match="tangents"):
        got = forward_ad.unpack_dual(f(forward_ad.make_dual(a, tangent)))
    assert got.tangent is not None
    torch.testing.assert_close(got.tangent, tangent.T)
