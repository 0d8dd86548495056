"""Symbolic sizes: one compilation serves many sizes, and gives eager's results at each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend import alt
from test.compare import OPTIONS, check, difference

pytestmark = pytest.mark.sample(2)

FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "pointwise": lambda x: x * 2 + x.shape[0],
    "broadcast": lambda x: x + x[:1] + x[:, :1],
    "reduce": lambda x: [x.sum(0), x.sum(1), x.mean(), x.amax(0), x.argmax(1), x.var(1)],
    "softmax": lambda x: [F.softmax(x, 1), F.log_softmax(x, 0), F.layer_norm(x, (x.shape[1],))],
    "views": lambda x: [x.t() + 1, x.flatten() * 2, x.unsqueeze(1).expand(-1, 3, -1) + 0, x.reshape(-1, 2).sum(1)],
    "slices": lambda x: [x[1:] - x[:-1], x[:, ::2] * 2, x[-2:] + 1, x.flip(0), x[: x.shape[0] // 2] + 0],
    "cat": lambda x: [torch.cat([x, x * 2], 0), torch.cat([x, x[:, :3]], 1).sum(1), torch.stack([x, x])],
    "pad": lambda x: [F.pad(x, (1, 2)), F.pad(x, (0, 0, 2, 1)).sum(0), x.roll(1, 0), x.repeat(2, 3)],
    "index": lambda x: [x[torch.arange(x.shape[0]) // 2], x.gather(1, x.argsort(1)), x.tril()],
    "scan": lambda x: [x.cumsum(0), x.cumsum(1), x.cumsum(1).softmax(0)],
    "matmul": lambda x: [x @ x.t(), (x.t() @ x).relu() / x.shape[0]],
    "arange": lambda x: [torch.arange(x.shape[0]) * 2, torch.zeros(x.shape[1]) + x.sum(0), torch.full(x.shape, 2.0)],
}
SIZES = [(6, 8), (9, 4), (3, 14), (40, 10)]


def counted(fn: Callable[..., Any], eager: bool = False) -> tuple[Callable[..., Any], list[int]]:
    """`fn` compiled for any size, and a list that grows by one with each compilation."""
    graphs: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return gm.forward if eager else alt(gm, inputs, options=dict(OPTIONS))

    return torch.compile(fn, backend=backend, dynamic=True, fullgraph=True), graphs


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_one_compilation_serves_every_size(name: str) -> None:
    run, graphs = counted(FUNCTIONS[name])
    for size in SIZES:
        check(FUNCTIONS[name], torch.randn(size), run=run)
    torch._dynamo.reset()
    traced, least = counted(FUNCTIONS[name], eager=True)
    for size in SIZES:
        traced(torch.randn(size))
    assert len(graphs) == len(least) <= 2  # 2: slicing alone makes Dynamo tell some of the sizes apart


def test_sizes_back_and_forth() -> None:
    """Workspaces of one size are not used for another."""
    fn = FUNCTIONS["softmax"]
    run, _ = counted(fn)
    for k in range(12):
        check(fn, torch.randn(3 + k % 5, 4 + 2 * (k % 3)), run=run)


def test_gradients_at_several_sizes() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.layer_norm(F.gelu(x @ w), (w.shape[1],)).softmax(-1) * x.sum(1, keepdim=True)).mean(0)

    run, graphs = counted(fn)
    for n, k, m in ((5, 6, 7), (8, 6, 9), (3, 12, 4)):
        grads = []
        inputs = torch.randn(n, k), torch.randn(k, m)
        for f in (fn, run):
            x, w = (t.clone().requires_grad_() for t in inputs)
            out = f(x, w)
            out.sum().backward() if f is None else (out * torch.arange(m)).sum().backward()
            grads.append((out.detach(), x.grad, w.grad))
        for got, want in zip(grads[1], grads[0], strict=True):
            assert difference(got, want, tolerance=3e-5, strides=False) == ""
    assert len(graphs) == 1


def test_mutation_of_any_size() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        x[1:] += x[:-1].clone()
        return x.sum(0)

    run, graphs = counted(fn)
    for size in SIZES:
        check(fn, torch.randn(size), run=run)
    assert len(graphs) == 1


def test_a_size_that_happens_to_equal_a_number_stays_a_symbol() -> None:
    """The weight is expanded to [size, 3, 3], and the first size is 3."""
    weight = torch.randn(3, 3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).relu()

    def laid_out(n: int, m: int) -> torch.Tensor:
        return torch.randn(3, n, m).permute(1, 2, 0)  # of this layout torch makes a bmm of an expanded weight

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return alt(gm, inputs, options=dict(OPTIONS))

    graphs: list[int] = []
    run = torch.compile(fn, backend=backend, fullgraph=True)
    for n, m in ((3, 2), (4, 5), (7, 4)):
        x = laid_out(n, m)
        torch._dynamo.mark_dynamic(x, [0, 1])  # raises where a compilation takes the size for a number
        assert difference(run(x), fn(x), tolerance=1e-5, strides=False) == ""
    assert len(graphs) == 1


def test_a_view_with_symbolic_bounds_of_a_written_input() -> None:
    """AOTAutograd cuts such a result from the input, at the place in its storage where the graph's result begins."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x[7 % x.shape[0] : x.shape[0] + 5]
        x.copy_(x.flip(0))
        return y

    run, graphs = counted(fn)
    for n in (2, 5, 9):
        mine, theirs = (torch.arange(2 * n)[::2] for _ in range(2))
        got, want = run(mine), fn(theirs)
        assert torch.equal(got, want)
        assert torch.equal(mine, theirs)
        got.zero_()
        want.zero_()
        assert torch.equal(mine, theirs)  # both are views
    assert len(graphs) <= 2  # Dynamo tells sizes below 7 apart


def test_sizes_become_dynamic_by_themselves() -> None:
    fn = FUNCTIONS["reduce"]
    run = torch.compile(fn, backend=alt, options=dict(OPTIONS))
    for size in SIZES:
        check(fn, torch.randn(size), run=run)


def test_dynamic_threads_and_large_sizes() -> None:
    run, _ = counted(lambda x: [x.sum(0), x.sum(), F.softmax(x, 1), x.exp()])
    for size in ((700, 300), (3, 5), (300, 1000)):
        check(lambda x: [x.sum(0), x.sum(), F.softmax(x, 1), x.exp()], torch.randn(size), run=run)


NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch": lambda x: F.batch_norm(x, None, None, torch.arange(8.0), torch.ones(8), True),
    "instance": F.instance_norm,
    "group": lambda x: F.group_norm(x, 4),
    "layer": lambda x: F.layer_norm(x.transpose(1, 3), (8,)).transpose(1, 3),
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("name", list(NORMS))
def test_a_gradient_whose_sizes_are_written_otherwise(name: str) -> None:
    """The sizes of an upsampled half are `2 * (n // 2)`, which a condition makes equal to `n`."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        half = F.interpolate(F.max_pool2d(x, 2), scale_factor=2)
        return torch.cat([half, NORMS[name](x)], 1)

    run, _ = counted(fn)
    for n in (16, 18, 26):
        x = torch.randn(1, 8, n, n, requires_grad=True)
        gradient = torch.randn(1, 16, n, n)
        (got,) = torch.autograd.grad(run(x), x, gradient)
        (want,) = torch.autograd.grad(fn(x), x, gradient)
        assert difference(got, want, strides=False) == ""
