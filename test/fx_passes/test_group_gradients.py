"""Gradients of images in narrow groups become convolutions that generated kernels of a GPU compute. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import group_gradients
from altbackend.fx_passes.context import Context
from test.fx_passes.test_cuda_inference import traced
from test.fx_passes.test_cuda_joint import joint, same

aten = torch.ops.aten


def convolutions(gm: GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=aten.convolution.default))


@pytest.mark.parametrize(("channels", "weight", "groups", "padding", "count"), [
    (4, (4, 1, 5, 5, 5), 4, 2, 1),
    (4, (6, 2, 3, 5, 5), 2, (0, 2, 4), 1),  # other channels than it reads, and three paddings
    (8, (4, 4, 3, 3, 3), 2, 1, 1),
    (32, (32, 16, 3, 3, 3), 2, 1, 0),  # the library has kernels of tensor cores
    (3, (3, 3, 3, 3, 3), 1, 1, 1),  # few filters
    (8, (8, 8, 3, 3, 3), 1, 1, 0),
    (3, (64, 3, 3, 3), 1, 1, 0),
    (3, (8, 3, 3, 3), 1, 1, 0),  # three filters of eight channels
    (4, (8, 4, 1, 1), 1, 0, 1),
    (16, (16, 2, 3, 3), 8, 1, 1),
    (4, (6, 2, 5, 3), 2, (2, 0), 1),
    (32, (32, 16, 3, 3), 2, 1, 0),
    (8, (8, 1, 3, 3), 8, 1, 1),
    (6, (6, 2, 3), 3, 1, 1),
])  # fmt: skip
def test_the_gradient_is_a_convolution(
    channels: int, weight: tuple[int, ...], groups: int, padding: int | tuple[int, ...], count: int
) -> None:
    torch.manual_seed(0)
    rank = len(weight) - 2
    convolve = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    fn = joint(lambda x, w, b: convolve(x, w, b, padding=padding, groups=groups).tanh().square().sum())
    args = torch.randn(2, channels, *(6, 5, 7)[:rank]), torch.randn(weight) / 4, torch.randn(weight[0])
    gm = traced(fn, *args)
    want, before = gm(*args), convolutions(gm)
    assert group_gradients.run(gm, Context(resolve(), Trace("test", resolve()))) == count
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    assert convolutions(gm) == before + count
    same(gm(*args), want)
    (left,) = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert left.args[10] == [not count, True, True]


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}, {"padding": 5}], ids=str)
def test_other_gradients_stay_with_the_library(options: dict[str, Any]) -> None:
    fn = joint(lambda x, w: F.conv3d(x, w, groups=4, **options).square().sum())
    gm = traced(fn, torch.randn(1, 4, 9, 9, 9), torch.randn(4, 1, 3, 3, 3))
    assert group_gradients.run(gm, Context(resolve(), Trace("test", resolve()))) == 0


def test_channels_last_depthwise_images_have_kernels_of_their_own() -> None:
    fn = joint(lambda x, w: F.conv2d(x, w, padding=1, groups=8).tanh().square().sum())
    x = torch.randn(2, 8, 5, 7).to(memory_format=torch.channels_last)
    gm = traced(fn, x, torch.randn(8, 1, 3, 3))
    assert group_gradients.run(gm, Context(resolve(), Trace("test", resolve()))) == 0
