"""Interpolation as kernels, forward and backward, with static or symbolic sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.report import stats
from test.compare import check, check_gradients, compiled

pytestmark = pytest.mark.sample(3)

IMAGE: dict[str, dict[str, Any]] = {
    "nearest, twice": {"scale_factor": 2, "mode": "nearest"},
    "nearest, by a fraction": {"scale_factor": 1.5, "mode": "nearest"},
    "nearest, to a size": {"size": (5, 20), "mode": "nearest"},
    "nearest-exact": {"scale_factor": 1.5, "mode": "nearest-exact"},
    "bilinear, twice": {"scale_factor": 2, "mode": "bilinear"},
    "bilinear, corners": {"size": (13, 5), "mode": "bilinear", "align_corners": True},
    "bicubic": {"scale_factor": 1.5, "mode": "bicubic"},
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("form", IMAGE)
def test_image(form: str, dynamic: bool) -> None:
    before = stats.snapshot()
    check_gradients(lambda x: F.interpolate(x, **IMAGE[form]), torch.randn(2, 3, 9, 8), dynamic=dynamic)
    assert (stats.snapshot() - before).library_calls == 0


def test_other_ranks() -> None:
    x, y = torch.randn(2, 3, 9), torch.randn(1, 2, 5, 6, 7)
    check_gradients(lambda x: F.interpolate(x, scale_factor=2.5, mode="linear"), x, dynamic=True)
    check_gradients(lambda x: F.interpolate(x, size=(3, 4, 9), mode="trilinear"), y, dynamic=True)


@pytest.mark.parametrize("form", ["nearest, by a fraction", "bilinear, twice"])
def test_bfloat16(form: str) -> None:
    check(lambda x: F.interpolate(x, **IMAGE[form]), torch.randn(1, 2, 9, 8).bfloat16())


def test_bytes() -> None:
    x = (torch.rand(1, 2, 9, 8) * 255).to(torch.uint8)
    check(lambda x: F.interpolate(x, **IMAGE["nearest, by a fraction"]), x)


def test_one_kernel_for_all_sizes() -> None:
    """The size of the result is a rounded multiple of a symbolic size."""
    run = compiled(lambda x: F.interpolate(x, scale_factor=1.25, mode="bilinear"), dynamic=True)
    before = stats.snapshot()
    for n in (6, 7, 8, 9, 15):
        x = torch.randn(1, 1, n, n + 1)
        torch.testing.assert_close(run(x), F.interpolate(x, scale_factor=1.25, mode="bilinear"))
    assert (stats.snapshot() - before).graphs == 1
