"""grid_sample in every mode, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from altbackend.report import stats
from test.compare import check, check_gradients


@pytest.mark.sample(3, every_value=True)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_modes(mode: str, padding: str, aligned: bool) -> None:
    x, grid = torch.randn(2, 3, 7, 6), torch.rand(2, 4, 5, 2) * 5 - 2.5
    before = stats.snapshot()
    check_gradients(lambda x, g: F.grid_sample(x, g, mode, padding, aligned), x, grid, tolerance=1e-4)
    assert (stats.snapshot() - before).library_calls == 0


def test_symbolic_sizes() -> None:
    x, grid = torch.randn(2, 3, 7, 6), torch.rand(2, 4, 5, 2) * 2.4 - 1.2
    check_gradients(lambda x, g: F.grid_sample(x, g, align_corners=False), x, grid, dynamic=True)


def test_image_only() -> None:
    grid = torch.rand(2, 4, 5, 2) * 2.4 - 1.2
    check_gradients(lambda x: F.grid_sample(x, grid, align_corners=False), torch.randn(2, 3, 7, 6))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
def test_far_points_stay_in_memory(number: float) -> None:
    grid = torch.full((1, 2, 2, 2), number)
    check(lambda x, g: F.grid_sample(x, g, align_corners=False), torch.randn(1, 1, 3, 3), grid)


def test_bfloat16() -> None:
    x, grid = torch.randn(1, 2, 7, 6).bfloat16(), (torch.rand(1, 4, 5, 2) * 2 - 1).bfloat16()
    check(lambda x, g: F.grid_sample(x, g, align_corners=False), x, grid)
