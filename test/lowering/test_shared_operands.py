"""A value that library calls read both ways, as it is and transposed, is stored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.ir.loops import Extern, Pointwise
from test import graphs, triton_run
from test.compare import compiled, difference, twin

T = torch.Tensor


def gradients(x: T, g: T) -> tuple[T, T]:
    """Both gradients of a linear layer: one product reads the rows of what flows back, one its columns."""
    d = g * torch.sigmoid(x)
    return d @ x.t(), d.t() @ x


def stacked(x: T, g: T) -> tuple[T, T]:
    d = (g * torch.sigmoid(x)).expand(3, 6, 6)
    return torch.bmm(d, d.mT), torch.bmm(d.mT, d)


def computed_apart(x: T, g: T) -> tuple[T, T]:
    return (g * torch.sigmoid(x)) @ x.t(), (g.t() * torch.sigmoid(x.t())) @ x


def images(x: T, g: T) -> tuple[T, T]:
    d = (x * torch.sigmoid(g)).view(2, 3, 6, 1)
    d = d.expand(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    return torch.nn.functional.conv2d(d, torch.ones(2, 3, 1, 1)), d.permute(0, 2, 3, 1).reshape(-1, 3) @ x[:3]


def both_returned(x: T, g: T) -> tuple[T, T, T]:
    d = g * torch.sigmoid(x)
    a, b = d.t() @ x, g.t() * torch.sigmoid(x.t())
    b[0] = 7
    return a, b, d


def written_between(x: T, g: T) -> tuple[T, T]:
    a = (g * torch.sigmoid(x)) @ x.t()
    g.mul_(2)
    return a, (g * torch.sigmoid(x)).t() @ x


def of_a_row_and_a_column(x: T, g: T) -> tuple[T, T]:
    d = x[0][:, None] * g[0]
    return d @ x.t(), d.t() @ x


def symmetric(x: T, g: T) -> tuple[T, T]:
    d = torch.sigmoid(x) + torch.sigmoid(x).t()
    return d @ g, d.t() @ g


ONCE = [gradients, stacked, computed_apart, of_a_row_and_a_column]
PROGRAMS = [*ONCE, images, both_returned, written_between, symmetric]


def inputs() -> tuple[T, T]:
    torch.manual_seed(2)
    return torch.randn(6, 6), torch.randn(6, 6)


@pytest.mark.parametrize("f", ONCE, ids=lambda f: f.__name__)
def test_a_value_and_its_transpose_are_stored_once(f: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    (graph,) = graphs.trace(f, *inputs())
    nodes = graphs.schedule(graph).program.nodes
    assert sum(isinstance(n, Extern) for n in nodes) == 2
    assert sum(isinstance(n, Pointwise) for n in nodes) == 1


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("compile_", [compiled, triton_run.compiled], ids=["cpu", "gpu"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_results_and_writes_are_those_of_eager(
    f: Callable[..., Any], dynamic: bool, compile_: Callable[..., Any]
) -> None:
    torch._dynamo.reset()
    ours, theirs = twin(inputs()), twin(inputs())
    got, want = compile_(f, dynamic=dynamic)(*ours), f(*theirs)
    for g, w in zip([*got, *ours], [*want, *theirs], strict=True):
        assert not difference(g, w)


def test_a_written_result_leaves_its_transpose_alone() -> None:
    torch._dynamo.reset()
    x, g = inputs()
    a, b, d = compiled(both_returned)(x, g)
    assert len({t.untyped_storage().data_ptr() for t in (a, b, d)}) == 3
