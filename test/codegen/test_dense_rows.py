"""Elements at strides: results equal eager's, and the arithmetic runs in loops over neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from altbackend.codegen.cpp.print_cpp import CTYPES
from test.compare import compiled

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
PROGRAMS: dict[str, Callable[[T], T]] = {
    "channels-last result": lambda x: (x * 2 + 1).contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: (x.transpose(1, 3) * 2 + 1).contiguous(),
    "normalised and turned": lambda x: F.layer_norm(x.permute(0, 2, 3, 1).float(), (x.shape[1],)).to(x.dtype),
    "sum of two layouts": lambda x: x + x.transpose(2, 3),
    "every seventh": lambda x: x[..., ::7] * 2 + 1,
    "strided result": lambda x: torch.stack([x, x * 2, x * 3, x * 4, x * 5, x * 6], -1) + 1,
    "select along channels": lambda x: torch.where(x.transpose(1, 2) > 0, x.transpose(1, 2), -1),
}


@pytest.mark.sample(6, every_value=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(2, 16, 32, 32), (1, 37, 19, 19), (3, 5, 9, 9)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_eager(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 9, shape).to(dtype) if not dtype.is_floating_point else torch.randn(shape).to(dtype)
    f = PROGRAMS[name]
    got, want = compiled(f)(x), f(x)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_strided_load_is_copied_first(dtype: torch.dtype, tmp_path: Path) -> None:
    def every_sixteenth(x: T) -> T:
        return torch.softmax(x[:, ::16] * 2, -1)

    x = torch.randn(128, 2048).to(dtype)
    got = compiled(every_sixteenth, debug_dir=str(tmp_path), cache_graphs=False)(x)
    torch.testing.assert_close(got, every_sixteenth(x))
    (source,) = tmp_path.glob("*/*kernels.cpp")
    text = source.read_text()
    assert f"{CTYPES[dtype]} n0[" in text
    assert text.index("n0[i") < text.index("#pragma omp simd")


def test_in_place_results_are_read_first() -> None:
    def f(x: T, y: T) -> T:
        x.mul_(2).add_(y.transpose(0, 1))
        return x + 1

    x, y = torch.randn(40, 40).bfloat16(), torch.randn(40, 40).bfloat16()
    mine = x.clone()
    torch.testing.assert_close(compiled(f)(mine, y), f(x, y))
    torch.testing.assert_close(mine, x)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int16], ids=str)
@pytest.mark.parametrize("rows", [63, 64, 200])
def test_recurrence_over_columns_reads_copies(rows: int, dtype: torch.dtype, tmp_path: Path) -> None:
    def f(x: T, y: T) -> T:
        h = torch.zeros(x.shape[0])
        for t in range(12):
            h = h * 0.9 + x[:, t].float() * y[:, t]
        return h

    torch.manual_seed(0)
    x, y = (torch.randn(rows, 40) > 0).to(dtype), torch.randn(rows, 40)
    g = compiled(f, debug_dir=str(tmp_path), cache_graphs=False, dynamic=False)
    torch.testing.assert_close(g(x, y), f(x, y))
    (source,) = tmp_path.glob("*/*kernels.cpp")
    assert "asm volatile" in source.read_text()


def test_recurrence_over_columns_of_any_length() -> None:
    def f(x: T, y: T) -> tuple[T, T]:
        h = torch.zeros(x.shape[0])
        for t in range(10):
            h = torch.where(x[:, t], h.exp(), y[:, t])
        return h, h.sum()

    g = compiled(f, dynamic=True)
    for rows in (70, 5, 129):
        x, y = torch.randn(rows, 12) > 0, torch.randn(rows, 12)
        torch.testing.assert_close(g(x, y), f(x, y), equal_nan=True)
