"""Compiled code on a real GPU against eager: `python -m pytest test/gpu`. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend import alt
from altbackend.report import stats

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
T = torch.Tensor


def norms(x: T, w: T, b: T) -> T:
    for _ in range(4):
        y = F.layer_norm(x, (x.shape[-1],), w, b)
        x = x + torch.softmax(F.gelu(y) * torch.sigmoid(y), -1)
    return x


def mixed(x: T, w: T, b: T) -> tuple[T, ...]:
    y = F.gelu(x @ w.t()[: x.shape[1]] if w.dim() == 2 else x * w + b)
    return y.sum(0), y.amax(1), y.t().contiguous(), x.argmax(-1), y.cumsum(1), (y > 0).any(), y.std(0)


def losses(x: T, w: T, b: T) -> T:
    return F.cross_entropy(F.layer_norm(x, (x.shape[-1],), w, b), torch.arange(x.shape[0], device=x.device) % 7)


def build(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend=alt, options={"strict": True}, **options)


def check_close(got: Any, want: Any, exact: Any) -> None:
    """No further from the float64 answer than eager twice over, norm-wise, and some roundings."""
    for g, w, e in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want, exact)), strict=True):
        assert g.dtype == w.dtype
        assert g.shape == w.shape
        assert g.stride() == w.stride()
        if not g.is_floating_point():
            assert (g == w).double().mean() > 0.999
            continue
        size = float(e.norm()) + 1e-30
        mine, eager = float((g.double() - e).norm()) / size, float((w.double() - e).norm()) / size
        assert mine <= 2 * eager + 4 * torch.finfo(g.dtype).eps, (mine, eager)


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [20000, 50257, 131072])
def test_sums_of_exponentials(columns: int, of: torch.dtype) -> None:
    """No further from float64 than eager twice over, also where all terms are off by the same.

    A term may pass through 30 additions, each of which rounds a sum of about 1.
    """
    torch.manual_seed(0)
    x = (torch.randn(40, columns, device="cuda") * 4).to(of)
    x[0], x[1, 5], x[2, 7], x[3, :9000] = -torch.inf, torch.inf, torch.nan, -torch.inf
    for row, low in enumerate((3.25, -3.3, -7.7, -11.1, -90.0, -200.0), 4):
        x[row, 1:], x[row, 0] = low, 0.0
    want, exact = (torch.logsumexp(t, -1) for t in (x.float(), x.double()))
    got = build(lambda t: torch.logsumexp(t.float(), -1))(x)
    assert got[:2].tolist() == want[:2].tolist()
    assert got[2].isnan()
    mine, eager = ((t.double() - exact)[3:].abs() for t in (got, want))
    assert (mine <= 2 * eager + torch.finfo(torch.float32).eps * (4 * exact[3:].abs() + 15)).all(), (mine, eager)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_bits(dtype: torch.dtype) -> None:
    """Every bfloat16 number, and some beside it, is rounded as eager does."""

    def fn(t: T) -> tuple[T, T]:
        y = t.to(dtype)
        return y, y.float() * 2

    x = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.bfloat16)
    for t in (x, x.float() * (1 + 2**-20)):
        for got, want in zip(build(fn)(t), fn(t), strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 256), (33, 1000), (8, 4096), (5, 20000), (3000, 7)], ids=str)
@pytest.mark.parametrize("fn", [norms, mixed, losses])
def test_forward(fn: Callable[..., Any], shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    w, b = torch.rand(shape[1], device="cuda", dtype=dtype) + 0.5, torch.randn(shape[1], device="cuda", dtype=dtype)
    check_close(build(fn)(x, w, b), fn(x, w, b), fn(x.double(), w.double(), b.double()))


@pytest.mark.parametrize("fn", [norms, losses])
def test_gradients(fn: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(512, 768, device="cuda"), torch.rand(768, device="cuda"), torch.randn(768, device="cuda")]

    def gradients(f: Callable[..., Any], *xs: T) -> tuple[T, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in xs]
        f(*leaves).square().sum().backward()
        return tuple(x.grad for x in leaves)  # type: ignore[misc]

    check_close(gradients(build(fn), *inputs), gradients(fn, *inputs), gradients(fn, *(x.double() for x in inputs)))


@pytest.mark.parametrize("size", [66, 100, 33])
def test_windows_that_are_indexed_in_16_bits(size: int) -> None:
    """The assembler translates two packed additions of the same constant wrongly (`compile_pool/packed_adds.py`)."""
    x, dy = torch.randn(24, 64, size, device="cuda"), torch.randn(24, 64, 7, device="cuda")
    bias = torch.randn(64, 1, device="cuda")

    def gradients(fn: Callable[..., T]) -> tuple[T, ...]:
        leaves = [t.clone().requires_grad_() for t in (x, bias)]
        return torch.autograd.grad(fn(*leaves), leaves, dy)

    def windows(x: T, bias: T) -> T:
        return F.adaptive_avg_pool1d(x + bias, 7)

    torch.testing.assert_close(gradients(build(windows)), gradients(windows), rtol=1e-5, atol=1e-4)


def gradients_of_loss(run: Callable[..., T], *leaves: T) -> tuple[T, ...]:
    """Loss and gradients; the loss is compiled too, so nothing of eager runs in the thread of the backward before."""
    for x in leaves:
        x.grad = None
    loss = run(*leaves)
    loss.backward()
    return loss.detach(), *(x.grad for x in leaves)  # type: ignore[arg-type]


def test_backward_starts_in_a_thread_without_a_context() -> None:
    def fn(x: T, w: T) -> T:
        return F.gelu(x * w).square().mean()

    def leaves(dtype: torch.dtype) -> list[T]:
        torch.manual_seed(0)
        return [torch.randn(64, 256, device="cuda").to(dtype).requires_grad_() for _ in range(2)]

    got, want = gradients_of_loss(build(fn), *leaves(torch.float32)), gradients_of_loss(fn, *leaves(torch.float32))
    check_close(got, want, gradients_of_loss(fn, *leaves(torch.float64)))


def test_training_pads_wide_projections_and_runs_convolutions_channels_last() -> None:
    def projection(x: T, w: T, v: T) -> T:
        return F.cross_entropy(x @ w.t() @ v.t(), torch.arange(x.shape[0], device=x.device) % 7)

    def convolution(x: T, w: T, v: T) -> T:
        y = F.conv2d(F.relu(F.conv2d(x, w, padding=1)), v, stride=2)
        return F.max_pool2d(y.sigmoid(), 2).square().mean()

    for fn, shapes in (
        (projection, ((2048, 512), (512, 512), (1027, 512))),
        (convolution, ((8, 16, 32, 32), (32, 16, 3, 3), (24, 32, 3, 3))),
    ):

        def leaves(dtype: torch.dtype, shapes: Any = shapes) -> list[T]:
            torch.manual_seed(0)
            return [(torch.randn(s, device="cuda") / 8).bfloat16().to(dtype).requires_grad_() for s in shapes]

        low = leaves(torch.bfloat16)
        got, want = gradients_of_loss(build(fn), *low), gradients_of_loss(fn, *leaves(torch.bfloat16))
        check_close(got, want, gradients_of_loss(fn, *leaves(torch.float64)))
        assert all(x.grad is not None and x.grad.stride() == x.stride() for x in low)


def test_norm_chain_is_one_kernel() -> None:
    x, w = torch.randn(256, 4096, device="cuda"), torch.ones(4096, device="cuda")
    stats.reset()
    with torch.no_grad():
        build(norms)(x, w, w)
    assert stats.snapshot().kernels == 1


def test_attention_is_a_library_call() -> None:
    def fn(q: T, k: T, v: T) -> T:
        return F.scaled_dot_product_attention(q.sin(), k, v, is_causal=True).cos()

    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    stats.reset()
    check_close(build(fn)(q, k, v), fn(q, k, v), fn(q.double(), k.double(), v.double()))
    assert stats.snapshot().library_calls == 1


def with_gradients(fn: Callable[..., T], inputs: list[T], used: int) -> tuple[T, ...]:
    """Return the result, and in training the gradients of the first `used` inputs."""
    out = fn(*inputs)
    if not out.requires_grad:
        return (out,)
    return (out.detach(), *(g.contiguous() for g in torch.autograd.grad(out.sin().sum(), inputs[:used])))


@pytest.mark.parametrize("kind", ["plain", "bias", "bias of each window", "causal", "masked in full"])
@pytest.mark.parametrize("trains", [False, True])
def test_attention_of_few_keys(kind: str, trains: bool) -> None:
    """The memory-efficient kernel takes the place of the kernel that torch chooses."""

    def fn(x: T, bias: T) -> T:
        q, k, v = x.reshape(6, 49, 3, 4, 32).permute(2, 0, 3, 1, 4)
        mask: Any = None if kind in ("plain", "causal") else bias.permute(2, 0, 1)[None].sin()
        if kind == "bias of each window":
            mask = mask + torch.arange(6, device=x.device, dtype=x.dtype)[:, None, None, None]
        if kind == "masked in full":
            mask = mask.masked_fill(torch.arange(49, device=x.device)[:, None] == 5, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=kind == "causal").mul(2)

    low = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((6, 49, 384), (49, 49, 4))]
    exact = [t.double() for t in low]
    low[0].requires_grad_(trains), exact[0].requires_grad_(trains)
    run = build(fn)
    check_close(with_gradients(run, low, 1), with_gradients(fn, low, 1), with_gradients(fn, exact, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        with_gradients(run, low, 1)
        torch.cuda.synchronize()
    assert sum("fmha_cutlass" in e.name for e in seen.events()) == 1 + trains


@pytest.mark.parametrize("trains", [False, True])
def test_attention_over_strided_operands_is_fused(trains: bool) -> None:
    """A permuted bias, and the points of an image as tokens: torch computes these in float32 and stores the scores."""

    def biased(x: T, bias: T) -> T:
        return F.scaled_dot_product_attention(x, x.sin(), x, attn_mask=bias.permute(2, 0, 1)[None])

    def points(x: T, bias: T) -> T:
        tokens = x.flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(tokens, tokens, tokens * 2)

    for fn, sizes, used in ((biased, (2, 4, 128, 64), 2), (points, (2, 64, 16, 8), 1)):
        shapes = (sizes, (128, 128, 4))
        low = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_(trains) for s in shapes]
        exact = [t.detach().double().requires_grad_(trains) for t in low]
        stats.reset()
        got = with_gradients(build(fn), low, used)
        assert stats.snapshot().library_calls == 1 + trains
        check_close(got, with_gradients(fn, low, used), with_gradients(fn, exact, used))


def test_dynamic_sizes_compile_once() -> None:
    run = build(norms, dynamic=True)
    stats.reset()
    for n, m in ((16, 256), (17, 256), (3, 1000), (128, 64)):
        x, w = torch.randn(n, m, device="cuda"), torch.ones(m, device="cuda")
        check_close(run(x, w, w), norms(x, w, w), norms(x.double(), w.double(), w.double()))
    assert stats.snapshot().graphs == 1


def test_misaligned_inputs_mutation_and_numbers_on_the_cpu() -> None:
    def fn(x: T, y: T, k: T) -> T:
        y.mul_(2).add_(x)
        return x * k + y

    base = torch.randn(1025, device="cuda")
    x, k = base[1:], torch.tensor(3.0)
    y, z = torch.randn(1026, device="cuda")[2:], torch.empty(0)
    z = y.clone()
    got, want = build(fn)(x, y, k), fn(x, z, k)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(y, z)


def test_index_out_of_range_is_reported_by_the_next_call() -> None:
    run = build(lambda x, i: x[i] * 2)
    x = torch.randn(8, device="cuda")
    run(x, torch.tensor([9], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="out of range"):
        run(x, torch.tensor([1], device="cuda"))


def test_no_synchronisation_streams_and_capture() -> None:
    run = build(norms)
    x, w = torch.randn(64, 256, device="cuda"), torch.ones(256, device="cuda")
    want = run(x, w, w)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, w, w)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.testing.assert_close(run(x, w, w), want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, w, w)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, want)


def every_value(dtype: torch.dtype) -> T:
    """All finite values of a 16-bit dtype but the subnormal ones."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device="cuda").view(dtype)
    return x[x.isfinite() & ((x == 0) | (x.abs() >= torch.finfo(dtype).tiny))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "fn",
    [torch.exp, torch.sigmoid, torch.sqrt, torch.reciprocal, F.gelu, lambda x: x / 3.0],
    ids=["exp", "sigmoid", "sqrt", "reciprocal", "gelu", "divide"],
)
def test_cheap_functions_err_by_an_eighth_of_the_rounding(fn: Callable[[T], T], dtype: torch.dtype) -> None:
    """Of every 16-bit value: the result is no further from float64's than half a unit and an eighth."""
    x = every_value(dtype)
    got, exact = build(fn)(x).double(), fn(x.double())
    info = torch.finfo(dtype)
    fits = exact.isfinite() & (exact.abs() <= info.max)
    # GELU is x/2 * (1 + erf): the rounding of that sum, in float32, counts
    unit = exact.abs() * info.eps + info.tiny * info.eps + (x.double().abs() * 2.0**-22 if fn is F.gelu else 0)
    error = ((got - exact).abs() / unit)[fits & ((exact.abs() >= info.tiny) | (exact == 0))]
    assert float(error.max()) <= 0.5 + 0.125


def test_softmaxes_of_one_element_are_exact() -> None:
    """A difference of a product and itself is 0: contracted, it would be the product's rounding error."""

    def logarithms(x: T, w: T) -> T:
        return torch.log_softmax(x * w, -1)

    x, w = torch.randn(3000, 1, device="cuda"), torch.tensor([0.3], device="cuda")
    assert not build(logarithms)(x, w).any()


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_quotients_by_one_divisor_a_row_are_those_of_a_division(size: float) -> None:
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1.0, -3.0, float("inf"), float("-inf"), float("nan")], device="cuda")
    x = torch.cat([torch.randn(2000, 1000, device="cuda"), special.expand(2000, 7)], 1)
    divisors = (torch.randn(2000, 1, device="cuda") * size).index_copy(
        0, torch.arange(7, device="cuda"), special[:, None]
    )
    got = build(lambda x, y: (x / y, x.amax(1)))(x, divisors)[0]
    want = x / divisors
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(got.isnan(), want.isnan())
