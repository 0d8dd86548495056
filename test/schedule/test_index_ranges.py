"""Loops in pieces with constant conditions: the pieces cover the loop, and give what the whole gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.schedule.tiling.cpu.index_ranges import MOST_PIECES, decided
from test.compare import compiled

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
PROGRAMS: dict[str, Callable[[T], T]] = {
    "zero padding": lambda x: F.pad(x, (3, 2)) * 2,
    "cropping padding": lambda x: F.pad(x, (-3, 2)) * 2,
    "reflection": lambda x: F.pad(x, (3, 5), mode="reflect") * 2,
    "replication": lambda x: F.pad(x, (3, 5), mode="replicate") * 2,
    "roll": lambda x: torch.roll(x, 5, -1) + x,
    "concatenation": lambda x: torch.cat([x, x * 2, x + 1], -1),
    "rotated halves": lambda x: torch.cat([-x[..., 20:], x[..., :20]], -1) * x,
    "average pool": lambda x: F.avg_pool1d(x, 5, 1, 2),
    "dilated max pool": lambda x: F.max_pool1d(x, 4, 2, 2, 3),
    "mask of positions": lambda x: torch.where(torch.arange(x.shape[-1]) < 7, x, -x),
    "clamped positions": lambda x: x[..., (torch.arange(x.shape[-1]) - 4).clamp(0, 30)],
    "flipped end": lambda x: torch.cat([x, x.flip(-1)], -1) + 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_eager(name: str, dtype: torch.dtype) -> None:
    if dtype == torch.int64 and ("pool" in name or name in ("reflection", "replication")):
        pytest.skip("eager has no integers here")
    torch.manual_seed(0)
    x = (torch.randn(3, 4, 41) * 9).to(dtype)
    f = PROGRAMS[name]
    torch.testing.assert_close(compiled(f)(x), f(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("window", [3, 5, 7])
def test_padded_windows_equal_eager(window: int, layout: torch.memory_format, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 19, 23).to(dtype).contiguous(memory_format=layout)

    def pools(x: T) -> tuple[T, T]:
        half = window // 2
        return F.max_pool2d(x, window, 1, half), F.avg_pool2d(x, window, 2, half, count_include_pad=False)

    for got, want in zip(compiled(pools)(x), pools(x), strict=True):
        torch.testing.assert_close(got, want)


def loops(folder: Path) -> list[int]:
    """Return the trip counts of the vector loops of the only kernel."""
    (source,) = folder.glob("*/*kernels.cpp")
    lines = source.read_text().splitlines()
    simd = [(first, b) for first, a, b in zip(lines, lines[1:], lines[2:], strict=False) if "omp simd" in a]
    ends = [b if "_first" not in b else re.sub(r".*min64\(vector, (\d+) .*", r"< \1;", first) for first, b in simd]
    return [int(line.split("< ")[1].split(";")[0]) for line in ends]


def test_interiors_have_no_conditions(tmp_path: Path) -> None:
    x = torch.randn(8, 8, 56, 56)
    compiled(lambda x: F.max_pool2d(x, 3, 1, 1), debug_dir=str(tmp_path), cache_graphs=False)(x)
    assert loops(tmp_path) == [1, 54, 1]


def test_short_loops_and_many_conditions_stay_whole(tmp_path: Path) -> None:
    short, many = torch.randn(64, 9), torch.randn(64, 64)
    compiled(lambda x: F.pad(x, (1, 1)) * 2, debug_dir=str(tmp_path / "a"), cache_graphs=False)(short)
    assert loops(tmp_path / "a") == [11]
    compiled(lambda x: x.repeat_interleave(2, -1) * 2, debug_dir=str(tmp_path / "b"), cache_graphs=False)(many)
    assert len(loops(tmp_path / "b")) <= MOST_PIECES


@pytest.mark.parametrize(
    ("begin", "end", "position"),
    [(0, 3, lambda v: ex.sub(3, v)), (3, 9, lambda v: ex.sub(v, 3))],
    ids=["negative", "positive"],
)
def test_the_sign_of_a_position_is_decided(begin: int, end: int, position: Callable[[ex.Index], ex.Index]) -> None:
    v = ex.ix(ex.var("i0", end - begin))
    inside = va.apply("abs", va.index(ex.add(v, begin - 3)))
    index = ex.lookup(inside, 0, 9)
    loaded = decided(va.load("x", index, torch.float32))
    assert loaded.attr[1] == position(ex.add(v, begin))


def test_a_value_narrowed_to_its_own_dtype_is_itself() -> None:
    x = va.load("x", 0, torch.bfloat16)
    assert va.cast(va.cast(x, torch.float32), torch.bfloat16) is x
    y = va.load("y", 0, torch.float32)
    assert va.cast(va.cast(y, torch.bfloat16), torch.float32) is not y


def test_a_total_of_padded_windows_runs_in_all_threads(tmp_path: Path) -> None:
    """A kernel of one row runs in one thread: loops of windows do not merge into one that threads share."""
    x = torch.randn(8, 8, 40, 40)

    def loss(x: T) -> T:
        return (F.avg_pool2d(x, 3, 1, 1) * x).sum()

    got = compiled(loss, debug_dir=str(tmp_path), cache_graphs=False, threads=2)(x)
    torch.testing.assert_close(got, loss(x))
    (kernels,) = tmp_path.glob("*/*kernels.txt")
    assert "cross_row sum" in kernels.read_text()
    assert "kernel: 1 rows" not in kernels.read_text()


def test_a_total_that_its_kernel_reads() -> None:
    x = torch.randn(4, 4, 12, 12)

    def shares(x: T) -> T:
        y = F.pad(x, (1, 1, 1, 1)) + 1
        return y / y.sum()

    torch.testing.assert_close(compiled(shares, threads=2)(x), shares(x))
