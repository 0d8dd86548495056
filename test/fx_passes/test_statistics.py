"""Normalisations of joint graphs in parts: a backward saves the statistics, and repeats pointwise operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.fx_passes import statistics
from altbackend.fx_passes.graph import is_call
from test.fx_passes.test_cuda_inference import traced

T = torch.Tensor
aten = torch.ops.aten


def group_norm(x: T, weight: T, bias: T) -> T:
    return F.group_norm(F.group_norm(x.sin(), 2, weight, bias).relu(), 4)


def plain(x: T, weight: T, bias: T) -> T:
    return F.group_norm(x, 8) * weight.sum() + bias.sum()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("fn", "dtype", "memory_format"), [
    (group_norm, torch.float32, torch.channels_last),
    (group_norm, torch.bfloat16, torch.contiguous_format),
    (plain, torch.float64, torch.contiguous_format),
])  # fmt: skip
def test_group_norms_train_as_in_eager(
    fn: Callable[[T, T, T], T], dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    x = torch.randn(3, 8, 5, 7).to(dtype).contiguous(memory_format=memory_format)
    inputs = [x, torch.randn(8).to(dtype), torch.randn(8).to(dtype)]
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-4
    results = []
    torch._dynamo.reset()
    for call in (fn, torch.compile(fn, backend="alt", options={"strict": True})):
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = call(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, torch.cos(y.detach()))))
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def test_a_group_norm_leaves_its_statistics_alone() -> None:
    gm = traced(lambda x: F.group_norm(x, 2), torch.randn(3, 8, 5, 7))
    assert statistics.expose(gm) == 1
    (norm,) = gm.graph.find_nodes(op="call_function", target=aten.native_group_norm.default)
    assert {u.args[1] for u in norm.users if u.users} <= {1, 2}
    assert sum(is_call(n, aten.sub.Tensor) for n in gm.graph.nodes) == 1
