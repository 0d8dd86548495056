"""Gradients of weights of volumes with few filters are computed with more filters on a GPU. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import few_filters
from altbackend.fx_passes.context import Context
from test.fx_passes.test_cuda_inference import traced
from test.fx_passes.test_cuda_joint import joint, same

T = torch.Tensor
aten = torch.ops.aten


def plain(x: T, w: T, b: T) -> T:
    return F.conv3d(x, w, b, stride=2, padding=1).tanh()


def transposed(x: T, w: T, b: T) -> T:
    return F.conv_transpose3d(x, w, b, stride=2, padding=1, output_padding=1).tanh()


@pytest.fixture(autouse=True)
def small_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_filters, "FEWEST_PRODUCTS", 0)


def padded(gm: GraphModule) -> int:
    count = few_filters.run(gm, Context(resolve(), Trace("test", resolve())))
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return count


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize(("fn", "filters", "channels", "window", "count"), [
    (plain, 5, 40, 3, 1),
    (plain, 16, 40, 3, 1),
    (plain, 17, 40, 3, 0),  # the library's kernel of tensor cores
    (plain, 5, 80, 3, 0),
    (plain, 5, 8, 3, 0),  # few channels, but for windows of an even length
    (plain, 5, 8, 4, 1),
    (transposed, 5, 40, 3, 1),
    (transposed, 5, 8, 4, 1),
    (transposed, 24, 40, 3, 0),
])  # fmt: skip
def test_gradients_of_few_filters_have_more(
    fn: Callable[[T, T, T], T], filters: int, channels: int, window: int, count: int, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    read = filters if fn is transposed else channels
    x = torch.randn(2, read, 6, 5, 7).to(memory_format=layout)
    w, b = torch.randn(filters, channels, *[window] * 3) / 9, torch.randn(channels if fn is transposed else filters)
    gm = traced(joint(lambda x, w, b: fn(x, w, b).square().sum()), x, w, b)
    want = gm(x, w, b)
    assert padded(gm) == count
    same(gm(x, w, b), want)
    calls = gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert [c.args[10][1] for c in calls] == ([True, False] if count else [True])
    assert all(len({a.meta["val"].is_contiguous(memory_format=layout) for a in c.args[:2]}) == 1 for c in calls)


def test_images_and_groups_stay_with_the_library() -> None:
    def fn(x: T, w: T) -> T:
        return F.conv2d(x[:, :40].flatten(3), w.flatten(3)).sum() + F.conv3d(x, w.repeat(2, 1, 1, 1, 1), groups=2).sum()

    gm = traced(joint(fn), torch.randn(1, 80, 5, 5, 5), torch.randn(4, 40, 3, 3, 3))
    assert padded(gm) == 0


def test_small_volumes_stay_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_filters, "FEWEST_PRODUCTS", 1 << 24)
    args = torch.randn(1, 40, 5, 5, 5), torch.randn(4, 40, 3, 3, 3), torch.randn(4)
    assert padded(traced(joint(lambda x, w, b: plain(x, w, b).sum()), *args)) == 0
