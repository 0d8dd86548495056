"""Costly loops that read at checked positions run in vectors, read nothing outside, and report what is out of range."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from altbackend.compile_pool import cpp
from altbackend.config.resolve import resolve
from test.compare import compiled, difference

pytestmark = pytest.mark.sample(2)

T = torch.Tensor


def exponentials(x: T, at: T) -> T:
    return x.gather(1, at).exp().log1p()


def total(x: T, at: T) -> T:
    return torch.log1p(x.gather(1, at).abs()).sum(1)


def selected(x: T, at: T) -> T:
    return torch.sigmoid(x[at]) * torch.tanh(x[at].exp())


def chained(x: T, at: T) -> T:
    rows = x.gather(1, at)
    return torch.tanh(rows.gather(1, at).exp()).log1p()


def over_classes(x: T, at: T) -> T:
    return F.cross_entropy(x.unflatten(1, (-1, 5)).transpose(1, 2), at[:, : x.shape[1] // 5] % 5, reduction="none")


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [10, 75, 1500])
@pytest.mark.parametrize("fn", [exponentials, total, chained, over_classes])
def test_values(fn: Callable[[T, T], T], columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, at = torch.randn(6, columns, dtype=dtype), torch.randint(0, columns, (6, columns))
    assert not difference(compiled(fn)(x, at), fn(x, at), fn(x.double(), at))


@pytest.mark.parametrize("size", [7, 3000])
def test_one_loop(size: int) -> None:
    x, at = torch.randn(50), torch.randint(-50, 50, (size,))
    assert not difference(compiled(selected)(x, at), selected(x, at))


@pytest.mark.parametrize("where", [0, 8, 74])
@pytest.mark.parametrize("position", [-76, 75, 1 << 40, -(1 << 40)])
@pytest.mark.parametrize("fn", [exponentials, total, chained])
def test_positions_out_of_range(fn: Callable[[T, T], T], position: int, where: int) -> None:
    x, at = torch.randn(6, 75), torch.zeros(6, 75, dtype=torch.int64)
    at[3, where] = position
    run = compiled(fn)
    with pytest.raises(RuntimeError, match=f"index {position} is out of bounds for a dimension of size 75"):
        run(x, at)
    at[3, where] = 74  # the error is over
    assert not difference(run(x, at), fn(x, at))


# (declarations, iteration) of a loop that must run in vectors: what it reads or selects by is a boolean in memory.
MASKED = {
    "select": "o[i] = alt::truth(m[i]) ? x[i] * 2.0f : 0.0f;",
    "select an exponential": "const bool t = alt::truth(m[i]); const float e = alt::exp(x[i]); o[i] = t ? e : 0.0f;",
    "convert": "o[i] = x[i] * alt::cast<float>(alt::truth(m[i]));",
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_in_memory_run_in_vectors(name: str, tmp_path: Path) -> None:
    """g++ vectorises no loop that selects by a loaded `bool`, which made masked operators twelve times slower."""
    cfg = resolve(None, {})
    compiler = cpp.find_compiler(cfg.cxx)
    if "clang" in Path(compiler).resolve().name:
        pytest.skip("the report is g++'s")
    source = tmp_path / "loop.cpp"
    arguments = "const bool* __restrict m, const float* __restrict x, float* __restrict o, int64_t n"
    loop = f"#pragma omp simd\nfor (int64_t i = 0; i < n; ++i) {{ {MASKED[name]} }}"
    source.write_text(f'#include <altbackend/kernel.h>\nextern "C" void f({arguments}) {{\n{loop}\n}}\n')
    command = [compiler, *cpp.flags(cfg), "-fopt-info-vec-optimized", "-c", str(source), "-o", str(tmp_path / "o")]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "loop.cpp:4:" in said.stderr, said.stderr
    assert "loop vectorized" in said.stderr
