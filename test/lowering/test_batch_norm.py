"""Batch normalisation in training: statistics in pieces on a GPU, gradients, and the number of kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend import alt
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import compiled
from test.graphs import schedule, trace

T = torch.Tensor
Run = Callable[..., T]
LAYOUTS = {"channels-last": torch.channels_last, "planes": torch.contiguous_format}


def norm_relu(x: T, w: T, b: T, mean: T, var: T) -> T:
    return F.batch_norm(x, mean, var, w, b, True, 0.1, 1e-5).relu()


def step(run: Run, x: T, w: T, b: T) -> list[T]:
    """Return the result, the gradients, and the running statistics after one step."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    out = run(*leaves, mean, var)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights), mean, var]


def distance(a: T, b: T) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("centre", [0.0, 1000.0])
def test_pieces_are_as_accurate_as_eager_around_a_large_mean(layout: str, centre: float) -> None:
    x = (torch.randn(8, 6, 8, 8) + centre).contiguous(memory_format=LAYOUTS[layout])
    w, b = torch.rand(6) + 0.5, torch.randn(6)
    got = step(triton_run.compiled(norm_relu), x, w, b)
    exact = step(norm_relu, x.double(), w.double(), b.double())
    for g, e, near in zip(got, exact, step(norm_relu, x, w, b), strict=True):
        assert distance(g, e) <= max(3 * distance(near, e), 2e-6)


def test_three_kernels_each_way() -> None:
    x = torch.randn(16, 64, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_()
    w, b = torch.rand(64).requires_grad_(), torch.randn(64).requires_grad_()
    forward, backward = trace(norm_relu, x, w, b, torch.zeros(64), torch.ones(64))
    # statistics of pieces, of channels, result; sums of pieces, of channels, gradient of x
    assert schedule(forward, ctx=ScheduleContext(H200)).kernels == 3
    assert schedule(backward, ctx=ScheduleContext(H200)).kernels == 3


def test_an_outlier_at_the_first_place_does_not_cancel_the_variance() -> None:
    x = torch.randn(8, 4, 8, 8) + 1000
    x[0, :, 0, 0] = -1000.0
    x = x.contiguous(memory_format=torch.channels_last)
    w, b = torch.ones(4), torch.zeros(4)
    got = step(triton_run.compiled(norm_relu), x, w, b)
    exact = step(norm_relu, x.double(), w.double(), b.double())
    for k in (0, 4, 5):
        assert distance(got[k], exact[k]) < 1e-5


def test_sizes_that_do_not_divide_take_two_passes() -> None:
    x = torch.randn(3, 5, 7, 9).contiguous(memory_format=torch.channels_last)
    w, b = torch.rand(5), torch.randn(5)
    got = step(triton_run.compiled(norm_relu), x, w, b)
    for g, e in zip(got, step(norm_relu, x, w, b), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


SHAPES = [(6, 5), (4, 5, 7), (4, 5, 6, 7), (2, 5, 3, 4, 4)]


@pytest.mark.sample(5, every_value=True)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_on_a_cpu(shape: tuple[int, ...], affine: bool, training: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    tensors = [x, torch.rand(5).double(), torch.randn(5).double()] if affine else [x]

    def fn(x: T, *wb: T) -> T:
        w, b = wb if wb else (None, None)
        mean, var = torch.full((5,), 0.3, dtype=torch.float64), torch.full((5,), 1.7, dtype=torch.float64)
        return torch.tanh(F.batch_norm(x, mean, var, w, b, training))

    def gradients(run: Run) -> list[T]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        return list(torch.autograd.grad(run(*leaves).square().sum(), leaves))

    run = torch.compile(fn, backend=alt, options={"strict": True})
    for g, e in zip(gradients(run), gradients(fn), strict=True):
        torch.testing.assert_close(g, e)


def test_positions_of_a_pooling_are_kept_in_16_bits() -> None:
    saved_dtypes: list[torch.dtype] = []

    def fn(x: T) -> T:
        return F.max_pool2d(x.sin(), 3, 2, 1).exp()

    def pack(t: T) -> T:
        saved_dtypes.append(t.dtype)
        return t

    x = torch.randn(2, 3, 12, 12)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = torch.compile(fn, backend=alt, options={"strict": True})(a)
    out.sum().backward()
    fn(b).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert torch.int16 in saved_dtypes
    assert torch.int64 not in saved_dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_running_statistics_keep_their_dtype(dtype: torch.dtype) -> None:
    """torch traces `_batch_norm_with_update` with float32 statistics, whatever their dtype."""

    def update(x: T, w: T, b: T, mean: T, var: T) -> T:
        out: T = torch.ops.aten._batch_norm_with_update(x, w, b, mean, var, 0.1, 1e-5)[0]
        return out

    x, w, b = torch.randn(40, 5, 7), torch.rand(5) + 0.5, torch.randn(5)
    exact = step(update, x.double(), w.double(), b.double())
    run = torch.compile(update, backend=alt, fullgraph=True, options={"strict": True})
    rounded = [t.to(dtype) for t in (x, w, b)]
    for g, e, near in zip(step(run, *rounded), exact, step(update, *rounded), strict=True):
        assert g.dtype == dtype
        assert distance(g, e) <= max(2 * distance(near, e), 2e-6)


@pytest.mark.parametrize("training", [False, True])
def test_every_result_has_the_dtype_of_eager(training: bool) -> None:
    def step(x: T, w: T, b: T, mean: T, var: T) -> tuple[T, ...]:
        results: tuple[T, ...] = torch.ops.aten.native_batch_norm(x, w, b, mean, var, training, 0.1, 1e-5)
        return results

    xs = [t.bfloat16() for t in (torch.randn(4, 5, 7), torch.ones(5), torch.zeros(5), torch.zeros(5), torch.ones(5))]
    got = torch.compile(step, backend=alt, fullgraph=True, options={"strict": True})(*(t.clone() for t in xs))
    want = step(*(t.clone() for t in xs))
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in want]


@pytest.mark.parametrize("compile_", [compiled, triton_run.compiled], ids=["cpu", "gpu"])
def test_gradients_are_those_of_the_rounded_operand(compile_: Callable[..., Run]) -> None:
    """Rows that differ before they are rounded to 16 bits alone have no variance, and so the weight has no gradient."""
    torch._dynamo.reset()
    x = torch.tensor([[0.0010], [0.0011]]).expand(2, 8).to(torch.bfloat16)
    ones, upstream = torch.ones(8, dtype=torch.bfloat16), torch.tensor([[1.0], [3.0]], dtype=torch.bfloat16)
    weight = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)

    def fn(x: T, bias: T, weight: T) -> T:
        return (F.batch_norm(x + bias, None, None, weight, training=True) * upstream).sum()

    (expected,) = torch.autograd.grad(fn(x, ones, weight), weight)
    (got,) = torch.autograd.grad(compile_(fn)(x, ones, weight), weight)
    assert not expected.any()
    assert not got.any()
