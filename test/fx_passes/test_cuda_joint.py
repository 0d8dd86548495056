"""Passes over the joint graph of a GPU change layouts, not results; they run here on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import backend
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.errors import FallbackWarning
from altbackend.fx_passes import channels_last_joint, output_layouts, pad_matmul, table, wide_products
from altbackend.fx_passes import joint as joint_passes
from altbackend.fx_passes.context import Context
from altbackend.ir.loops import Extern, writes
from altbackend.lowering.graph import lower_graph
from test.fx_passes.test_cuda_inference import T, targets, traced

# Rows of the joint phase that these tests leave out: only layouts are tested.
RANDOM = ("normalisations", "dropout", "checkpointed random")


def joint(fn: Callable[..., T]) -> Callable[..., tuple[T, ...]]:
    """Return a function of loss and gradients, as AOTAutograd's joint graph computes them."""

    def run(*leaves: T) -> tuple[T, ...]:
        inputs = [x.detach().requires_grad_() for x in leaves]
        loss = fn(*inputs)
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    return run


def same(got: tuple[T, ...], want: tuple[T, ...]) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.stride() == w.stride()
        assert float((g.double() - w.double()).norm()) <= 0.02 * float(w.double().norm())


def test_all_three_products_of_a_wide_projection_are_padded() -> None:
    fn = joint(lambda x, w: F.linear(x, w).logsumexp(1).mean())
    x, w = ((torch.randn(s) / 16).bfloat16() for s in ((2048, 1024), (1031, 1024)))
    gm = traced(fn, x, w)
    assert pad_matmul.pad(gm) == 3
    gm.graph.eliminate_dead_code()
    gm.recompile()
    gm.graph.lint()
    wide = x.float(), w.float()  # a CPU without 16-bit products takes minutes for bfloat16
    same(gm(*wide), fn(*wide))
    sides = [n.meta["val"].shape for n in gm.graph.nodes if str(n.target) == "aten.mm.default"]
    assert sorted(map(tuple, sides)) == [(1040, 1024), (2048, 1024), (2048, 1040)]
    pads = [n.args[0] for n in gm.graph.nodes if "constant_pad" in str(n.target)]
    assert len(pads) == len(set(pads)) == 2  # the weight and the gradient of the logits, once each
    gm = traced(fn, x[:64], w)
    assert pad_matmul.pad(gm) == 0  # too small to gain


def rewritten(fn: Callable[..., T], *inputs: T) -> GraphModule:
    """Return the joint graph of a function after the passes of a GPU; its results are the same."""
    gm = traced(joint(fn), *inputs)
    want = gm(*inputs)
    joint_passes(gm, resolve(), Trace("joint", resolve()), "gpu", RANDOM)
    gm.recompile()
    gm.graph.lint()
    same(gm(*inputs), want)
    return gm


@pytest.mark.parametrize("last", [False, True], ids=["read by a kernel", "read by a convolution"])
def test_pools_in_front_of_convolutions_read_the_channels_last_copy(last: bool) -> None:
    def fn(x: T, w: T, v: T) -> T:
        y = F.max_pool2d(x, 3, 1, 1)
        parts = F.conv2d(x, w, padding=1), F.conv2d(y, v) if last else y * v[:1]
        return torch.cat(parts, 1).float().square().mean()

    gm = rewritten(fn, *(torch.randn(s).bfloat16() for s in ((2, 16, 9, 9), (16, 16, 3, 3), (16, 16, 1, 1))))
    (pool,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.max_pool2d_with_indices.default)
    assert all(y.is_contiguous(memory_format=torch.channels_last) == last for y in pool.meta["val"])


def test_convolutions_forward_and_backward_run_channels_last_and_gradients_keep_their_strides() -> None:
    def fn(x: T, w: T, v: T) -> T:
        y = F.conv2d(F.conv2d(x, w, padding=1).relu(), v, stride=2)
        return y.flatten(1).float().square().mean()

    inputs = [torch.randn(s).bfloat16() for s in ((4, 8, 12, 12), (16, 8, 3, 3), (8, 16, 3, 3))]
    gm = rewritten(fn, *inputs)
    for n in gm.graph.nodes:
        if str(n.target) in ("aten.convolution.default", "aten.convolution_backward.default"):
            operands = [a.meta["val"] for a in n.args[: 2 if "backward" not in str(n.target) else 3]]
            assert all(x.is_contiguous(memory_format=torch.channels_last) for x in operands)
    for dtype, tf32, moved in (
        (torch.float32, False, False),
        (torch.float32, True, True),
        (torch.float64, True, False),
    ):
        cfg = resolve()
        wide = traced(joint(fn), *(x.to(dtype) for x in inputs))
        with torch.backends.cudnn.flags(allow_tf32=tf32):
            assert channels_last_joint.run(wide, Context(cfg, Trace("joint", cfg), device="gpu")) == moved


@pytest.mark.parametrize("width", [2, 4], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_narrow_groups_that_the_library_computes_are_plain_between_channels_last_convolutions(
    dtype: torch.dtype, width: int
) -> None:
    """A generated kernel, as that of the convolution in groups of 2, takes the image as it lies."""

    def fn(x: T, w: T, v: T, u: T) -> T:
        y = F.conv2d(F.conv2d(x, w, padding=1).relu(), v, padding=1, groups=16 // width).relu()
        return F.conv2d(y, u).flatten(1).float().square().mean()

    inputs = [torch.randn(s).to(dtype) for s in ((4, 8, 12, 12), (16, 8, 3, 3), (16, width, 3, 3), (8, 16, 3, 3))]
    with torch.backends.cudnn.flags(allow_tf32=True):
        gm = rewritten(fn, *inputs)
    formats = set()
    for n in gm.graph.nodes:
        if str(n.target) in ("aten.convolution.default", "aten.convolution_backward.default"):
            backward = "backward" in str(n.target)
            grouped = n.args[9 if backward else 8] != 1
            is_plain = grouped and (backward if width == 2 else dtype == torch.bfloat16)
            memory_format = torch.contiguous_format if is_plain else torch.channels_last
            is_generated = grouped and width == 2 and not backward  # with a weight in any layout
            operands = [a.meta["val"] for a in n.args[: 3 if backward else 1 if is_generated else 2]]
            assert all(x.is_contiguous(memory_format=memory_format) for x in operands)
            formats.add((backward, grouped))
    assert len(formats) == 4


@pytest.mark.parametrize(("dtype", "window", "plain"), [
    (torch.float32, 7, True),  # the library's channels-last gradient of the weight is slow
    (torch.float32, 5, False),  # kernels of ours
    (torch.bfloat16, 7, False),
])  # fmt: skip
def test_depthwise_convolutions_in_training(dtype: torch.dtype, window: int, plain: bool) -> None:
    def fn(x: T, w: T) -> T:
        return F.conv2d(x, w, padding=window // 2, groups=8).float().square().mean()

    inputs = [torch.randn(s).to(dtype) for s in ((4, 8, 12, 12), (8, 1, window, window))]
    with torch.backends.cudnn.flags(allow_tf32=True):
        gm = rewritten(fn, *inputs)
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert len(calls) == 2  # the convolution and the gradient of its image
    assert all(call.args[0].meta["val"].is_contiguous() == plain for call in calls)


@pytest.mark.parametrize(("window", "dilation", "plain"), [(7, 1, False), (9, 1, True), (7, 2, True)])
def test_channels_last_images_leave_their_layout_for_slow_gradients(window: int, dilation: int, plain: bool) -> None:
    """The library's channels-last gradients of wide float32 windows are slow; up to 7x7, kernels are ours."""

    def fn(x: T, w: T) -> T:
        return F.conv2d(x, w, padding=window // 2 * dilation, dilation=dilation, groups=8).square().mean()

    x = torch.randn(4, 8, 12, 12).to(memory_format=torch.channels_last)
    with torch.backends.cudnn.flags(allow_tf32=True):
        gm = rewritten(fn, x, torch.randn(8, 1, window, window))
    call, *_ = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert call.args[0].meta["val"].is_contiguous() == plain


@pytest.mark.parametrize(("dtype", "channels", "last", "plain"), [
    (torch.float32, 8, False, True),
    (torch.float32, 8, True, False),  # channels-last images stay so
    (torch.float32, 16, False, False),
    (torch.bfloat16, 8, False, False),
])  # fmt: skip
def test_few_channels_in_training(dtype: torch.dtype, channels: int, last: bool, plain: bool) -> None:
    def fn(x: T, w: T) -> T:
        return F.conv2d(x, w, padding=1).float().square().mean()

    inputs = [torch.randn(s).to(dtype) for s in ((4, channels, 12, 12), (8, channels, 3, 3))]
    inputs[0] = inputs[0].to(memory_format=torch.channels_last if last else torch.contiguous_format)
    with torch.backends.cudnn.flags(allow_tf32=True):
        gm = rewritten(fn, *inputs)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert call.args[0].meta["val"].is_contiguous() == plain


@pytest.mark.parametrize("low", [True, False], ids=["bfloat16", "float32"])
def test_biases_of_convolutions_and_their_gradients_are_sums_of_their_own(low: bool) -> None:
    def fn(x: T, w: T, b: T, v: T) -> T:
        return F.conv2d(F.conv2d(x, w, b, padding=1).sigmoid(), v, stride=2).flatten(1).float().square().mean()

    inputs = [torch.randn(s) for s in ((4, 8, 12, 12), (16, 8, 3, 3), (16,), (8, 16, 3, 3))]
    inputs = [x.bfloat16() for x in inputs] if low else inputs
    gm = traced(joint(fn), *inputs)
    want = gm(*inputs)
    joint_passes(gm, resolve(), Trace("joint", resolve()), "gpu", RANDOM)
    gm.recompile()
    gm.graph.lint()
    exact = traced(joint(fn), *(x.double() for x in inputs))(*(x.double() for x in inputs))
    for g, w, e in zip(gm(*inputs), want, exact, strict=True):
        assert g.stride() == w.stride()
        # the sum of a convolution and its bias is rounded twice, as eager's is on a GPU
        assert float((g - e).norm()) <= 2 * float((w - e).norm()) + torch.finfo(inputs[0].dtype).eps * float(e.norm())
    convs = [
        n for n in gm.graph.nodes if str(n.target) in ("aten.convolution.default", "aten.convolution_backward.default")
    ]
    assert len(convs) == 4
    assert all(n.args[2] is None if len(n.args) == 9 else not n.args[10][2] for n in convs)
    eager_gm = traced(joint(fn), *inputs)
    exact = resolve(options={"numerics": "eager"})
    joint_passes(eager_gm, exact, Trace("joint", exact), "gpu", RANDOM)
    assert any(n.args[2] is not None for n in eager_gm.graph.nodes if str(n.target) == "aten.convolution.default")


def _gradients(g: T, x: T, w: T) -> tuple[T, ...]:
    """Return gradients of weights, which autocast casts, and gradients that have other readers too."""
    dw, dx = torch.mm(g.t(), x), torch.mm(g, w)
    return (
        dw.float(),
        torch.mm(x.t(), g).t().float().t().view(-1),
        dx.float() * 2,
        torch.narrow(torch.mm(g, w), 0, 0, 3).float(),
        dx,
    )


def test_products_that_the_graph_returns_as_float32_are_written_so_by_the_library() -> None:
    def gm_on(device: str) -> torch.fx.GraphModule:
        with FakeTensorMode():
            inputs = [torch.empty(s, dtype=torch.bfloat16, device=device) for s in ((64, 32), (64, 48), (32, 48))]
            return make_fx(_gradients)(*inputs)

    gm = gm_on("cuda")
    before = [(x.shape, x.stride(), x.dtype) for x in output_layouts.of(gm)]
    assert wide_products.widen(gm) == 2
    gm.graph.lint()
    assert [(x.shape, x.stride(), x.dtype) for x in output_layouts.of(gm)] == before
    products = [n for n in gm.graph.nodes if ".mm." in str(n.target)]
    assert [str(n.target) for n in products] == ["aten.mm.dtype", "aten.mm.default", "aten.mm.dtype", "aten.mm.default"]
    assert [n.meta["val"].dtype for n in products] == [torch.float32, torch.bfloat16] * 2
    assert wide_products.widen(gm_on("cpu")) == 0  # whose library has no such product


def test_a_product_that_is_most_of_the_memory_stays_in_16_bits_until_it_is_cast() -> None:
    def count(rows: int) -> int:
        with FakeTensorMode():
            x, g, h = (torch.empty(64, n, dtype=torch.bfloat16, device="cuda") for n in (1024, rows, 512))
            return wide_products.widen(
                make_fx(lambda x, g, h: (torch.mm(g.t(), x).float(), torch.mm(h.t(), x).float()))(x, g, h)
            )

    assert count(4096) == 2
    assert count(32000) == 1


def test_a_joint_pass_that_fails_leaves_the_graph_as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(gm: torch.fx.GraphModule, ctx: Context) -> int:
        for n in gm.graph.nodes:
            n.meta.clear()
        raise ValueError("broken pass")

    rows = tuple(replace(row, run=broken) if row.name == "normalisations" else row for row in table.PASSES)
    monkeypatch.setattr(table, "PASSES", rows)
    gm = traced(joint(lambda x: x.sin().sum()), torch.randn(4))
    with pytest.raises(ValueError, match="broken pass"):
        backend._joint_passes(gm, resolve(options={"strict": True}), Trace("joint", resolve()))
    gm = traced(joint(lambda x: x.sin().sum()), torch.randn(4))
    metas = [dict(n.meta) for n in gm.graph.nodes]
    with pytest.warns(FallbackWarning, match="broken pass"):
        backend._joint_passes(gm, resolve(), Trace("joint", resolve()))
    assert [n.meta.keys() for n in gm.graph.nodes] == [m.keys() for m in metas]
    x = torch.randn(4)
    torch.testing.assert_close(gm(x)[1], x.cos())


def test_results_keep_their_strides() -> None:
    gm = traced(lambda x: (x * 2, x + 1), torch.randn(2, 3, 4, 5))
    traced_values = output_layouts.of(gm)
    assert output_layouts.restore(gm, traced_values) == 0
    other = [w.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1) for w in traced_values]
    assert output_layouts.restore(gm, other) == 2
    gm.recompile()
    x = torch.randn(2, 3, 4, 5)
    for got, want, layout in zip(gm(x), (x * 2, x + 1), other, strict=True):
        assert torch.equal(got, want)
        assert got.stride() == layout.stride()


def test_loops_that_nobody_reads_are_dropped() -> None:
    def fn(x: T) -> T:
        return torch.as_strided_scatter(torch.zeros(12), x * 2, (3, 4), (4, 1))

    gm = traced(fn, torch.randn(3, 4))
    assert "aten.as_strided_scatter.default" in targets(gm)
    program, _ = lower_graph(gm, resolve())
    loops = [n for n in program.nodes if not isinstance(n, Extern)]
    read = {o.buffer for o in program.outputs}
    assert all(set(writes(n)) & read for n in loops)
    assert len(loops) == 1


def test_products_in_a_branch_are_padded_too() -> None:
    """Both branches of a `cond` have products whose rows are no multiple of 16 bytes."""

    def fn(x: T, w: T) -> T:
        return torch.cond(x.sum() > 0, lambda a, b: torch.relu(a @ b), lambda a, b: (a @ b).cos(), (x, w)) * 2

    x, w = torch.randn(2048, 2001, dtype=torch.bfloat16), torch.randn(2001, 2003, dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        gm = make_fx(fn, tracing_mode="fake")(x, w)
    cfg = resolve()
    joint_passes(gm, cfg, Trace("joint", cfg), "gpu", RANDOM)
    bodies = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm]
    assert len(bodies) == 2
    for body in bodies:
        (product,) = body.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        assert all(size % 8 == 0 for a in product.args for size in a.meta["val"].shape[-1:])
    wide = x.float(), w.float()
    same((gm(*wide),), (fn(*wide),))


def test_sums_of_a_residual_connection_read_the_copy_that_the_convolution_reads() -> None:
    """A sum over images in two layouts took five times as long."""

    def fn(x: T, w: T) -> T:
        return (x + F.conv2d(x, w, padding=1)).mean(0).float().square().sum()

    gm = rewritten(fn, torch.randn(2, 16, 10, 9).bfloat16(), torch.randn(16, 16, 3, 3).bfloat16())
    (add, *_) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert all(a.meta["val"].is_contiguous(memory_format=torch.channels_last) for a in add.all_input_nodes)
