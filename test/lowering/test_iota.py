"""prims.iota and arange with any start and step."""

from __future__ import annotations

import pytest
import torch

from altbackend.report import stats
from test.compare import check, compiled

iota = torch.ops.prims.iota


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("start", "step"), [(0, 1), (3, -2), (-7, 5)])
def test_iota(start: int, step: int, dtype: torch.dtype) -> None:
    before = stats.snapshot()
    check(lambda x: x + iota(7, start=start, step=step, dtype=dtype, device="cpu", requires_grad=False), torch.rand(7))
    assert (stats.snapshot() - before).library_calls == 0


def test_iota_of_any_length() -> None:
    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        return x * iota(x.shape[0], start=n, step=n - 4, dtype=torch.int64, device="cpu", requires_grad=False)

    run = compiled(fn, dynamic=True)
    for size, n in ((3, 2), (8, 5), (6, -3)):
        check(fn, torch.rand(size), n, run=run)


def test_arange_of_numbers() -> None:
    def fn(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        return torch.arange(n, n + 5) + x, torch.arange(0.5, 3, 0.5) * x, torch.arange(n, n - 10, -2) * x

    run = compiled(fn, dynamic=True)
    for n in (2, 9, -4):
        check(fn, torch.rand(5), n, run=run)


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [(0,), (200,), (300,), (300, 500), (70_000, 2), (2, 70_000)], ids=str)
def test_identity_matrices_of_any_size_run_as_kernels(size: tuple[int, ...], dtype: torch.dtype) -> None:
    def f() -> torch.Tensor:
        return torch.eye(*size, dtype=dtype)

    torch.testing.assert_close(compiled(f, strict=True)(), f())
