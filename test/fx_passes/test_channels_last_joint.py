"""Training on a CPU runs convolutions channels-last where that gains, and changes no result and no stride."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import channels_last_joint, onednn
from altbackend.fx_passes.context import Context
from test.compare import check_gradients
from test.fx_passes.test_cuda_inference import T, traced
from test.fx_passes.test_cuda_joint import joint
from test.graphs import schedule, trace

LAST = torch.channels_last


def two(x: T, w: T, v: T) -> T:
    return F.conv2d(F.hardswish(F.conv2d(x, w, padding=1)), v)


def lone(x: T, w: T) -> T:
    return F.conv2d(x, w, padding=1)


def depthwise(x: T, w: T) -> T:
    return F.conv2d(x, w, padding=1, groups=8).relu()


def normalised(x: T, w: T, v: T, scale: T, bias: T) -> T:
    y = F.conv2d(x, w, padding=1)
    y = F.batch_norm(y, None, None, scale, bias, training=True)
    return F.conv2d(F.hardswish(y), v, padding=1).mean((2, 3))


def transposed(x: T, w: T) -> T:
    return F.conv_transpose2d(x, w, stride=2)


def pooled(x: T, w: T, v: T) -> T:
    y = x * 2
    return torch.cat([F.max_pool2d(y, 3, 1, 1), F.conv2d(y, w), F.conv2d(F.avg_pool2d(y, 3, 1, 1), v)], 1)


IMAGE, WEIGHT = (2, 8, 10, 9), (16, 8, 3, 3)
GRAPHS: dict[str, tuple[Callable[..., T], tuple[tuple[int, ...], ...], bool]] = {  # whether the layout changes
    "two": (two, (IMAGE, WEIGHT, (8, 16, 1, 1)), True),
    "lone": (lone, (IMAGE, WEIGHT), False),
    "depthwise": (depthwise, (IMAGE, (8, 1, 3, 3)), True),
    "normalised": (normalised, (IMAGE, WEIGHT, (8, 16, 3, 3), (16,), (16,)), True),
    "pooled": (pooled, (IMAGE, (8, 8, 1, 1), (8, 8, 1, 1)), True),
    "transposed": (transposed, (IMAGE, (8, 4, 2, 2)), False),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_layouts(name: str) -> None:
    fn, sizes, moves = GRAPHS[name]
    cfg = resolve()
    gm = traced(joint(lambda *xs: fn(*xs).square().mean()), *(torch.randn(s) for s in sizes))
    assert channels_last_joint.run(gm, Context(cfg, Trace("joint", cfg), device="cpu")) == moves
    for n in gm.graph.nodes:
        if str(n.target) in ("aten.convolution.default", "aten.convolution_backward.default"):
            images = [a.meta["val"] for a in n.args[: 3 if "backward" in str(n.target) else 2]]
            assert all(x.is_contiguous(memory_format=LAST) for x in images) or not moves


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_results_and_strides(name: str, layout: torch.memory_format, dtype: torch.dtype) -> None:
    fn, sizes, _ = GRAPHS[name]
    inputs = [torch.randn(s).to(dtype) for s in sizes]
    inputs[0] = inputs[0].contiguous(memory_format=layout)
    check_gradients(fn, *inputs)


def test_pools_read_the_copy_of_convolutions() -> None:
    fn, sizes, _ = GRAPHS["pooled"]
    cfg = resolve()
    gm = traced(joint(lambda *xs: fn(*xs).square().mean()), *(torch.randn(s) for s in sizes))
    channels_last_joint.run(gm, Context(cfg, Trace("joint", cfg), device="cpu"))
    (pool,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.max_pool2d_with_indices.default)
    values, positions = pool.meta["val"]
    assert values.is_contiguous(memory_format=LAST)
    assert positions.is_contiguous(memory_format=LAST)


@pytest.mark.skipif(onednn.computes(torch.float16), reason="oneDNN has float16 here")
def test_dtypes_without_kernels_of_onednn_keep_their_layout() -> None:
    cfg = resolve()
    gm = traced(joint(lambda *xs: two(*xs).square().mean()), *(torch.randn(s).half() for s in GRAPHS["two"][1]))
    assert channels_last_joint.run(gm, Context(cfg, Trace("joint", cfg), device="cpu")) == 0


def test_a_gradient_that_a_batch_norm_reads_twice_is_stored_as_it_lies() -> None:
    """Stored plain between channels-last images, it was transposed twice."""
    x, g = (torch.randn(2, 8, 6, 5).to(memory_format=LAST) for _ in range(2))
    w, mean, rstd = torch.randn(8), torch.randn(8), torch.rand(8) + 1

    def fn(g: T, x: T, w: T, mean: T, rstd: T) -> T:
        dy = torch.where(x > 3, torch.tanh(g) * torch.sigmoid(x), torch.exp(g))
        norm = torch.ops.aten.native_batch_norm_backward
        dx: T = norm(dy, x, w, None, None, mean, rstd, True, 1e-5, [True] * 3)[0]
        return dx

    program = schedule(trace(fn, g, x, w, mean, rstd)[0]).program
    images = [b for b in program.buffers.values() if b.kind == "temp" and len(b.sizes) == 4]
    assert images
    assert all(b.strides[1] == 1 for b in images)


def test_gradients_of_biases_are_as_exact_as_eagers() -> None:
    """The library's sums over channels-last images of float32 are not."""
    x, w = torch.randn(24, 16, 40, 40), torch.randn(16, 4, 3, 3)
    b = torch.randn(16, requires_grad=True)

    def fn(b: T) -> T:
        return F.leaky_relu(F.conv2d(x, w, b, padding=1, groups=4))

    cotangent = torch.randn(24, 16, 40, 40)
    (got,) = torch.autograd.grad(torch.compile(fn, backend="alt")(b), b, cotangent)
    exact = torch.where(F.conv2d(x, w, b, padding=1, groups=4) > 0, cotangent, 0.01 * cotangent).double().sum((0, 2, 3))
    assert float((got - exact).norm() / exact.norm()) < 2e-6
