"""Gradients of enlarged images are sums of windows in place of scatters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import altbackend
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import enlarged_gradients
from altbackend.fx_passes.context import Context
from test.fx_passes.test_cuda_inference import targets, traced
from test.fx_passes.test_cuda_joint import joint, same

T = torch.Tensor


def enlarged(*factors: float) -> Callable[[T], T]:
    """Return a function that gathers as torch's decomposition of a nearest-neighbour upsampling does."""

    def gather(x: T) -> T:
        sizes = x.shape[-len(factors) :]
        rows = [(torch.arange(int(n * f)) / f).long() for n, f in zip(sizes, factors, strict=True)]
        places = [r.view(-1, *[1] * (len(rows) - 1 - k)) for k, r in enumerate(rows)]
        index: Any = (Ellipsis, *places)
        return (x * 2)[index].sin()

    return gather


CASES: dict[str, tuple[Callable[[T], T], tuple[int, ...], int]] = {
    "twice": (enlarged(2, 2), (2, 3, 4, 5), 1),
    "three times, and once": (enlarged(3, 1), (2, 3, 4, 5), 1),
    "a sequence": (enlarged(4), (2, 3, 7), 1),
    "a volume": (enlarged(2, 3, 1), (1, 2, 3, 4, 2), 1),
    "two in a row": (lambda x: enlarged(2, 2)(enlarged(2, 2)(x)), (2, 3, 4, 5), 2),
    "one and a half": (enlarged(1.5, 1.5), (2, 3, 4, 6), 0),
    "a half": (enlarged(0.5, 0.5), (2, 3, 4, 6), 0),
    "once": (enlarged(1, 1), (2, 3, 4, 5), 0),
    "backwards": (lambda x: x[:, torch.arange(3).flip(0)].sin(), (2, 3), 0),
    "by data": (lambda x: x[:, x[0].long()].sin(), (2, 3), 0),
    "of another order": (lambda x: x[:, torch.arange(6) % 3].sin(), (2, 3), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    fn, shape, count = CASES[name]
    gm = traced(joint(lambda x: fn(x).sum()), torch.randn(shape))
    scatters = sum("index_put" in t for t in targets(gm))
    assert enlarged_gradients.run(gm, Context(resolve(), Trace("test", resolve()))) == count
    gm.graph.lint()
    gm.recompile()
    assert sum("index_put" in t for t in targets(gm)) == scatters - count
    x = torch.randn(shape)
    same(gm(x), joint(lambda x: fn(x).sum())(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_training_is_as_eager(layout: torch.memory_format, dtype: torch.dtype) -> None:
    def fn(x: T) -> T:
        return F.interpolate(x.tanh(), scale_factor=2.0) * 3

    x = torch.randn(2, 8, 5, 6).to(dtype).contiguous(memory_format=layout).requires_grad_()
    upstream = torch.randn(2, 8, 10, 12).to(dtype)
    compiled = torch.compile(fn, backend=altbackend.alt, dynamic=False)
    (got,) = torch.autograd.grad(compiled(x), x, upstream)
    (eager,) = torch.autograd.grad(fn(x), x, upstream)
    exact = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(fn(exact), exact, upstream.double())
    assert got.stride() == eager.stride()
    assert (got - want).norm() <= 1.5 * (eager - want).norm() + torch.finfo(torch.float32).eps * want.norm()


def test_sums_of_integers_stay_scatters() -> None:
    def fn(x: T) -> T:
        zeros = torch.full((3,), 0, dtype=torch.int32)
        return zeros.index_put((torch.arange(6) // 2,), x, accumulate=True)

    gm = traced(fn, torch.arange(6, dtype=torch.int32))
    assert enlarged_gradients.run(gm, Context(resolve(), Trace("test", resolve()))) == 0
