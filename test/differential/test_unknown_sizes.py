"""Kernels whose loops know their lengths at the call: short rows, tiles cut off, rows counted, sums of columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from altbackend.runtime import cuda, host
from test.compare import check, compiled, difference

T = torch.Tensor
LENGTHS = (2, 3, 8, 15, 16, 17, 31, 32, 33, 100, 4097)


def kernels(folder: Path) -> str:
    return "\n".join(f.read_text() for f in sorted(folder.glob("*/*kernels.cpp")))


@pytest.mark.sample(2)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.exp().sum(-1),
        lambda x: x.sin().amax(-1),
        lambda x: (x * x).sum(-1).sqrt() + 1,
        lambda x: (x > 0).any(-1),
        lambda x: x.to(torch.bfloat16).float().mean(-1),
    ],
    ids=["sum", "max", "norm", "any", "mean"],
)
def test_rows_of_any_length(fn: Callable[[T], T], threads: int, tmp_path: Path) -> None:
    run = compiled(fn, dynamic=True, debug_dir=str(tmp_path), threads=threads, parallel_threshold=1)
    for n in LENGTHS:
        check(fn, torch.randn(37, n), run=run)
        check(fn, torch.randn(n, 5), run=run)
    text = kernels(tmp_path)
    assert "< 32) {" in text
    assert "#pragma omp simd\n      for (int64_t o = begin" in text


def test_a_row_that_is_written_as_a_whole_has_one_form(tmp_path: Path) -> None:
    """Only the results of short rows are far apart; what keeps a row in memory has no form across rows."""
    run = compiled(lambda x: torch.softmax(x, -1), dynamic=True, debug_dir=str(tmp_path))
    for n in LENGTHS:
        check(lambda x: torch.softmax(x, -1), torch.randn(7, n), run=run)
    assert "< 32) {" not in kernels(tmp_path)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x.t().contiguous() * 2 + y,
        lambda x, y: x.t().sin() * y,
        lambda x, y: torch.where(y.t() > x, x, 0.0),
    ],
    ids=["copy", "product", "against"],
)
def test_transposes_of_any_size(fn: Callable[[T, T], T], threads: int, tmp_path: Path) -> None:
    run = compiled(fn, dynamic=True, debug_dir=str(tmp_path), threads=threads, parallel_threshold=1)
    for rows, columns in ((16, 64), (5, 3), (17, 70), (64, 16), (33, 100), (100, 31), (128, 256), (15, 65)):
        check(fn, torch.randn(rows, columns), torch.randn(columns, rows), run=run)
    assert "_end == 16 &&" in kernels(tmp_path)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.permute(0, 2, 1, 3).contiguous().relu(),
        lambda x: x.permute(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3]).exp().sum(-1),
    ],
    ids=["copy", "sum"],
)
def test_rows_in_another_order(fn: Callable[[T], T], threads: int, tmp_path: Path) -> None:
    """Counted instead of divided; every thread begins in the middle."""
    run = compiled(fn, dynamic=True, debug_dir=str(tmp_path), threads=threads, parallel_threshold=1)
    for sizes in ((2, 3, 4, 5), (5, 2, 7, 40), (3, 8, 9, 16)):
        check(fn, torch.randn(sizes), run=run)
    assert "if (++g" in kernels(tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("sizes", [(3, 9000, 33), (1, 70000, 2), (8, 256, 96), (300, 9, 40), (4, 700, 7)], ids=str)
def test_sums_of_columns_are_as_exact_as_eager(sizes: tuple[int, ...], dynamic: bool) -> None:
    """Long ones go through float64 now and then."""
    x = torch.rand(sizes) + 0.5
    run = compiled(lambda x: (x.sum(1), x.amax(1), (x * 2).sum((0, 1))), dynamic=dynamic)
    for got, want in zip(run(x), (x.double().sum(1), x.amax(1).double(), (x * 2).double().sum((0, 1))), strict=True):
        assert not difference(got.double(), want, tolerance=1e-6)


@pytest.mark.parametrize("ensure_strides", [host.ensure_strides, cuda.ensure_strides])
def test_zeros_without_memory_get_some(ensure_strides: Callable[..., T]) -> None:
    got = ensure_strides(torch._efficientzerotensor((3, 4)), (3, 4), (4, 1))
    assert got.data_ptr()
    assert torch.equal(got, torch.zeros(3, 4))


def test_columns_of_a_tensor_without_rows() -> None:
    def fn(x: T) -> T:
        kept = x[x[:, 0, 0] > 0]
        return kept.permute(0, 2, 1).contiguous().relu()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(fn, dynamic=True)
        for x in (torch.rand(4, 3, 5) + 1, -torch.rand(4, 3, 5) - 1):
            check(fn, x, run=run)
