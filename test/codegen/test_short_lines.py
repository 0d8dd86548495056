"""Totals over several loops whose innermost is short: one row collects the terms of all lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from test.compare import compiled

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
PROGRAMS: dict[str, Callable[[T], T]] = {
    "windows": lambda x: F.adaptive_avg_pool2d(x, 3),
    "average pool": lambda x: F.avg_pool2d(x, 4),
    "part of an image": lambda x: x[..., :7].sum((2, 3)) * 2,
    "maximum of a part": lambda x: x[..., 3:9].amax((1, 2, 3)),
    "minimum and sum": lambda x: x[:, :, ::2, :5].amin((2, 3)) + x[:, :, ::2, :5].exp().sum((2, 3)),
    "group norm": lambda x: F.group_norm(x[..., :7].contiguous(), 2),
    "product of lines": lambda x: (x[..., :6] * x[..., 6:12]).mean((1, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_eager(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 8, 24, 24).to(dtype)
    got, want = compiled(PROGRAMS[name])(x), PROGRAMS[name](x.double()).to(dtype)
    torch.testing.assert_close(got, want, rtol=4 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["windows", "maximum of a part", "minimum and sum"])
def test_special_values(name: str, number: float) -> None:
    x = torch.randn(2, 4, 24, 24)
    x[0, 1, 4, 4] = number
    torch.testing.assert_close(compiled(PROGRAMS[name])(x), PROGRAMS[name](x), equal_nan=True)


def test_one_total_for_a_window(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 24, 24).bfloat16()
    compiled(PROGRAMS["windows"], debug_dir=str(tmp_path), cache_graphs=False)(x)
    (source,) = tmp_path.glob("*/*kernels.cpp")
    text = source.read_text()
    assert "v0[i1] = v0[i1] + " in text
    assert text.count("row_sum") == 1
