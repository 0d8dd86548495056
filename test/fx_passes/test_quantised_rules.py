"""Each pass over quantised graphs on its example: it fires, not twice, and results are eager's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp
from altbackend.compat.torch_api import exact_byte_products, fast_byte_weights
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import onednn
from altbackend.fx_passes.context import Context
from altbackend.fx_passes.quantised import convolutions, linears, products, report, weight_only

T = torch.Tensor
D = torch.ops.quantized_decomposed
pytestmark = pytest.mark.skipif(
    not onednn.available() or not exact_byte_products(), reason="products of bytes are not exact on this processor"
)


def linear(x: T, w: T, scale: T, zero: T) -> T:
    d = D.dequantize_per_channel(w.view(32, 32), scale, zero, 0, -128, 127, torch.int8)
    return F.relu(F.linear(D.dequantize_per_tensor(x, 0.05, 128, 0, 255, torch.uint8), d)) + 1


def convolution(x: T, w: T, scale: T, zero: T) -> T:
    d = D.dequantize_per_channel(w.view(32, 8, 2, 2), scale, zero, 0, -128, 127, torch.int8)
    image = D.dequantize_per_tensor(x.view(2, 8, 8, 4), 0.05, 128, 0, 255, torch.uint8)
    return D.quantize_per_tensor(F.relu(F.conv2d(image, d)), 0.1, 0, 0, 255, torch.uint8) + 1


def weight(x: T, w: T, scale: T, zero: T) -> T:
    return F.linear(x[:4].bfloat16(), w.view(32, 32).bfloat16()) * scale.bfloat16()


@dataclass(frozen=True)
class Example:
    """A pass, a function that it rewrites once, and the tolerance of its results."""

    run: Callable[[GraphModule, Context], int]
    fn: Callable[..., T]
    tolerance: float = 1e-4


EXAMPLES = {
    "products": Example(products.run, linear),
    "linears": Example(linears.run, linear),
    "convolutions": Example(convolutions.run, convolution, 1.0),  # one quantum
    "weights in bytes": Example(weight_only.run, weight, 2**-6),
}


def inputs() -> tuple[T, ...]:
    torch.manual_seed(0)
    x = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    w = torch.randint(-128, 128, (32 * 32,), dtype=torch.int64).to(torch.int8)
    return x, w, torch.rand(32) * 0.01 + 0.001, torch.zeros(32, dtype=torch.int64)


def traced(fn: Callable[..., T], *args: T) -> tuple[GraphModule, Context]:
    cfg = resolve(options={"freezing": True})
    gm = make_fx(fn, decomp.table(), tracing_mode="fake")(*args)
    return gm, Context(cfg, Trace("graph", cfg), static=(1, 2, 3))


@pytest.mark.parametrize("name", EXAMPLES)
def test_fires_once(name: str) -> None:
    if name == "weights in bytes" and not fast_byte_weights():
        pytest.skip("no fast product with bytes on this processor")
    example, args = EXAMPLES[name], inputs()
    gm, ctx = traced(example.fn, *args)
    assert example.run(gm, ctx) == 1, ctx.trace.decisions
    assert example.run(gm, ctx) == 0
    gm.graph.lint()
    gm.recompile()
    got, want = gm(*args).float(), example.fn(*args).float()
    torch.testing.assert_close(got, want, rtol=example.tolerance, atol=example.tolerance)
    report.run(gm, ctx)
    assert not any(d.verdict == "no product of integers" for d in ctx.trace.decisions)


def test_a_graph_of_which_nothing_matches() -> None:
    gm, ctx = traced(linear, *inputs())
    report.run(gm, ctx)
    assert ctx.trace.decisions[-1].verdict == "no product of integers"
