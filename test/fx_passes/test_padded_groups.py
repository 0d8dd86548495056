"""Convolutions in groups of which the library has no fast kernel read padded groups on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from altbackend.aten import odd_channels
from altbackend.aten.narrow_groups import padded_width
from altbackend.aten.odd_channels import ConvolutionSizes, padded_channels
from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import padded_groups
from altbackend.fx_passes.context import Context
from altbackend.fx_passes.mixed_layouts import is_channels_last
from altbackend.schedule.device import H200
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.tiling.gpu.blocks import Form
from altbackend.schedule.tiling.gpu.choose import choose_blocks
from test import triton_run
from test.compare import difference
from test.fx_passes.test_cuda_joint import rewritten as joint_graph
from test.graphs import schedule, trace
from test.lowering.test_narrow_groups import scheduled

T = torch.Tensor
aten = torch.ops.aten


def convolved(x: T, w: T, b: T | None, **options: Any) -> T:
    return F.conv2d(x, w, b, **{"padding": w.shape[-1] // 2, "groups": x.shape[1] // w.shape[1], **options})


GRAPHS: dict[str, Any] = {
    "alone": lambda x, w, b: convolved(x, w, None),
    "with a bias and a ReLU": lambda x, w, b: convolved(x, w, b).relu(),
    "between kernels": lambda x, w, b: convolved(x.tanh(), w, b).softmax(1),
    "normalised along rows": lambda x, w, b: convolved(x, w, b).cumsum(3),
    "two in a row": lambda x, w, b: convolved(convolved(x, w, b), w, None),
    "with steps": lambda x, w, b: convolved(x, w, b, stride=2, padding=0),
    "dilated": lambda x, w, b: convolved(x, w, b, dilation=2),
    "the mean": lambda x, w, b: convolved(x, w, b).mean((2, 3)),
}


@pytest.fixture(autouse=True)
def allowed_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_api, "allows_tf32_convolutions", lambda: True)
    monkeypatch.setattr(odd_channels, "LEAST_DATA", 0)


def rewritten(gm: GraphModule, **options: Any) -> int:
    cfg = resolve(options=options)
    return padded_groups.run(gm, Context(cfg, Trace("test", cfg), (), "gpu"))


def inputs(groups: int, width: int, window: int = 3, dtype: torch.dtype = torch.float32) -> tuple[T, T, T]:
    c = groups * width
    return tuple(torch.randn(s).to(dtype) for s in ((2, c, 7, 6), (c, width, window, window), (c,)))  # type: ignore[return-value]


@pytest.mark.sample(8)
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize(("groups", "width"), [(2, 12), (3, 9), (2, 33), (1, 20)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_results(name: str, groups: int, width: int, last: bool) -> None:
    args = list(inputs(groups, width))
    if last:
        args[0] = args[0].contiguous(memory_format=torch.channels_last)
    (gm,) = trace(GRAPHS[name], *args)
    assert rewritten(gm) == (2 if name == "two in a row" else 1)
    for call in gm.graph.find_nodes(op="call_function", target=aten.convolution.default):
        assert call.args[2] is None
        assert is_channels_last(call.args[0].meta["val"])
        assert is_channels_last(call.args[1].meta["val"])
    expected = GRAPHS[name](*(a.double() for a in args)).float()
    assert not difference(triton_run.compiled(GRAPHS[name])(*args), expected, strides=False, tolerance=2e-5)


def test_no_kernel_stores_the_image_or_the_result_twice() -> None:
    """The kernel before a convolution writes the padded image, and the one behind it reads the wide result."""
    args = inputs(2, 12)
    s = scheduled(GRAPHS["between kernels"], *args)
    assert (s.calls, s.kernels) == (1, 2)  # an activation and the weight, the softmax


@pytest.mark.parametrize("width", [6, 9, 12, 24])
def test_a_plain_result_is_turned_over_in_squares(width: int) -> None:
    channels = 8 * width
    args = torch.randn(8, channels, 32, 32), torch.randn(channels, width, 3, 3), torch.randn(channels)
    (gm,) = trace(lambda *t: convolved(*t).clone(memory_format=torch.contiguous_format), *args)
    assert rewritten(gm) == 1
    s = schedule(gm, ctx=triton_run.TARGET)
    kernels = [k for k in s.steps if isinstance(k, Kernel)]
    blocks = choose_blocks(s.program, kernels[-1], H200)
    assert blocks.form is Form.TRANSPOSE
    assert min(blocks.xblock, *blocks.rblocks.values()) >= 32


@pytest.mark.parametrize("number", [math.inf, math.nan], ids=str)
def test_numbers_that_are_not_finite_stay_in_their_group(number: float) -> None:
    x, w, b = inputs(2, 12)
    x[0, 13, 3, 3] = number
    got = triton_run.compiled(GRAPHS["with a bias and a ReLU"])(x, w, b)
    expected = GRAPHS["with a bias and a ReLU"](x, w, b)
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert got[:, :12].isfinite().all()


@pytest.mark.parametrize(
    ("groups", "width", "window", "dtype", "expected"),
    [
        (2, 12, 3, torch.float32, 16),
        (2, 12, 3, torch.bfloat16, None),  # the library has a slow kernel for two and four groups of 16
        (8, 12, 3, torch.bfloat16, 16),
        (2, 112, 3, torch.float16, 128),
        (2, 96, 5, torch.float32, None),
        (2, 24, 5, torch.float32, 32),
        (2, 18, 5, torch.float32, 32),
        (2, 16, 5, torch.float32, None),  # half of 32 channels
        (2, 16, 3, torch.float32, None),
        (2, 130, 3, torch.float32, None),
    ],
    ids=str,
)
def test_widths(groups: int, width: int, window: int, dtype: torch.dtype, expected: int | None) -> None:
    weight = (groups * width, width, window, window)
    assert padded_width((2, groups * width, 14, 14), weight, dtype) == expected


@pytest.mark.parametrize(
    ("groups", "width", "window", "dtype", "pads"),
    [
        (32, 6, 3, torch.float32, True),
        (8, 5, 3, torch.bfloat16, True),
        (4, 6, 3, torch.bfloat16, False),  # no slower in a generated kernel
        (4, 5, 5, torch.float32, True),
        (3, 5, 3, torch.float32, False),
        (8, 3, 3, torch.float32, False),
    ],
    ids=str,
)
def test_groups_that_kernels_could_compute(
    groups: int, width: int, window: int, dtype: torch.dtype, pads: bool
) -> None:
    args = inputs(groups, width, window, dtype)
    (gm,) = trace(GRAPHS["with a bias and a ReLU"], *args)
    assert rewritten(gm) == pads


@pytest.mark.parametrize(
    ("filters", "channels", "window", "dtype", "expected"),
    [
        (64, 3, 3, torch.bfloat16, (8, 64)),
        (8, 3, 3, torch.bfloat16, None),  # no slower than moving the padding
        (64, 3, 7, torch.float16, None),
        (64, 3, 3, torch.float32, None),
        (24, 12, 3, torch.bfloat16, (16, 24)),
        (24, 12, 3, torch.float32, None),
        (50, 30, 3, torch.float32, (32, 56)),
        (40, 10, 5, torch.float32, (16, 40)),
        (3, 64, 3, torch.bfloat16, (64, 8)),
        (30, 30, 1, torch.bfloat16, None),  # a product
        (32, 64, 3, torch.bfloat16, None),
    ],
    ids=str,
)
def test_channels(
    filters: int,
    channels: int,
    window: int,
    dtype: torch.dtype,
    expected: tuple[int, int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    weight = filters, channels, window, window
    assert padded_channels(ConvolutionSizes((256, channels, 64, 64), weight, (1, 1)), dtype) == expected
    assert padded_channels(ConvolutionSizes((1, channels, 8, 8), weight, (1, 1)), dtype) is None
    if channels == 3 and expected:
        assert padded_channels(ConvolutionSizes((256, 3, 64, 64), (32, 3, 3, 3), (2, 2)), dtype) is None


def test_other_numbers_of_filters_without_groups() -> None:
    x, w, b = torch.randn(2, 20, 7, 6), torch.randn(13, 20, 3, 3), torch.randn(13)
    (gm,) = trace(GRAPHS["with a bias and a ReLU"], x, w, b)
    assert rewritten(gm) == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert [list(a.meta["val"].shape[:2]) for a in call.args[:2]] == [[2, 24], [16, 24]]
    for fn in (GRAPHS["with a bias and a ReLU"], GRAPHS["between kernels"]):
        expected = fn(x.double(), w.double(), b.double()).float()
        assert not difference(triton_run.compiled(fn)(x, w, b), expected, strides=False, tolerance=2e-5)


def test_windows_larger_than_the_image() -> None:
    """Of 64 channels they are slower padded."""
    assert padded_width((2, 96, 4, 4), (96, 48, 5, 5), torch.float32) is None
    assert padded_width((2, 24, 4, 4), (24, 12, 5, 5), torch.float32) == 16


@pytest.mark.parametrize(
    "case", ["no TF32", "double", "windows of one element", "another number of filters", "depthwise"]
)
def test_others_stay_as_they_are(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = inputs(2, 12)
    match case:
        case "no TF32":
            monkeypatch.setattr(torch_api, "allows_tf32_convolutions", lambda: False)
        case "double":
            x, w, b = x.double(), w.double(), b.double()
        case "windows of one element":
            w = w[:, :, :1, :1]
        case "another number of filters":
            w, b = w[:20], b[:20]
        case "depthwise":
            w = w[:, :1]
    (gm,) = trace(lambda x, w, b: F.conv2d(x, w, b, groups=x.shape[1] // w.shape[1]), x, w, b)
    assert rewritten(gm) == 0


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("width", [12, 48], ids=str)
@pytest.mark.parametrize("stride", [1, 2], ids=str)
def test_training(stride: int, width: int, last: bool) -> None:
    """The convolution and both gradients are padded; `joint_graph` compares results and their strides."""
    args = list(inputs(2, width))
    if last:
        args[0] = args[0].contiguous(memory_format=torch.channels_last)
    gm = joint_graph(lambda x, w, b: convolved(x.tanh(), w, b, stride=stride).sigmoid().square().mean(), *args)
    calls = [n for n in gm.graph.nodes if "convolution" in str(n.target)]
    assert len(calls) == 2
    wide = 16 if width == 12 else 64
    for n in calls:
        k = int("backward" in str(n.target))
        assert all(is_channels_last(a.meta["val"]) for a in n.args[: 2 + k])
        assert n.args[1 + k].meta["val"].shape[:2] == (2 * wide, wide)


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize(("channels", "filters"), [(20, 13), (24, 3), (20, 20), (24, 24), (10, 16)], ids=str)
def test_training_without_groups(channels: int, filters: int, last: bool) -> None:
    """Channels and filters become multiples of eight where the image is not much wider."""
    x, w, b = torch.randn(2, channels, 7, 6), torch.randn(filters, channels, 3, 3), torch.randn(filters)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    gm = joint_graph(lambda x, w, b: convolved(x.tanh(), w, b).sigmoid().square().mean(), x, w, b)
    calls = [n for n in gm.graph.nodes if "convolution" in str(n.target)]
    wide = [filters, channels] if channels == 10 else [-(-n // 8) * 8 for n in (filters, channels)]
    for n in calls:
        assert list(n.args[1 + ("backward" in str(n.target))].meta["val"].shape[:2]) == wide


@pytest.mark.parametrize(("width", "window"), [(12, 5), (20, 3)], ids=str)
def test_training_stays_as_it_is_with_wide_windows_and_with_much_more_to_save(width: int, window: int) -> None:
    x, w, _ = inputs(2, width, window)
    gm = joint_graph(lambda x, w: convolved(x, w, None).square().mean(), x, w)
    calls = [n for n in gm.graph.nodes if "convolution" in str(n.target)]
    assert all(n.args[k].meta["val"].shape[1] == 2 * width for k, n in enumerate(calls))
