"""Attentions behind convolutions read contiguous heads, although the convolutions' results are channels-last."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes.attention import layouts
from altbackend.fx_passes.context import Context
from test.compare import check, check_gradients
from test.fx_passes.test_cuda_inference import T, traced


class Behind(nn.Module):
    """Heads that are views of a convolution's result [batch, channels, length]; the channels are the sequence."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(24, 12, 4, 2, 1) if transposed else nn.Conv2d(12, 12, 3, padding=1)

    def forward(self, x: T) -> T:
        y = self.conv(x).sigmoid()
        y = y.flatten(2) if y.dim() == 4 else y
        n, length, width = y.shape
        q = y.view(n, length, 4, width // 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(n, length, width)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("transposed", [True, False])
def test_results(transposed: bool, training: bool) -> None:
    x = torch.randn(3, 24, 32) if transposed else torch.randn(3, 12, 8, 8)
    module = Behind(transposed)
    if training:
        check_gradients(module, x)
    else:
        with torch.no_grad():
            check(module.eval(), x)


def test_only_strided_operands_are_copied() -> None:
    def fn(q: T, k: T, v: T) -> T:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0] + k.sum()

    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    cfg = resolve()
    gm = traced(fn, q, k.transpose(2, 3).contiguous().transpose(2, 3), v)
    ctx = Context(cfg, Trace("inference", cfg), device="cpu")
    assert layouts.run(gm, ctx) == 1
    assert layouts.run(gm, ctx) == 0
    (call,) = (n for n in gm.graph.nodes if "dot_product" in str(n.target))
    assert all(a.meta["val"].stride(-1) == 1 for a in call.args[:3])
