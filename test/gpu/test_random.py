"""Random numbers of kernels on a real GPU: the same bits as the calls give, fresh for every call, right in training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend import alt
from altbackend.runtime import philox as calls

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
N = 1 << 20


def build(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend=alt, fullgraph=True, options={"strict": True, **options})


@pytest.mark.parametrize("sizes", [(N,), (511, 768), (1021, 333), (3, 40000), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kernels_give_the_bits_of_the_calls(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    run = build(lambda x: (torch.rand_like(x), torch.randint(0, 1000, sizes, device="cuda"), torch.randn_like(x)))
    x = torch.empty(sizes, dtype=dtype, device="cuda")
    run(x)
    torch.manual_seed(3)
    u, k, z = run(x)
    torch.manual_seed(3)
    seeds = calls.philox_seeds(3, x.device)
    assert torch.equal(u, calls.philox_uniform(seeds[0], x, dtype))
    assert torch.equal(k, calls.philox_integers(seeds[1], sizes, 0, 1000, torch.int64))
    torch.testing.assert_close(z, calls.philox_normal(seeds[2], x, dtype), atol=4e-6, rtol=2 * torch.finfo(dtype).eps)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    u = build(lambda: torch.rand(N, device="cuda"))().double()
    steps = torch.arange(1, N + 1, device="cuda").double() / N
    assert math.sqrt(N) * float((torch.sort(u).values - steps).abs().max()) < 2.6
    for lag in (1, 2, 3, 4, 32, 128, 1024):
        assert abs(float(torch.corrcoef(torch.stack([u[lag:], u[:-lag]]))[0, 1])) * math.sqrt(N) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_a_training_step_with_dropout(dtype: torch.dtype, cudagraphs: bool) -> None:
    run = build(lambda x, w: F.dropout(F.gelu(x), 0.1) * w, cudagraphs=cudagraphs)
    w = torch.full((512, 768), 2.0, device="cuda", dtype=dtype)
    masks = []
    for _ in range(4):
        x = (torch.rand(512, 768, device="cuda") + 1).to(dtype).requires_grad_()
        y = run(x, w)
        (got,) = torch.autograd.grad(y.sum(), [x])
        kept = (y != 0).detach()
        masks.append(kept.clone())
        (slope,) = torch.autograd.grad(F.gelu(x.float()).sum(), [x])
        want = kept * slope * 2 / 0.9
        torch.testing.assert_close(got.float(), want.float(), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-4)
        assert abs(float(kept.float().mean()) - 0.9) < 5 * math.sqrt(0.09 / kept.numel())
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(masks))


def test_eagers_own_numbers_on_demand() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [F.dropout(x, 0.3), torch.rand_like(x), torch.randn(5, device="cuda")]

    run, x = build(fn, fallback_random=True), torch.ones(1000, 32, device="cuda")
    run(x)
    torch.manual_seed(8)
    got, state = run(x), torch.cuda.get_rng_state()
    torch.manual_seed(8)
    want = fn(x)
    torch.testing.assert_close(got, want)
    assert torch.equal(state, torch.cuda.get_rng_state())
