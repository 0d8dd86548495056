"""Gradients of volumes in narrow groups become convolutions that generated kernels of a GPU compute. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import volume_gradients
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
    (3, (3, 3, 3, 3, 3), 1, 1, 0),
])  # fmt: skip
def test_the_gradient_is_a_convolution(
    channels: int, weight: tuple[int, ...], groups: int, padding: int | tuple[int, ...], count: int
) -> None:
    torch.manual_seed(0)
    fn = joint(lambda x, w, b: F.conv3d(x, w, b, padding=padding, groups=groups).tanh().square().sum())
    args = torch.randn(2, channels, 6, 5, 7), torch.randn(weight) / 4, torch.randn(weight[0])
    gm = traced(fn, *args)
    want, before = gm(*args), convolutions(gm)
    assert volume_gradients.run(gm, Context(resolve(), Trace("test", resolve()))) == count
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
    assert volume_gradients.run(gm, Context(resolve(), Trace("test", resolve()))) == 0
