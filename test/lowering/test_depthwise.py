"""Depthwise convolutions for a GPU: generated kernels, interpreted, against the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import depthwise, inference
from altbackend.fx_passes import joint as joint_passes
from altbackend.fx_passes.constants import constant_nodes
from altbackend.lowering.operators import weight_gradients
from test import triton_run
from test.fx_passes.test_cuda_inference import T, targets, traced
from test.graphs import Scheduled, schedule

pytestmark = pytest.mark.sample(3)

aten = torch.ops.aten
CHANNELS = 24


def image(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> T:
    return torch.randn(*sizes).to(dtype).contiguous(memory_format=torch.channels_last)


def weight(taps: int, dtype: torch.dtype = torch.bfloat16) -> T:
    return torch.randn(CHANNELS, 1, taps, taps + 1).to(dtype)


def convolution(*how: Any, groups: int = CHANNELS) -> Callable[[T, T, T], T]:
    return lambda x, w, b: aten.convolution(x, w, b, *how, False, [0, 0], groups)


def gradients(*how: Any, output_mask: tuple[bool, bool] = (True, False)) -> Callable[..., Any]:
    def fn(g: T, x: T, w: T) -> Any:
        computed = aten.convolution_backward(g, x, w, None, *how, False, [0, 0], CHANNELS, [*output_mask, False])
        return [t for t in computed if t is not None]

    return fn


def scheduled(fn: Callable[..., Any], *args: T, **options: Any) -> Scheduled:
    return schedule(traced(fn, *args), resolve(options=options), triton_run.TARGET)


def check(fn: Callable[..., Any], *args: T) -> None:
    """Check that the error against float64 is at most eager's plus a few roundings of the result."""
    s = scheduled(fn, *args)
    assert s.calls == 0
    got = triton_run.run(s.program, triton_run.steps_of(s), args, s.constants)[0]
    exact = torch.utils._pytree.tree_leaves(fn(*(t.double() for t in args)))[0]
    eager = torch.utils._pytree.tree_leaves(fn(*args))[0]
    assert (got.shape, got.dtype) == (eager.shape, eager.dtype)
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (got, eager)]
    assert errors[0] <= errors[1] + 2 * torch.finfo(got.dtype).eps


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("taps", "stride", "padding", "dilation"),
    [
        (3, [1, 1], [1, 1], [1, 1]),
        (5, [2, 2], [2, 2], [1, 1]),
        (3, [2, 1], [0, 2], [1, 2]),  # different parameters in the two dimensions
        (1, [3, 3], [0, 0], [1, 1]),  # a part of the image is not read
    ],
)
def test_forward(taps: int, stride: list[int], padding: list[int], dilation: list[int]) -> None:
    fn = convolution(stride, padding, dilation)
    check(fn, image(2, CHANNELS, 9, 10), weight(taps), torch.randn(CHANNELS).bfloat16())
    check(fn, image(2, CHANNELS, 9, 10, dtype=torch.float32), weight(taps, torch.float32), torch.randn(CHANNELS))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("taps", "stride", "padding"),
    [(3, [1, 1], [1, 1]), (5, [2, 2], [2, 2]), (3, [2, 1], [0, 2]), (1, [3, 3], [0, 0])],
)
def test_gradient_of_the_image(taps: int, stride: list[int], padding: list[int]) -> None:
    x, w = image(2, CHANNELS, 9, 10), weight(taps)
    y = aten.convolution(x, w, None, stride, padding, [1, 1], False, [0, 0], CHANNELS)
    check(gradients(stride, padding, [1, 1]), image(*y.shape), x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masks", [(True, False), (False, True)], ids=["image", "weight"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["plain", "last"])
@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (4, 2), (6, 1), (6, 2)])
def test_gradients_in_either_layout(
    taps: int,
    stride: int,
    memory_format: torch.memory_format,
    masks: tuple[bool, bool],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_gradients, "PROGRAMS", 6)  # the interpreter runs one after the other
    x, w = torch.randn(2, CHANNELS, 9, 10).to(dtype).to(memory_format=memory_format), weight(taps, dtype)
    how = [stride, stride], [taps // 2, taps // 2], [1, 1]
    y = aten.convolution(x, w, None, *how, False, [0, 0], CHANNELS)
    check(gradients(*how, output_mask=masks), torch.randn_like(y), x, w)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("taps", "stride", "padding"),
    [(3, [1, 1], [1, 1]), (5, [2, 2], [2, 2]), (3, [2, 1], [0, 2]), (1, [3, 3], [0, 0])],
)
@pytest.mark.parametrize("programs", [1, 6, 1000])  # pieces of several images, of an image's rows, of one row
def test_gradient_of_the_weight(
    taps: int, stride: list[int], padding: list[int], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_gradients, "PROGRAMS", programs)
    x, w = image(4, CHANNELS, 9, 10), weight(taps)
    y = aten.convolution(x, w, None, stride, padding, [1, 1], False, [0, 0], CHANNELS)
    check(gradients(stride, padding, [1, 1], output_mask=(False, True)), image(*y.shape), x, w)


def test_the_gradient_of_the_weight_is_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel sums pieces for each tap of a row, block by block; another sums the pieces."""
    monkeypatch.setattr(weight_gradients, "PROGRAMS", 256)
    g, x, w = image(128, CHANNELS, 9, 9), image(128, CHANNELS, 9, 10), weight(3)
    s = scheduled(gradients([1, 1], [1, 1], [1, 1], output_mask=(False, True)), g, x, w)
    assert (s.kernels, s.calls) == (2, 0)
    first = triton_run.steps_of(s)[0][0]
    assert first.source.count("tl.full([XBLOCK, RBLOCK]") == 4
    assert "tl.where" not in first.source  # masked loads give 0


@pytest.mark.parametrize(
    ("images", "plane", "pieces", "piece"),
    [(128, [7, 7], 7, (16, 7)), (128, [112, 112], 683, (1, 16)), (3, [5, 5], 1024, (1, 1))],
)
def test_pieces_fill_a_gpu(images: int, plane: list[int], pieces: int, piece: tuple[int, int]) -> None:
    assert weight_gradients.piece(images, plane, pieces) == piece


def test_the_library_keeps_the_rest() -> None:
    x, w, b = image(2, CHANNELS, 9, 10), weight(3), torch.randn(CHANNELS).bfloat16()
    plain = ([1, 1], [1, 1], [1, 1])
    assert scheduled(convolution(*plain), x, w, b).calls == 0
    assert scheduled(convolution(*plain), x, w, b, numerics="eager").calls == 1
    assert scheduled(convolution(*plain), x.contiguous(), w, b).calls == 0
    assert scheduled(convolution(*plain), x, weight(7), b).calls == 1  # a window of 56
    assert scheduled(convolution(*plain, groups=2), x, torch.randn(CHANNELS, 12, 3, 3).bfloat16(), b).calls == 1
    none = image(0, CHANNELS, 9, 10)
    assert scheduled(gradients(*plain, output_mask=(False, True)), image(0, CHANNELS, 9, 9), none, w).calls == 1
    g = image(2, CHANNELS, 9, 9)
    assert scheduled(gradients(*plain, output_mask=(True, True)), g, x, w).calls == 1
    wide = gradients([1, 1], [3, 3], [1, 1], output_mask=(False, True))
    for dtype, calls in ((torch.float32, 0), (torch.bfloat16, 1)):  # in 16 bits, the library is faster for large images
        large = image(2, CHANNELS, 40, 40, dtype=dtype)
        assert scheduled(wide, large, large, torch.randn(CHANNELS, 1, 7, 7).to(dtype)).calls == calls
    assert scheduled(gradients([1, 1], [2, 2], [2, 2]), image(2, CHANNELS, 9, 8), x, w).calls == 1  # dilated


def test_the_gradient_of_a_wide_window_and_a_reduction_are_two_kernels() -> None:
    """As one kernel they would spill most of their registers; with a smaller window they are one."""
    g, x, w = image(2, CHANNELS, 9, 10), image(2, CHANNELS, 9, 10), torch.randn(CHANNELS, 1, 5, 5).bfloat16()

    def fn(padding: int) -> Callable[[T, T, T], T]:
        computed = gradients([1, 1], [padding, padding], [1, 1])
        return lambda g, x, w: computed(g, x, w)[0].float().sum(1)

    turning = 1  # a kernel that transposes the weight
    assert scheduled(fn(2), g, x, w).kernels == turning + 2
    assert scheduled(fn(1), g, x, w[..., 1:4, 1:4].contiguous()).kernels == turning + 1


def test_a_joint_graph_gets_two_calls_and_the_same_gradients() -> None:
    g, x, w = image(2, CHANNELS, 9, 9), image(2, CHANNELS, 9, 10), weight(3)
    fn = gradients([1, 1], [1, 1], [1, 1], output_mask=(True, True))
    gm = traced(fn, g, x, w)
    joint_passes(gm, resolve(), Trace("joint", resolve()), "gpu")
    gm.graph.lint()
    gm.recompile()
    masks = [n.args[10] for n in gm.graph.nodes if n.target is aten.convolution_backward.default]
    assert masks == [[True, False, False], [False, True, False]]
    for got, want in zip(gm(g, x, w), fn(g, x, w), strict=True):
        torch.testing.assert_close(got, want)
    assert depthwise.split_gradients(gm) == 0  # once is enough
    gm = traced(fn, g, x, w)
    joint_passes(gm, exact := resolve(options={"numerics": "eager"}), Trace("joint", exact), "gpu")
    assert targets(gm).count("aten.convolution_backward.default") == 1
    dilated = gradients([1, 1], [2, 2], [2, 2], output_mask=(True, True))  # computed by the library
    assert depthwise.split_gradients(traced(dilated, image(2, CHANNELS, 9, 8), x, w)) == 0


def test_gradients_of_wide_windows_read_channels_last_copies() -> None:
    x, w = torch.randn(2, CHANNELS, 9, 10), weight(6, torch.float32)
    how = [2, 2], [1, 1], [1, 1]
    g = aten.convolution(x, w, None, *how, False, [0, 0], CHANNELS)
    fn = gradients(*how, output_mask=(True, True))
    gm = traced(fn, g, x, w)
    joint_passes(gm, resolve(), Trace("joint", resolve()), "gpu")
    gm.recompile()
    clones = [n for n in gm.graph.nodes if n.target is aten.clone.default]
    last = [n for n in clones if n.kwargs["memory_format"] == torch.channels_last]
    assert len(last) == 2
    assert all([u.args[10] for u in n.users] == [[False, True, False]] for n in last)
    assert all(n.meta["val"].is_contiguous(memory_format=torch.channels_last) for n in last)
    for got, want in zip(gm(g, x, w), fn(g, x, w), strict=True):
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_constant_weights_are_turned_where_parameters_are_prepared() -> None:
    fn = convolution([1, 1], [1, 1], [1, 1])
    x, w, b = image(2, CHANNELS, 9, 10), weight(3), torch.randn(CHANNELS).bfloat16()
    gm = traced(fn, x, w, b)
    assert depthwise.turn_weights(gm, constant_nodes(gm, (1, 2))) == 1
    gm.recompile()
    torch.testing.assert_close(gm(x, w, b), fn(x, w, b))
    gm = traced(fn, x, w, b)
    split = inference(gm, (1, 2), cfg := resolve(options={"freezing": True}), Trace("inference", cfg), "gpu")
    assert split is not None
    s = schedule(gm, resolve(), triton_run.TARGET)
    assert (s.kernels, s.calls) == (1, 0)  # no kernel transposes a weight
