"""A value is stored once if a library call reads its padded copy: kernels read the copy too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir.loops import Extern, Pointwise
from test import graphs, triton_run
from test.compare import compiled, difference

T = torch.Tensor


def bias_gradient(g: T, x: T) -> tuple[T, ...]:
    """Gradients of a linear layer whose width is padded: the sum reads what the products read."""
    d = torch.sigmoid(g) * g.exp()
    wide = F.pad(d, (0, 3))
    return wide.t() @ x, d.sum(0)


def on_all_sides(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp()
    return F.pad(d, (2, 1, 1, 0), value=3.0) @ torch.ones(8, 2), d.amax(1), d * g.sum()


def with_a_scan(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp()
    return F.pad(d, (0, 3)).t() @ x, d.softmax(1)


def half(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g.half()) * g.half().exp()
    return F.pad(d, (0, 3)).t() @ x.half(), d.float().sum(0)


def behind_views(g: T, x: T) -> tuple[T, ...]:
    d = (torch.sigmoid(g) * g.exp()).view(2, 3, 5).view(6, 5)
    return F.pad(d, (0, 3)).t() @ x, d.sum(0)


def cut(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp()
    return F.pad(d, (-1, 3)).t() @ x, d.sum(0)


def two_paddings(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp()
    return F.pad(d, (0, 3)).t() @ x, F.pad(d, (0, 1)).t() @ x, d.sum(0)


def returned(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp()
    return F.pad(d, (0, 3)).t() @ x, d.sum(0), d


def padding_returned(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp()
    wide = F.pad(d, (0, 3))
    return wide.t() @ x, d.sum(0), wide


def another_product(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp()
    return F.pad(d, (0, 3)).t() @ x, d.sum(0), d.t() @ x


def padding_in_kernels(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp()
    return F.pad(d, (0, 3)).sum(0), d.sum(0)


def through_a_comparison(g: T, x: T) -> tuple[T, ...]:
    """A value that three operators read, all of which lead to one padding."""
    d = torch.sigmoid(g) * g.exp() / g.exp().sum(1, keepdim=True)
    return (F.pad(torch.where(d > 0.1, d, -d), (0, 3)).t() @ x,)


def with_a_total(g: T, x: T) -> tuple[T, ...]:
    d = torch.sigmoid(g) * g.exp() / g.exp().sum(1, keepdim=True)
    return F.pad(torch.where(d > 0.1, d, -d), (0, 3)).t() @ x, d.amax(1)


ONCE = [bias_gradient, on_all_sides, with_a_scan, half, behind_views, through_a_comparison]
OTHERS = [
    cut,
    two_paddings,
    returned,
    padding_returned,
    another_product,
    padding_in_kernels,
    with_a_total,
]


def inputs() -> tuple[T, T]:
    torch.manual_seed(1)
    return torch.randn(6, 5), torch.randn(6, 4)


@pytest.mark.parametrize("f", [*ONCE, *OTHERS], ids=lambda f: f.__name__)
def test_the_value_has_one_place(f: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    (graph,) = graphs.trace(f, *inputs())
    program = graphs.schedule(graph, ctx=triton_run.TARGET).program
    stored = [n.out for n in program.nodes if isinstance(n, Pointwise) and "sigmoid.default" in str(n.origins)]
    plain = [b for b in stored if program.buffers[b].sizes == (6, 5)]
    assert any(isinstance(n, Extern) for n in program.nodes) == (f is not padding_in_kernels)
    assert (not plain) == (f in ONCE)


@pytest.mark.sample(6, every_value=True)
@pytest.mark.parametrize("compile_", [compiled, triton_run.compiled], ids=["cpu", "gpu"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", [*ONCE, *OTHERS], ids=lambda f: f.__name__)
def test_results_are_those_of_eager(f: Callable[..., Any], dynamic: bool, compile_: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    g, x = inputs()
    for a, b in zip(compile_(f, dynamic=dynamic)(g, x), f(g, x), strict=True):
        assert not difference(a, b, tolerance=2e-3 if f is half else None)
