"""Convolutions in narrow groups for a GPU: generated kernels, interpreted, against the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.aten.narrow_groups import in_generated_kernel, sums_weight_gradient, takes_any_layout, trains_fast
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import channels_last, inference
from altbackend.lowering.operators import weight_gradients
from test import triton_run
from test.fx_passes.test_cuda_inference import T, targets, traced
from test.graphs import Scheduled, schedule

aten = torch.ops.aten
Sizes = tuple[int, ...]


def convolution(groups: int, rank: int = 2, stride: int = 1, padding: int = 1, dilation: int = 1) -> Callable[..., T]:
    how = [stride], [padding] * rank, [dilation]
    return lambda x, w, b: aten.convolution(x, w, b, *how, False, [0], groups)


def scheduled(fn: Callable[..., Any], *args: T, **options: Any) -> Scheduled:
    return schedule(traced(fn, *args), resolve(options=options), triton_run.TARGET)


CASES: dict[str, tuple[Sizes, Sizes, dict[str, int]]] = {
    "two channels a group": ((2, 8, 6, 7), (8, 2, 3, 3), {"groups": 4}),
    "a multiplier of two": ((2, 6, 9, 7), (12, 1, 3, 2), {"groups": 6, "stride": 2, "padding": 0, "dilation": 2}),
    "three groups of one image": ((1, 9, 5, 5), (3, 3, 3, 5), {"groups": 3, "padding": 2}),
    "sequences": ((2, 6, 9), (4, 3, 3), {"groups": 2, "rank": 1}),
    "depthwise sequences": ((2, 6, 9), (6, 1, 4), {"groups": 6, "rank": 1}),
    "depthwise images": ((2, 6, 9, 8), (6, 1, 3, 4), {"groups": 6, "stride": 2}),
    "dilated depthwise images": ((2, 3, 9, 8), (3, 1, 5, 3), {"groups": 3, "padding": 2, "dilation": 2}),
    "volumes": ((2, 4, 5, 4, 3), (4, 2, 2, 2, 2), {"groups": 2, "rank": 3}),
    "a loop over channels": ((1, 10, 6, 5), (10, 5, 5, 5), {"groups": 2, "padding": 2}),
    "a loop over rows of windows": ((1, 3, 10, 9), (6, 1, 9, 9), {"groups": 3, "padding": 3, "stride": 2}),
    "a loop over slices": ((1, 4, 4, 5, 3), (4, 1, 5, 5, 5), {"groups": 4, "rank": 3, "padding": 2}),
    "few filters": ((2, 3, 6, 7), (4, 3, 3, 3), {"groups": 1, "stride": 2}),
    "few filters of points": ((2, 16, 5, 4), (3, 16, 1, 1), {"groups": 1, "padding": 0}),
    "few filters, a loop": ((1, 3, 6, 5), (3, 3, 5, 5), {"groups": 1, "padding": 2}),
    "few filters of sequences": ((2, 4, 9), (4, 4, 5), {"groups": 1, "rank": 1, "padding": 2}),
    "few filters of volumes": ((1, 3, 4, 5, 3), (3, 3, 3, 3, 3), {"groups": 1, "rank": 3}),
    "a loop over channels and slices": ((1, 4, 3, 4, 3), (6, 2, 5, 5, 5), {"groups": 2, "rank": 3, "padding": 2}),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_exact_as_the_library(name: str, dtype: torch.dtype, last: bool) -> None:
    image, weight, how = CASES[name]
    args = [torch.randn(image), torch.randn(weight), torch.randn(weight[0])]
    if last and len(image) > 3:
        layout = torch.channels_last if len(image) == 4 else torch.channels_last_3d
        args[0] = args[0].contiguous(memory_format=layout)
    args = [t.to(dtype) for t in args]
    fn = convolution(**how)
    s = scheduled(fn, *args)
    assert s.calls == 0
    assert s.kernels <= 2  # weights may be turned over
    (got,) = triton_run.run(s.program, triton_run.steps_of(s), args, s.constants)
    eager, exact = fn(*args), fn(*(t.double() for t in args))
    assert (got.shape, got.dtype, got.stride()) == (eager.shape, eager.dtype, eager.stride())
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (got, eager)]
    assert errors[0] <= errors[1] + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("window", "last", "calls"), [(7, False, 0), (7, True, 1), (9, False, 1)])
def test_wide_depthwise_windows_of_plain_images(window: int, last: bool, calls: int) -> None:
    args = [torch.randn(1, 3, 11, 10), torch.randn(3, 1, window, window), torch.randn(3)]
    args[0] = args[0].contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    fn = convolution(3, padding=window // 2)
    s = scheduled(fn, *args)
    assert s.calls == calls
    (got,) = triton_run.run(s.program, triton_run.steps_of(s), args, s.constants)
    torch.testing.assert_close(got, fn(*args))


@pytest.mark.parametrize(
    ("channels", "groups", "weight", "dtype", "generated"),
    [
        (8, 4, (8, 2, 3, 3), torch.float32, True),
        (8, 2, (8, 4, 3, 3), torch.bfloat16, True),
        (192, 32, (192, 6, 5, 5), torch.float32, True),  # 150 products, in a loop
        (192, 32, (192, 6, 5, 5), torch.bfloat16, False),
        (12, 2, (12, 6, 5, 5), torch.bfloat16, True),
        (192, 32, (192, 6, 9, 9), torch.float32, False),  # 486 products
        (96, 16, (96, 6, 31), torch.float32, False),  # a long window of sequences
        (64, 32, (64, 2, 5, 5, 5), torch.bfloat16, True),
        (256, 32, (256, 8, 5, 5, 5), torch.float32, True),
        (64, 8, (64, 8, 3, 3, 3), torch.bfloat16, False),  # tensor cores
        (32, 2, (32, 16, 5, 5, 5), torch.float32, False),
        (32, 2, (32, 16, 5, 5, 5), torch.bfloat16, True),
        (64, 2, (64, 32, 5, 5, 5), torch.bfloat16, False),
        (64, 16, (64, 4, 3, 3), torch.float32, False),  # the library has kernels of tensor cores
        (64, 16, (64, 4, 1, 1), torch.float32, True),  # the library's kernel for windows of one element is slow
        (64, 16, (64, 4, 1, 1), torch.bfloat16, False),
        (64, 64, (64, 1, 3, 3), torch.float32, False),  # depthwise
        (64, 64, (128, 1, 3, 3), torch.float32, True),
        (64, 1, (64, 64, 1, 1), torch.float32, False),
        (3, 1, (3, 3, 3, 3), torch.float32, True),
        (6, 1, (6, 6, 3, 3), torch.float16, True),
        (3, 1, (16, 3, 3, 3), torch.bfloat16, True),
        (3, 1, (16, 3, 3, 3), torch.float32, False),
        (3, 1, (64, 3, 7, 7), torch.bfloat16, False),
        (3, 1, (3, 3, 7, 7), torch.float32, True),  # a loop
        (8, 1, (3, 8, 3, 3), torch.float32, False),  # the library is fast channels-last
        (16, 1, (1, 16, 3, 3), torch.float32, True),
        (16, 1, (3, 16, 1, 1), torch.bfloat16, True),
        (16, 1, (4, 16, 3), torch.float32, True),
        (1, 1, (1, 1, 400), torch.float32, False),  # a loop over a sequence
        (3, 1, (8, 3, 3, 3, 3), torch.bfloat16, True),
        (3, 1, (8, 3, 3, 3, 3), torch.float32, False),
        (1, 1, (1, 1, 3, 3), torch.float32, True),
        (8, 4, (8, 2, 3, 3), torch.float64, False),
    ],
)
def test_the_library_keeps_what_it_computes_faster(
    channels: int, groups: int, weight: Sizes, dtype: torch.dtype, generated: bool
) -> None:
    assert in_generated_kernel(channels, groups, weight, dtype) is generated


@pytest.mark.parametrize(
    ("groups", "weight", "dtype", "summed"),
    [
        (1, (3, 3, 3, 3), torch.float32, True),
        (1, (8, 3, 3, 3), torch.bfloat16, True),
        (1, (8, 3, 3, 3), torch.float32, False),
        (1, (64, 3, 7, 7), torch.bfloat16, False),
        (1, (3, 3, 7, 7), torch.float32, False),
        (1, (3, 3, 7, 7), torch.bfloat16, False),
        (1, (4, 4, 3, 3), torch.float32, True),
        (1, (3, 3, 3, 3, 3), torch.float32, False),  # volumes
        (3, (3, 1, 3, 3), torch.float32, False),
        (1, (3, 3, 3, 3), torch.float64, False),
    ],
)
def test_gradients_of_few_filters_are_sums(groups: int, weight: Sizes, dtype: torch.dtype, summed: bool) -> None:
    assert sums_weight_gradient(groups, weight, dtype) is summed


def test_results_are_the_ones_of_the_library_with_eager_numerics() -> None:
    args = torch.randn(2, 8, 6, 7), torch.randn(8, 2, 3, 3), torch.randn(8)
    assert scheduled(convolution(4), *args, numerics="eager").calls == 1


@pytest.mark.parametrize(("groups", "copies"), [(4, 0), (5, 1)])
def test_images_are_copied_only_for_the_library(groups: int, copies: int) -> None:
    """The library wants plain images where it has no channels-last kernel; a generated kernel takes both."""
    width = {4: 2, 5: 10}[groups]
    x = torch.randn(2, groups * width, 9, 9).contiguous(memory_format=torch.channels_last)
    gm = traced(convolution(groups), x, torch.randn(groups * width, width, 3, 2), torch.randn(groups * width))
    inference(gm, (), resolve(), Trace("test", resolve()), "gpu")
    assert sum("clone" in name for name in targets(gm)) == copies


@pytest.mark.parametrize(("width", "groups", "dtype", "fast"), [
    (32, 8, torch.float32, True),
    (128, 3, torch.bfloat16, True),
    (48, 4, torch.float32, True),
    (48, 4, torch.bfloat16, False),  # as it lies
    (48, 8, torch.float32, False),  # many groups run one after the other
    (24, 2, torch.float32, True),
    (24, 2, torch.bfloat16, False),
    (96, 2, torch.float32, False),
])  # fmt: skip
def test_groups_that_train_channels_last(width: int, groups: int, dtype: torch.dtype, fast: bool) -> None:
    assert trains_fast(width * groups, groups, dtype) is fast


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("width", "copies"), [(48, False), (64, True)])
def test_groups_of_16_bits_that_train_as_they_lie(width: int, copies: bool, last: bool) -> None:
    x = torch.randn(2, 2 * width, 9, 9).bfloat16()
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    w = torch.randn(2 * width, width, 3, 3).bfloat16()
    arguments = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], 2, [True, True, False])
    gm = traced(
        lambda x, w: aten.convolution_backward(aten.convolution(x, w, None, *arguments[1:-1]), x, w, *arguments), x, w
    )
    for n in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        assert channels_last.reads_plain(n) == (not last and not copies)


@pytest.mark.parametrize(("width", "groups", "taps", "any_layout"), [
    (12, 2, 9, True), (96, 16, 25, True), (10, 2, 9, False), (8, 2, 9, False), (12, 32, 9, False), (12, 2, 49, False),
])  # fmt: skip
def test_groups_that_take_any_layout(width: int, groups: int, taps: int, any_layout: bool) -> None:
    assert takes_any_layout(width * groups, groups, taps, torch.float32) is any_layout
    assert not takes_any_layout(width * groups, groups, taps, torch.bfloat16)


WEIGHTS: dict[str, tuple[Sizes, Sizes, list[int], list[int]]] = {
    "3 filters of 3 channels": ((4, 3, 9, 8), (3, 3, 3, 3), [1, 1], [1, 1]),
    "with steps": ((3, 2, 9, 10), (4, 2, 3, 5), [2, 1], [0, 2]),
    "points": ((5, 6, 4, 3), (2, 6, 1, 1), [1, 1], [0, 0]),
    "one channel": ((2, 1, 12, 9), (8, 1, 3, 3), [1, 1], [1, 1]),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("programs", [1, 40, 10_000])
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_of_weights(
    name: str, dtype: torch.dtype, last: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_gradients, "PROGRAMS", programs)
    image, weight, stride, padding = WEIGHTS[name]

    def fn(g: T, x: T, w: T) -> T:
        masks = [False, True, False]
        y: T = aten.convolution_backward(g, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, masks)[1]
        return y

    x, w = torch.randn(image), torch.randn(weight)
    args = [torch.randn_like(aten.convolution(x, w, None, stride, padding, [1, 1], False, [0, 0], 1)), x, w]
    args = [t.to(dtype) for t in args]
    if last:
        args[:2] = (t.contiguous(memory_format=torch.channels_last) for t in args[:2])
    s = scheduled(fn, *args)
    assert s.calls == 0
    (got,) = triton_run.run(s.program, triton_run.steps_of(s), args, s.constants)
    eager, exact = fn(*args), fn(*(t.double() for t in args))
    assert (got.shape, got.dtype) == (eager.shape, eager.dtype)
    assert all(n == 1 or a == b for n, a, b in zip(got.shape, got.stride(), eager.stride(), strict=True))
    errors = [float((y.double() - exact).norm() / exact.norm()) for y in (got, eager)]
    assert errors[0] <= errors[1] + 2 * torch.finfo(dtype).eps
