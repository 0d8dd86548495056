"""Instance norms that become group norms keep torch's strides, whatever the layout of the image."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from test.compare import check, check_gradients

T = torch.Tensor
IMAGES = {
    "plain": lambda: torch.randn(3, 4, 6, 5),
    "channels-last": lambda: torch.randn(3, 4, 6, 5).to(memory_format=torch.channels_last),
    "one image": lambda: torch.randn(1, 4, 6, 5).to(memory_format=torch.channels_last),
    "a slice": lambda: torch.randn(3, 8, 6, 5)[:, ::2],
    "a sequence": lambda: torch.randn(3, 7, 4).transpose(1, 2),
    "volumes": lambda: torch.randn(2, 4, 3, 4, 5).to(memory_format=torch.channels_last_3d),
}


@pytest.mark.parametrize("image", IMAGES)
def test_results_have_torchs_strides(image: str) -> None:
    check(lambda x: F.instance_norm(x), IMAGES[image]())
    check(lambda x: F.instance_norm(x.relu()).sigmoid(), IMAGES[image]())


@pytest.mark.parametrize("image", IMAGES)
def test_gradients(image: str) -> None:
    weight, bias = torch.rand(4) + 0.5, torch.randn(4)
    check_gradients(lambda x, w, b: F.instance_norm(x, None, None, w, b) * 2, IMAGES[image](), weight, bias)
