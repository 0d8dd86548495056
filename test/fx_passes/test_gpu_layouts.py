"""Channels-last regions: which convolutions gain, and that all readers of a region on a GPU share one copy."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import channels_last, housekeeping, mixed_layouts, onednn, output_layouts
from altbackend.fx_passes.context import Context
from test.fx_passes.test_cuda_inference import traced

T = torch.Tensor
aten = torch.ops.aten


def rearranged(fn: Callable[..., T], *inputs: T) -> tuple[GraphModule, int]:
    """Return the graph of an inference on a GPU, of which all inputs but the first are constant, and the copies."""
    gm = traced(fn, *inputs)
    want = gm(*inputs)
    _, *weights = gm.graph.find_nodes(op="placeholder")
    count = channels_last.rearrange(gm, set(weights), "gpu")
    gm.recompile()
    assert torch.allclose(gm(*inputs), want, rtol=2e-2, atol=2e-2)
    return gm, count


def test_readers_in_a_region_share_the_copy() -> None:
    def fn(x: T, w: T, v: T, u: T) -> T:
        pooled = F.conv2d(F.max_pool2d(x, 3, 1, 1), v, padding=1)
        rows = (x.permute(0, 2, 3, 1).reshape(-1, 16) @ u).reshape(2, 12, 12, 16).permute(0, 3, 1, 2)
        return torch.cat([F.conv2d(x, w, padding=1).relu(), pooled.relu(), rows], 1).amax((2, 3))

    x, w, v = torch.randn(2, 16, 12, 12), torch.randn(16, 16, 3, 3), torch.randn(16, 16, 3, 3)
    gm, _ = rearranged(fn, x, w, v, torch.randn(16, 16))
    image = gm.graph.find_nodes(op="placeholder")[0]
    (copy,) = image.users
    assert copy.target is aten.clone.default
    assert {u.target for u in copy.users} >= {aten.convolution.default, aten.permute.default}


def convolution(transposed: bool, rank: int, groups: int) -> Callable[[T, T], T]:
    name = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
    return lambda x, w: getattr(F, name)(x, w, groups=groups).relu()


@pytest.mark.parametrize(("dtype", "transposed", "rank", "groups", "channels", "moves"), [
    (torch.float32, False, 2, 1, 16, True),
    (torch.float32, True, 2, 1, 16, True),
    (torch.bfloat16, True, 2, 1, 16, True),
    (torch.bfloat16, False, 2, 1, 3, False),  # few channels
    (torch.float32, False, 2, 1, 8, False),
    (torch.bfloat16, False, 2, 1, 8, True),
    (torch.float32, False, 2, 4, 16, True),  # groups
    (torch.bfloat16, False, 2, 4, 16, True),
    (torch.bfloat16, False, 2, 3, 3, False),  # a depthwise image: generated kernels read both layouts
    (torch.float32, False, 3, 1, 16, False),
    (torch.float32, True, 3, 1, 16, True),
    (torch.bfloat16, False, 3, 1, 16, True),
    (torch.bfloat16, False, 3, 16, 16, False),  # a depthwise volume
])  # fmt: skip
def test_convolutions_that_gain(
    dtype: torch.dtype, transposed: bool, rank: int, groups: int, channels: int, moves: bool
) -> None:
    x = torch.randn(2, channels, *[8] * rank).to(dtype)
    w = (torch.randn(channels, channels // groups, *[3] * rank) / 9).to(dtype)
    _, count = rearranged(convolution(transposed, rank, groups), x, w)
    assert bool(count) == moves


@pytest.mark.parametrize(("dtype", "channels", "window", "padding", "moves"), [
    (torch.float32, (64, 64), 2, 1, False),  # windows that do not overlap
    (torch.float32, (64, 64), 2, 0, True),
    (torch.float32, (64, 16), 2, 0, False),
    (torch.float32, (64, 16), 3, 1, True),
    (torch.bfloat16, (64, 16), 2, 1, True),
    (torch.bfloat16, (3, 24), 2, 1, True),  # what a transposed one writes counts
    (torch.bfloat16, (3, 3), 2, 1, False),
])  # fmt: skip
def test_transposed_convolutions_that_gain(
    dtype: torch.dtype, channels: tuple[int, int], window: int, padding: int, moves: bool
) -> None:
    x = torch.randn(2, channels[0], 8, 8).to(dtype)
    w = (torch.randn(*channels, window, window) / 16).to(dtype)
    _, count = rearranged(lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=padding).relu(), x, w)
    assert bool(count) == moves


@pytest.mark.parametrize(("padding", "plain"), [(1, True), (0, False)])
def test_gradients_of_transposed_convolutions_have_the_layout_of_the_convolution(padding: int, plain: bool) -> None:
    def fn(x: T, w: T) -> tuple[T, ...]:
        y = F.conv_transpose2d(x, w, stride=2, padding=padding)
        arguments = ([0], [2, 2], [padding] * 2, [1, 1], True, [0, 0], 1, [True, True, False])
        return aten.convolution_backward.default(y.relu(), x, w, *arguments)[:2]

    gm = traced(fn, torch.randn(2, 64, 8, 8), torch.randn(64, 64, 2, 2))
    for target in (aten.convolution.default, aten.convolution_backward.default):
        (n,) = gm.graph.find_nodes(op="call_function", target=target)
        assert channels_last.reads_plain(n) == plain


@pytest.mark.parametrize("avx512", [False, True])
@pytest.mark.parametrize("groups", [1, 16], ids=["whole", "depthwise"])
def test_convolutions_that_gain_on_a_cpu(groups: int, avx512: bool) -> None:
    x, w = torch.randn(2, 16, 8, 8), torch.randn(16, 16 // groups, 3, 3)
    gm = traced(lambda x, w: F.conv2d(x, w, groups=groups).relu(), x, w)
    weight = gm.graph.find_nodes(op="placeholder")[1]
    with patch.object(torch_api, "has_avx512", lambda: avx512):
        assert bool(channels_last.rearrange(gm, {weight}, "cpu")) == (groups == 1 or avx512)


def test_a_lone_convolution_whose_copies_take_what_it_gains_stays_plain() -> None:
    gm = traced(lambda x, w: F.conv2d(x, w, padding=1), torch.randn(2, 16, 28, 28), torch.randn(16, 16, 3, 3))
    assert not channels_last.rearrange(gm, {gm.graph.find_nodes(op="placeholder")[1]}, "cpu")


def test_a_pool_and_a_convolution_share_a_copy_on_a_cpu() -> None:
    def fn(x: T, w: T, v: T) -> T:
        return torch.cat([F.conv2d(x, w), F.conv2d(F.max_pool2d(x, 3, 1, 1), v)], 1).relu()

    weights = torch.randn(8, 16, 1, 1), torch.randn(8, 16, 1, 1)
    gm = traced(fn, torch.randn(2, 16, 8, 8), *weights)
    _, *constant = gm.graph.find_nodes(op="placeholder")
    assert channels_last.rearrange(gm, set(constant), "cpu") == 1
    (copy,) = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
    assert len(copy.users) == 2


def test_depthwise_images_of_a_dtype_that_onednn_lacks_are_plain_inside_a_region() -> None:
    def fn(x: T, w: T, v: T, u: T) -> T:
        return F.conv2d(F.conv2d(F.conv2d(x, w), v, padding=1, groups=16).relu(), u).relu()

    inputs = [torch.randn(s).bfloat16() for s in ((2, 16, 8, 8), (16, 16, 3, 3), (16, 1, 3, 3), (16, 16, 3, 3))]
    gm = traced(fn, *inputs)
    _, *weights = gm.graph.find_nodes(op="placeholder")
    with patch.object(onednn, "computes", lambda dtype: dtype == torch.float32):
        assert channels_last.rearrange(gm, set(weights), "cpu")
    calls = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert [n.args[0].meta["val"].is_contiguous() for n in calls] == [False, True, False]


def test_a_softmax_between_images_that_are_channels_last_stays_so() -> None:
    def fn(x: T, w: T, v: T) -> T:
        return F.conv2d(F.conv2d(x, w, padding=1).softmax(2) + 1, v, padding=1).relu()

    x = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    w, v = (torch.randn(16, 16, 3, 3).to(memory_format=torch.channels_last) for _ in range(2))
    gm, copies = rearranged(fn, x, w, v)
    assert copies == 0
    assert not gm.graph.find_nodes(op="call_function", target=aten.clone.default)


def test_volumes_in_groups_are_plain_behind_a_region() -> None:
    def fn(x: T, w: T, v: T) -> T:
        return F.conv3d(F.conv_transpose3d(x, w, stride=2).relu(), v, groups=2).relu()

    gm, _ = rearranged(fn, torch.randn(2, 16, 3, 3, 3), torch.randn(16, 32, 2, 2, 2), torch.randn(32, 16, 3, 3, 3))
    (grouped,) = (n for n in gm.graph.find_nodes(op="call_function", target=aten.convolution.default) if n.args[8] == 2)
    assert grouped.args[0].meta["val"].is_contiguous()
    (first,) = (n for n in gm.graph.find_nodes(op="call_function", target=aten.convolution.default) if n.args[8] == 1)
    assert first.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last_3d)


def layouts(n: torch.fx.Node) -> set[bool]:
    """Return whether the image and the weight of a convolution are channels-last."""
    return {a.meta["val"].is_contiguous(memory_format=torch.channels_last) for a in n.args[:2]}


@pytest.mark.parametrize(("dtype", "width", "moves"), [
    (torch.float32, 12, True), (torch.float32, 10, False), (torch.bfloat16, 12, False),
])  # fmt: skip
def test_convolutions_in_groups_without_a_kernel_follow_their_region(
    dtype: torch.dtype, width: int, moves: bool
) -> None:
    def fn(x: T, w: T, v: T, u: T) -> T:
        y = F.conv2d(F.conv2d(x, w, padding=1).relu(), v, padding=1, groups=6).relu()
        return F.conv2d(y, u, padding=1).relu()

    n = 6 * width
    shapes = [(2, n, 12, 12), (n, n, 3, 3), (n, width, 3, 3), (n, n, 3, 3)]
    gm, _ = rearranged(fn, *((torch.randn(*s) / 8).to(dtype) for s in shapes))
    first, grouped, last = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert grouped.args[8] == 6
    assert layouts(grouped) == {moves}
    assert layouts(first) == layouts(last) == {True}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_lone_convolution_in_groups_keeps_the_layout_of_its_image(layout: torch.memory_format) -> None:
    x = torch.randn(2, 24, 12, 12).to(memory_format=layout)
    w = torch.randn(24, 12, 3, 3).to(memory_format=torch.channels_last) / 9
    gm, _ = rearranged(lambda x, w: F.conv2d(x, w, groups=2).relu(), x, w)
    (grouped,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert layouts(grouped) == {layout is torch.channels_last}


@pytest.mark.parametrize(
    ("channels", "groups", "plain"),
    [(72, 2, True), (48, 4, True), (8, 2, True), (64, 2, False), (16, 4, False), (32, 32, False)],
)
def test_groups_without_a_channels_last_kernel_are_plain(channels: int, groups: int, plain: bool) -> None:
    x, w = torch.randn(4, channels, 12, 12).bfloat16(), torch.randn(channels, channels // groups, 3, 3).bfloat16()
    gm = traced(lambda x, w: F.conv2d(x, w, padding=1, groups=groups).relu(), x, w)
    (n,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert channels_last.reads_plain(n) == plain


def dense(x: T, *weights: T) -> T:
    for w in weights:
        x = torch.cat([x, F.conv2d(x.relu(), w, padding=1)], 1)
    return x


def residual(x: T, *weights: T) -> T:
    for w in weights:
        x = x + F.conv2d(x.relu(), w, padding=1)
    return x


@pytest.mark.parametrize(("fn", "growth"), [(dense, 8), (residual, 0)])
def test_a_plain_image_that_meets_channels_last_ones_is_copied_once(fn: Callable[..., T], growth: int) -> None:
    weights = [torch.randn(growth or 16, 16 + k * growth, 3, 3) for k in range(4)]
    gm, _ = rearranged(fn, torch.randn(2, 16, 12, 12), *weights)
    images = [n for n in gm.graph.nodes if n.target is aten.clone.default and n.meta["val"].shape[2:] == (12, 12)]
    assert len(images) == 1
    joining = [n for n in gm.graph.nodes if n.target in (aten.cat.default, aten.add.Tensor)]
    inner = joining[:-1]
    assert all(mixed_layouts.is_channels_last(n.meta["val"]) for n in inner)
    assert len(inner) == 3


def test_operands_that_no_convolution_follows_stay_plain() -> None:
    def fn(x: T, w: T) -> T:
        return torch.cat([x, F.conv2d(x, w, padding=1)], 1)

    gm, _ = rearranged(fn, torch.randn(2, 16, 12, 12), torch.randn(16, 16, 3, 3))
    (cat,) = (n for n in gm.graph.nodes if n.target is aten.cat.default)
    assert cat.args[0][0].op == "placeholder" or cat.args[0][0].target is aten.clone.default


def test_a_concatenation_for_the_caller_is_stored_as_it_was_traced() -> None:
    def fn(x: T, w: T) -> T:
        y = F.conv2d(x, w, padding=1)
        return torch.cat([y.relu(), y.sigmoid()], 1)

    x, w = torch.randn(2, 16, 12, 12), torch.randn(16, 16, 3, 3)
    gm = traced(fn, x, w)
    ctx = Context(resolve(), Trace("test", resolve()), device="gpu")
    housekeeping.record_result_strides(gm, ctx)
    channels_last.rearrange(gm, set(gm.graph.find_nodes(op="placeholder")[1:]), "gpu")
    (cat,) = (n for n in gm.graph.nodes if n.target is aten.cat.default)
    assert mixed_layouts.is_channels_last(cat.meta["val"])
    assert output_layouts.store_concatenations(gm, ctx) == 1
    assert cat.meta["val"].is_contiguous()
    assert output_layouts.store_concatenations(gm, ctx) == 0


def test_an_image_of_one_channel_stays_plain() -> None:
    def fn(x: T, w: T, v: T) -> T:
        return F.conv2d(F.conv2d(x, w).relu(), v)

    gm, _ = rearranged(fn, torch.randn(2, 1, 12, 12), torch.randn(16, 1, 3, 3), torch.randn(16, 16, 3, 3))
    first, second = (n for n in gm.graph.nodes if n.target is aten.convolution.default)
    assert first.meta["val"].is_contiguous()
    assert mixed_layouts.is_channels_last(second.meta["val"])


@pytest.mark.parametrize("groups", [8, 4, 1], ids=["depthwise", "pairs", "library"])
def test_generated_convolutions_of_plain_images_write_plain_results(groups: int) -> None:
    def fn(x: T, w: T) -> T:
        return F.conv2d(x.softmax(3), w, groups=groups, padding=3).amax(3)

    x, w = torch.randn(2, 8, 12, 12), torch.randn(8, 8 // groups, 7, 7)
    gm, _ = rearranged(fn, x, w.to(memory_format=torch.channels_last))
    (call,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    is_library = groups == 1
    assert call.meta["val"].is_contiguous(memory_format=torch.channels_last) == is_library
