"""Transposed convolutions whose windows tile the result are matmuls on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import disjoint_windows
from altbackend.fx_passes.context import Context
from altbackend.fx_passes.mixed_layouts import is_channels_last
from test import triton_run
from test.compare import difference
from test.fx_passes.test_cuda_inference import targets
from test.fx_passes.test_cuda_joint import rewritten as joint_graph
from test.graphs import schedule, trace

T = torch.Tensor
GRAPHS: dict[str, Any] = {
    "alone": lambda x, w, b: F.conv_transpose2d(x, w, None, w.shape[2:]),
    "with a bias and a ReLU": lambda x, w, b: F.conv_transpose2d(x, w, b, w.shape[2:]).relu(),
    "before a convolution": lambda x, w, b: F.conv2d(F.conv_transpose2d(x, w, b, w.shape[2:]).relu(), w[:2, :, :1, :1]),
    "after a convolution": lambda x, w, b: F.conv_transpose2d(F.conv2d(x, w[:, :5, :1, :1]).tanh(), w, b, w.shape[2:]),
    "padded": lambda x, w, b: F.conv_transpose2d(x, w, None, w.shape[2:], (0, 1)),
    "padded, with a bias": lambda x, w, b: F.conv_transpose2d(x, w, b, w.shape[2:], (0, 1)).tanh(),
    "normalised": lambda x, w, b: F.group_norm(F.conv_transpose2d(x, w, b, w.shape[2:]), 2),
}


@pytest.fixture(autouse=True)
def equal_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither products nor convolutions round to TF32."""
    monkeypatch.setattr(torch_api, "allows_tf32_convolutions", lambda: False)


def rewritten(gm: GraphModule, **options: Any) -> int:
    cfg = resolve(options=options)
    return disjoint_windows.run(gm, Context(cfg, Trace("test", cfg), (), "gpu"))


def inputs(window: tuple[int, int], last: bool) -> tuple[T, T, T]:
    x, w = torch.randn(2, 5, 3, 4), torch.randn(5, 6, *window)
    return (x.to(memory_format=torch.channels_last) if last else x), w, torch.randn(6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("window", [(2, 2), (3, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_results(name: str, window: tuple[int, int], last: bool) -> None:
    args = inputs(window, last)
    (gm,) = trace(GRAPHS[name], *args)
    assert rewritten(gm) == 1
    expected = GRAPHS[name](*(a.double() for a in args)).float()
    assert not difference(triton_run.compiled(GRAPHS[name])(*args), expected, strides=False, tolerance=2e-5)


@pytest.mark.parametrize(
    ("name", "last", "expected"),
    [
        ("alone", False, False),
        ("alone", True, True),
        ("normalised", False, False),
        ("before a convolution", False, True),
        ("after a convolution", False, True),
    ],
)
def test_the_layout_is_that_of_its_surroundings(name: str, last: bool, expected: bool) -> None:
    (gm,) = trace(GRAPHS[name], *inputs((2, 2), last))
    assert rewritten(gm) == 1
    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "call_function"]
    image = next(v for v in values if isinstance(v, T) and v.shape == (2, 6, 6, 8))
    assert is_channels_last(image) == expected


@pytest.mark.parametrize(
    "options",
    [{"stride": 1}, {"padding": 1}, {"output_padding": 1}, {"dilation": 2}, {"groups": 5}],
    ids=str,
)
def test_others_stay_with_the_library(options: dict[str, Any]) -> None:
    x, w, _ = inputs((2, 2), False)
    (gm,) = trace(lambda x, w: F.conv_transpose2d(x, w, **{"stride": 2, **options}), x, w)
    assert rewritten(gm) == 0


def test_16_bits_and_other_settings_stay_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = inputs((2, 2), False)
    (gm,) = trace(GRAPHS["alone"], x.bfloat16(), w.bfloat16(), b.bfloat16())
    assert rewritten(gm) == 0
    monkeypatch.setattr(torch_api, "allows_tf32_convolutions", lambda: True)
    (gm,) = trace(GRAPHS["alone"], x, w, b)
    assert rewritten(gm) == 0


def large(last: bool = False) -> T:
    x = torch.randn(2, 5, 12, 10)  # 120 points, of 24 elements of a window
    return x.to(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("window", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["alone", "with a bias"])
def test_training(biased: bool, window: tuple[int, int], last: bool) -> None:
    """The convolution and both gradients are products; `joint_graph` compares results and their strides."""

    def fn(x: T, w: T, b: T) -> T:
        y = F.conv_transpose2d(x.tanh(), w, b if biased else None, w.shape[2:])
        return (y * (1 if biased else b[0])).sigmoid().square().mean()

    gm = joint_graph(fn, large(last), *inputs(window, last)[1:])
    assert not [n for n in gm.graph.nodes if "convolution" in str(n.target)]
    assert targets(gm).count("aten.mm.default" if last else "aten.bmm.default") == 3


@pytest.mark.parametrize("size", [(15, 15), (12, 6)], ids=["not aligned", "small"])
def test_other_planes_train_as_rows(size: tuple[int, int]) -> None:
    x, w = torch.randn(2, 5, *size), inputs((2, 2), False)[1]
    gm = joint_graph(lambda x, w: F.conv_transpose2d(x, w, None, 2).sigmoid().mean(), x, w)
    assert targets(gm).count("aten.mm.default") == 3


def test_images_among_convolutions_train_as_rows() -> None:
    def fn(x: T, w: T, v: T) -> T:
        return F.conv2d(F.conv_transpose2d(x, w, None, 2).relu(), v).sigmoid().mean()

    gm = joint_graph(fn, large(), inputs((2, 2), False)[1], torch.randn(3, 6, 3, 3))
    assert targets(gm).count("aten.mm.default") == 3


def test_only_one_gradient() -> None:
    def fn(x: T, w: T) -> T:
        return F.conv_transpose2d(x.detach(), w, None, 2).sigmoid().mean() + x.mean()

    gm = joint_graph(fn, large(), inputs((2, 2), False)[1])
    assert targets(gm).count("aten.bmm.default") == 2


def test_padded_windows_train_with_the_library() -> None:
    x, w = large(), inputs((2, 2), False)[1]
    gm = joint_graph(lambda x, w: F.conv_transpose2d(x, w, None, 2, 1).square().mean(), x, w)
    assert "aten.bmm.default" not in targets(gm)
    assert len([n for n in gm.graph.nodes if "convolution" in str(n.target)]) == 2


@pytest.mark.parametrize("name", ["softmax", "activation", "scan"])
def test_windows_that_padding_cuts_are_read_in_place(name: str) -> None:
    following = {
        "softmax": lambda y: y.softmax(1),
        "activation": lambda y: y.sigmoid() * 2,
        "scan": lambda y: y.cumsum(1),
    }[name]

    def fn(x: T, w: T) -> T:
        return following(F.conv_transpose2d(x, w, stride=2, padding=1))

    x, w = (torch.randn(n).contiguous(memory_format=torch.channels_last) for n in ((2, 5, 9, 10), (5, 6, 2, 2)))
    (gm,) = trace(fn, x, w)
    assert rewritten(gm) == 1
    s = schedule(gm, ctx=triton_run.TARGET)
    assert (s.kernels, s.calls) == (1, 1)
    assert not difference(triton_run.compiled(fn)(x, w), fn(x, w), strides=False, tolerance=2e-5)
