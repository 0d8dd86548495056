"""Gradients of extrema compare positions in place of a checked scatter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import altbackend
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import extremum_gradients
from altbackend.fx_passes.context import Context
from test.fx_passes.test_cuda_inference import targets, traced
from test.fx_passes.test_cuda_joint import joint, same

T = torch.Tensor
EXTREMA: dict[str, tuple[Callable[[Any], T], int]] = {
    "maximum": (lambda x: x.max(1)[0].sin().sum(), 1),
    "minimum that keeps the dimension": (lambda x: x.min(-1, keepdim=True).values.sin().sum(), 1),
    "both": (lambda x: (x.max(0)[0] * x.min(0)[0]).sum(), 2),
    "of a maximum": (lambda x: x.max(1)[0].max(0)[0].sum(), 2),
    "whose positions are read": (lambda x: (lambda v, i: (v * i).sum())(*x.max(2)), 1),
    "second largest": (lambda x: x.topk(2, 1).values.sum(), 0),
    "a gather": (lambda x: x.gather(1, x.long() % 8 * 0).sum(), 0),
    "running maximum": (lambda x: x.cummax(1).values.sum(), 0),
}


def rewritten(gm: torch.fx.GraphModule) -> int:
    count = extremum_gradients.run(gm, Context(resolve(), Trace("test", resolve())))
    gm.graph.lint()
    gm.recompile()
    return count


@pytest.mark.parametrize("name", EXTREMA)
def test_results(name: str) -> None:
    fn, count = EXTREMA[name]
    x = torch.randn(4, 8, 5)
    x[0, 2, 1], x[1, 3] = math.nan, 1.0  # ties, and a number that no comparison finds
    gm = traced(joint(fn), x)
    assert rewritten(gm) == count
    assert targets(gm).count("aten.scatter.src") == (name == "second largest")
    for got, want in zip(gm(x), joint(fn)(x), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize(("size", "dtype"), [(256, "uint8"), (257, "int16"), (32_769, "int32")], ids=str)
def test_positions_are_saved_in_few_bytes(size: int, dtype: str) -> None:
    fn = joint(lambda x: x.max(1)[0].sum())
    x = torch.rand(2, size)
    x[0, -1] = 2.0
    gm = traced(fn, x)
    assert rewritten(gm) == 1
    (cast,) = (n for n in gm.graph.nodes if "_to_copy" in str(n.target))
    assert str(cast.kwargs["dtype"]) == f"torch.{dtype}"
    same(gm(x), fn(x))


@pytest.mark.parametrize("shape", [(6, 7), (2, 5, 3, 4)], ids=str)
def test_training_is_as_eager(shape: tuple[int, ...]) -> None:
    def fn(x: T, w: T) -> Any:
        values, positions = (x * w).tanh().max(1)
        return values.square().mean() + (values * positions).sum()

    leaves = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    compiled = torch.compile(fn, backend=altbackend.alt)
    got, want = (torch.autograd.grad(f(*leaves), leaves) for f in (compiled, fn))
    torch.testing.assert_close(got, want)
