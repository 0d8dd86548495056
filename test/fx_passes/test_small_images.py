"""Convolutions whose windows cover their images are matmuls on a GPU, and so are gradients of small images' weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import small_images
from altbackend.fx_passes.context import Context
from test import triton_run
from test.compare import difference
from test.fx_passes.test_cuda_inference import targets, traced
from test.fx_passes.test_cuda_joint import joint
from test.fx_passes.test_cuda_joint import rewritten as joint_graph
from test.graphs import trace

T = torch.Tensor
aten = torch.ops.aten

# Sizes of images, of windows, stride and padding: every window covers its image.
COVERED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, Any]] = {
    "4x4, 7x7": ((4, 4), (7, 7), 1, 3),
    "2x3, 5x5": ((2, 3), (5, 5), 1, (3, 2)),
    "2x2, 3x3": ((2, 2), (3, 3), 1, 1),
    "3x2, 3x2, one result": ((3, 2), (3, 2), 1, 0),
    "2x2, 5x6, stride 2": ((2, 2), (5, 6), 2, 2),
    "a sequence": ((2,), (5,), 1, 2),
    "a volume": ((2, 2, 1), (3, 3, 3), 1, 1),
}
# Windows that see parts of their images.
PARTIAL: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, Any]] = {
    "4x4, 3x3": ((4, 4), (3, 3), 1, 1),
    "5x5, 5x5": ((5, 5), (5, 5), 1, 2),
    "5x4, 3x3, stride 2": ((5, 4), (3, 3), 2, (1, 0)),
    "6x5, 2x4, stride 3": ((6, 5), (2, 4), 3, 1),
    "a sequence": ((5,), (3,), 1, 1),
    "a volume": ((3, 2, 4), (2, 3, 3), 1, (0, 1, 1)),
}
FORMATS = {3: torch.contiguous_format, 4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are rewritten, and neither products nor convolutions round to TF32."""
    monkeypatch.setattr(small_images, "LEAST_DATA", 0)
    monkeypatch.setattr(small_images, "MOST_OF_DATA", math.inf)
    monkeypatch.setattr(small_images, "MOST_TERMS", math.inf)
    monkeypatch.setattr(torch_api, "allows_tf32_convolutions", lambda: False)


def convolve(x: T, w: T, b: T | None, stride: int, padding: Any) -> T:
    fn: Any = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    result: T = fn(x, w, b, stride, padding)
    return result


def inputs(case: tuple[tuple[int, ...], tuple[int, ...], int, Any], last: bool = False) -> tuple[T, T, T]:
    image, window, _, _ = case
    x, w, b = torch.randn(6, 12, *image), torch.randn(16, 12, *window), torch.randn(16)
    return (x.to(memory_format=FORMATS[x.dim()]) if last else x), w, b


def rewritten(gm: GraphModule) -> int:
    cfg = resolve()
    return small_images.run(gm, Context(cfg, Trace("test", cfg), (), "gpu"))


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("biased", [False, True], ids=["alone", "with a bias"])
@pytest.mark.parametrize("name", COVERED)
def test_results(name: str, biased: bool, last: bool) -> None:
    case = COVERED[name]

    def fn(x: T, w: T, b: T) -> T:
        return convolve(x, w, b if biased else None, *case[2:])

    args = inputs(case, last)
    (gm,) = trace(fn, *args)
    assert rewritten(gm) == 1
    expected = fn(*(a.double() for a in args)).float()
    assert not difference(triton_run.compiled(fn)(*args), expected, strides=False, tolerance=2e-5)
    assert triton_run.compiled(fn)(*args).stride() == fn(*args).stride()


def test_a_number_that_is_not_finite_stays_in_the_windows_that_see_it() -> None:
    """Products with the zeros of a partly covering window would spread it."""
    for name, case in PARTIAL.items():
        (gm,) = trace(lambda x, w, b, case=case: convolve(x, w, b, *case[2:]), *inputs(case))
        assert rewritten(gm) == 0, name


def trained(case: tuple[tuple[int, ...], tuple[int, ...], int, Any], last: bool) -> GraphModule:
    """Return the joint graph of a convolution, whose results and strides `joint_graph` compares."""
    return joint_graph(lambda x, w, b: convolve(x.tanh(), w, b, *case[2:]).square().mean(), *inputs(case, last))


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("name", COVERED)
def test_training(name: str, last: bool) -> None:
    """The convolution and both gradients are products."""
    gm = trained(COVERED[name], last)
    assert not [n for n in gm.graph.nodes if "convolution" in str(n.target)]
    assert targets(gm).count("aten.mm.default") == 3


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("name", PARTIAL)
def test_gradients_of_weights(name: str, last: bool) -> None:
    gm = trained(PARTIAL[name], last)
    (call,) = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert call.args[10] == [True, False, False]
    assert targets(gm).count("aten.mm.default") == 1


def test_infinite_numbers_beside_a_window() -> None:
    """Sums leave out elements of no window, and do not multiply them by zero."""
    case = PARTIAL["4x4, 3x3"]
    x, w, _ = inputs(case)
    x[2, 1, 0, 0] = torch.inf

    def fn(x: T, w: T) -> T:
        return convolve(x, w, None, *case[2:]).nan_to_num(0, 0, 0).square().mean()

    def gradient(call: Any) -> T:
        (g,) = torch.autograd.grad(call(x, leaf := w.clone().requires_grad_()), leaf)
        return g

    own, expected = gradient(triton_run.compiled(fn)), gradient(fn)
    assert not difference(own, expected, tolerance=1e-5)
    assert expected.isfinite().any()


@pytest.mark.parametrize("options", [{"dilation": 2}, {"groups": 12}], ids=str)
def test_others_stay_with_the_library(options: dict[str, Any]) -> None:
    x, w, _ = inputs(COVERED["2x2, 3x3"])
    if "groups" in options:
        w = torch.randn(12, 1, 3, 3)
    (gm,) = trace(lambda x, w: F.conv2d(x, w, padding=2, **options), x, w)
    assert rewritten(gm) == 0


def test_float32_with_other_settings_for_products_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_api, "allows_tf32_convolutions", lambda: True)
    case = COVERED["2x2, 3x3"]
    (gm,) = trace(lambda x, w, b: convolve(x, w, b, *case[2:]), *inputs(case))
    assert rewritten(gm) == 0


SIZES = {
    "few channels, wide windows": ((163_224, 3, 4, 4), (16, 3, 7, 7), True),
    "many channels": ((3_906, 512, 2, 2), (512, 512, 3, 3), True),
    "a large matrix": ((500, 64, 4, 4), (64, 64, 7, 7), False),
    "small": ((200, 16, 2, 2), (16, 16, 3, 3), False),
}
SIZES_IN_PART = {
    "few channels": ((54_421, 3, 7, 7), (16, 3, 3, 3), True),
    "no more terms": ((13_792, 192, 5, 5), (48, 192, 5, 5), True),
    "five times the terms": ((90_000, 64, 7, 7), (64, 64, 3, 3), False),
    "large images": ((1_964, 3, 52, 52), (8, 3, 3, 3), False),
}


def padded(x: T, w: T) -> T:
    return F.conv2d(x, w, padding=w.shape[-1] // 2)


@pytest.mark.parametrize("name", SIZES)
def test_which_gain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    image, weight, gains = SIZES[name]
    gm = traced(padded, *(torch.empty(s, dtype=torch.bfloat16) for s in (image, weight)))
    assert rewritten(gm) == gains


@pytest.mark.parametrize("name", SIZES_IN_PART)
def test_which_weights_gain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    image, weight, gains = SIZES_IN_PART[name]
    leaves = (torch.empty(s, dtype=torch.bfloat16) for s in (image, weight))
    gm = traced(joint(lambda x, w: padded(x, w).float().square().mean()), *leaves)
    cfg = resolve()
    assert small_images.run_weight_gradients(gm, Context(cfg, Trace("test", cfg), (), "gpu")) == gains
