"""Transposed operands of batched products are copied as they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import product_operands
from altbackend.fx_passes.context import Context
from test.fx_passes.test_cuda_inference import traced

T = torch.Tensor
aten = torch.ops.aten


def scores(x: T) -> T:
    q = x.view(3, 14, 4, 8).transpose(1, 2)
    return q @ q.transpose(-1, -2)


def rewritten(fn: Callable[..., T], *inputs: T) -> tuple[GraphModule, int]:
    gm = traced(fn, *inputs)
    want = gm(*inputs)
    cfg = resolve()
    count = product_operands.run(gm, Context(cfg, Trace("test", cfg)))
    gm.graph.lint()
    gm.recompile()
    assert torch.allclose(gm(*inputs), want, atol=1e-5)
    return gm, count


def copies(gm: GraphModule) -> list[torch.fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=aten.clone.default)


def test_keys_are_copied_like_queries() -> None:
    gm, count = rewritten(scores, torch.randn(3, 14, 32))
    assert count == 1
    assert [list(c.meta["val"].shape) for c in copies(gm)] == [[3, 4, 14, 8]]  # queries and keys share it


def test_other_readers_keep_the_copy() -> None:
    def fn(x: T) -> T:
        k = x.view(3, 14, 4, 8).permute(0, 2, 3, 1).contiguous().view(12, 8, 14)
        return torch.bmm(k.transpose(1, 2), k) + k.sum()

    assert rewritten(fn, torch.randn(3, 14, 32))[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_compiled_attention(dtype: torch.dtype, training: bool) -> None:
    def fn(x: T) -> T:
        q = x.view(3, 14, 4, 8).transpose(1, 2)
        return (scores(x).softmax(-1) @ q).transpose(1, 2).reshape(3, 14, 32)

    x = torch.randn(3, 14, 32).to(dtype).requires_grad_(training)
    got = torch.compile(fn, backend="alt", options={"strict": True, "disabled_passes": "attention"})(x)
    want = fn(x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    if training:
        ours, eager = (torch.autograd.grad(y.float().square().sum(), x)[0] for y in (got, want))
        torch.testing.assert_close(ours, eager, rtol=5e-2, atol=5e-2)
