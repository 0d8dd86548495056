"""Convolutions that passes of a GPU pad or turn into products: results and gradients against eager in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from altbackend import alt
from test.gpu.test_narrow_groups import gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TF32_ERROR = 2e-3  # of gradients of results, each of operands of 11 bits
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "groups of 12": (nn.Conv2d(48, 48, 3, 1, 1, groups=4), (3, 48, 17, 20)),
    "groups of 24 with steps": (nn.Conv2d(48, 48, 3, 2, 1, groups=2), (3, 48, 17, 20)),
    "groups of 20 and windows of 5x5": (nn.Conv2d(40, 40, 5, 1, 2, groups=2), (3, 40, 17, 20)),
    "groups of 18 and windows of 5x5": (nn.Conv2d(36, 36, 5, 1, 2, groups=2), (3, 36, 17, 20)),
    "groups of 6": (nn.Conv2d(48, 48, 3, 1, 1, groups=8), (3, 48, 17, 20)),
    "few channels and filters": (nn.Conv2d(3, 4, 3, 1, 1), (20, 3, 30, 32)),
    "few channels, a loop": (nn.Conv2d(3, 3, 5, 1, 2), (20, 3, 30, 32)),
    "one filter": (nn.Conv2d(16, 1, 3, 2, 1), (20, 16, 30, 32)),
    "other numbers of channels and filters": (nn.Conv2d(20, 13, 3, 1, 1), (40, 20, 30, 32)),
    "few filters": (nn.Conv2d(64, 3, 3, 1, 1), (20, 64, 30, 32)),
    "windows that cover the image": (nn.Conv2d(8, 16, 7, 1, 3), (3000, 8, 4, 4)),
    "small images": (nn.Conv2d(8, 16, 3, 1, 1), (3000, 8, 5, 5)),
    "windows that tile the result": (nn.ConvTranspose2d(16, 24, 2, 2), (3, 16, 24, 20)),
    "windows over planes that are not aligned": (nn.ConvTranspose2d(16, 24, 3, 3), (3, 16, 13, 11)),
}


@pytest.fixture
def allowed_tf32() -> Iterator[None]:
    """Convolutions and products round to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    with torch.backends.cudnn.flags(allow_tf32=True):
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize("name", LAYERS)
def test_float32_in_tf32(name: str, last: bool, allowed_tf32: None) -> None:
    layer, sizes = LAYERS[name]
    layer = layer.to("cuda", torch.float32)
    x = torch.randn(sizes, device="cuda")
    x = x.to(memory_format=torch.channels_last) if last else x
    torch._dynamo.reset()
    got = gradients(torch.compile(lambda y: layer(y).tanh(), backend=alt, dynamic=False), x, layer)
    eager = gradients(lambda y: layer(y).tanh(), x, layer)
    layer = layer.double()
    assert [y.stride() for y in got[:2]] == [y.stride() for y in eager[:2]]
    for y, want in zip(got, gradients(lambda y: layer(y).tanh(), x.double(), layer), strict=True):
        assert float((y.double() - want).norm() / want.norm()) <= TF32_ERROR


@pytest.mark.parametrize("last", [False, True], ids=["plain", "channels-last"])
@pytest.mark.parametrize(
    "name",
    [
        "windows that cover the image",
        "small images",
        "other numbers of channels and filters",
        "few filters",
        "few channels and filters",
        "few channels, a loop",
        "one filter",
        "groups of 6",
    ],
)
def test_bfloat16(name: str, last: bool) -> None:
    """Results and gradients have at most 1.5 times the errors of eager's."""
    layer, sizes = LAYERS[name]
    layer = layer.to("cuda", torch.bfloat16)
    x = torch.randn(sizes, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last) if last else x
    torch._dynamo.reset()
    got = gradients(torch.compile(lambda y: layer(y).tanh(), backend=alt, dynamic=False), x, layer)
    eager = gradients(lambda y: layer(y).tanh(), x, layer)
    layer = layer.double()
    for y, e, want in zip(got, eager, gradients(lambda y: layer(y).tanh(), x.double(), layer), strict=True):
        own, of_eager = (float((g.double() - want).norm() / want.norm()) for g in (y, e))
        assert own <= 1.5 * of_eager + 1e-4, (own, of_eager)
