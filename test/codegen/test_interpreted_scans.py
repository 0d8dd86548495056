"""Triton's interpreter combines points side by side in these tests; its own functions go from point to point."""

from __future__ import annotations

from typing import Any

import torch

from test import triton_run, triton_worker

ROWS, COLUMNS = 16, 32
SOURCE = """
import triton
import triton.language as tl
from altbackend.runtime.tile_math import *

@triton.jit
def largest_at(a, i, b, j):
    return tl.where(a >= b, a, b), tl.where(a >= b, i, j)

@triton.jit
def kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places = row[:, None] * COLUMNS + column[None, :]
    tile, line = tl.load(x + places), tl.load(x + row)
    tl.store(out + column, sum_exactly(tile, 0, False))
    tl.store(out + 100 + row[:, None], sum_exactly(tile, 1, True))
    tl.store(out + 200, sum_exactly(line, 0, False))
    values, at = tl.reduce((tile, row[:, None] + tl.zeros([ROWS, COLUMNS], tl.int32)), 0, largest_at)
    tl.store(out + 300 + column, values)
    tl.store(out + 400 + column, at.to(tl.float32))
    tl.store(out + 1000 + places, scan_exactly(tile, 0))
    tl.store(out + 2000 + places, scan_exactly_backwards(tile, 1))
    tl.store(out + 3000 + row, scan_exactly(line, 0))
    values, at = tl.associative_scan((line.to(tl.bfloat16), row), 0, largest_at)
    tl.store(out + 3100 + row, values.to(tl.float32) + at)
"""


def test_points_side_by_side_are_combined_as_one_after_another() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS * COLUMNS) * torch.tensor(10.0).pow(3 * torch.randn(ROWS * COLUMNS))
    x[5], x[77] = float("inf"), float("nan")
    job: Any = (
        SOURCE,
        [triton_worker.pack(t) for t in (x, torch.zeros(4000))],
        [],
        {"ROWS": ROWS, "COLUMNS": COLUMNS},
        1,
    )
    launches: tuple[Any, ...] = (triton_worker.launch, triton_worker.launch_by_points)
    runs = [triton_run._worker(True).submit(launch, *job) for launch in launches]
    mine, own = (triton_worker.unpack(run.result(timeout=100)[1]) for run in runs)
    assert (mine != 0).sum() > 1000
    assert torch.equal(mine.view(torch.int32), own.view(torch.int32))
