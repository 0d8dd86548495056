"""Softmaxes and positions of extrema over few, long rows: one pass over each part, on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.schedule import split
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import as_list, check, difference, twin

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
GPU = ScheduleContext(H200)


def rows(*shape: int) -> T:
    """Return random numbers in which whole parts of rows, and one row, are -inf, and others hold inf and NaN."""
    x = torch.randn(*shape)
    x[0, : shape[1] // 2] = float("-inf")
    x[1] = float("-inf")
    x[2, 3], x[3, 5] = float("inf"), float("nan")
    return x


PROGRAMS: dict[str, tuple[Callable[..., Any], int]] = {
    "softmax": (lambda x: torch.softmax(x, 1), 3),
    "log softmax": (lambda x: torch.log_softmax(x, 1), 3),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), 2),
    "by hand": (lambda x: (x - x.amax(1, keepdim=True)).exp().sum(1), 2),
    "argmax": (lambda x: x.argmax(1), 2),
    "minimum with position": (lambda x: x.min(1), 2),
}
SHAPES = {"equal parts": (5, 96), "uneven parts": (5, 97), "columns": (5, 96, 33), "uneven columns": (5, 101, 33)}


def run_on_gpu(fn: Callable[..., Any], x: T) -> list[Any]:
    """Compare the kernels of a GPU, interpreted, with eager; return the steps that ran."""
    seen: list[Any] = []
    got = as_list(triton_run.compiled(fn, seen=seen, ctx=GPU)(*twin([x])))
    for g, w in zip(got, as_list(fn(x)), strict=True):
        assert difference(g, w, None, 2e-5 if w.dtype == torch.float32 else None) == ""
    return seen


@pytest.fixture(autouse=True)
def _short_rows_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    for constant in ("LONG", "LONG_COLUMN"):
        monkeypatch.setattr(split, constant, 64)
    for constant in ("SHORTEST_PART", "SHORTEST_COLUMN", "SHORTEST_SQUARES"):
        monkeypatch.setattr(split, constant, 16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_gpu(name: str, shape: str) -> None:
    fn, most = PROGRAMS[name]
    seen = run_on_gpu(fn, rows(*SHAPES[shape]))
    parts = [b for _, buffers, _ in seen for b in buffers if b.endswith("_parts")]
    assert len({*parts}) == 2
    assert len(seen) <= most


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_cpu(name: str) -> None:
    fn, _ = PROGRAMS[name]
    check(fn, rows(5, 96))
    check(fn, torch.randn(1, 200))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 128) * 9).to(dtype)
    assert len(run_on_gpu(lambda x: x.argmin(1), x)) == 2
    if dtype.is_floating_point:
        assert len(run_on_gpu(lambda x: torch.softmax(x, 1), x)) <= 3


def test_a_sum_that_nothing_else_reads_is_split_with_its_maximum() -> None:
    """Two sums of one maximum, and an exponential that a third result reads."""

    def fn(x: T) -> tuple[T, T, T]:
        e = torch.exp(x - x.amax(1, keepdim=True))
        return e.sum(1), (e * 2).sum(1), e / e.sum(1, keepdim=True)

    seen = run_on_gpu(fn, torch.randn(4, 128))
    assert len({b for _, buffers, _ in seen for b in buffers if b.endswith("_parts")}) >= 2


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [((6, 5, 9, 7), (0, 2, 3)), ((2, 3, 101, 7), (0, 2, 3)), ((40, 5, 9, 7), (0, 2))],
    ids=["whole loops", "an uneven inner loop", "columns and rows"],
)
def test_sums_of_operands_in_two_layouts_are_split(sizes: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Their programs take squares of both operands, so that few results would be few programs."""

    def fn(x: T, y: T) -> T:
        return (x * y).sum(dims)

    x, y = torch.randn(sizes), torch.randn(sizes).to(memory_format=torch.channels_last)
    seen: list[Any] = []
    got = triton_run.compiled(fn, seen=seen, ctx=GPU)(x, y)
    assert difference(got, fn(x, y), None, 2e-5) == ""
    assert len(seen) == 2
