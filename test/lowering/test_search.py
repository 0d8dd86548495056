"""bucketize and searchsorted against eager."""

from __future__ import annotations

import pytest
import torch

from altbackend.report import stats
from test.compare import check


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 5, 8, 33])
def test_bucketize(n: int, right: bool) -> None:
    edges = torch.randn(n).sort().values
    x = torch.cat([torch.randn(20), edges, torch.tensor([float("nan"), float("inf"), float("-inf")])])
    before = stats.snapshot()
    check(lambda x, e: [torch.bucketize(x, e, right=right), torch.bucketize(x, e, out_int32=True)], x, edges)
    assert (stats.snapshot() - before).library_calls == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)
def test_searchsorted(dtype: torch.dtype) -> None:
    rows = torch.arange(12).reshape(3, 4).to(dtype)
    x = torch.arange(-2, 13).to(dtype).expand(3, 15).contiguous()
    before = stats.snapshot()
    check(lambda e, x: torch.searchsorted(e, x, side="right"), rows, x)
    check(lambda e, x: torch.searchsorted(e[0], x), rows, x, dynamic=True)
    assert (stats.snapshot() - before).library_calls <= 1  # a symbolic number of sorted elements
