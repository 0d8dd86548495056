"""Short rows on a CPU: totals are trees over rows of terms, and costly loops run in whole vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from altbackend.codegen.cpp.ast import Function, Let, Loop, Param, Store, name
from altbackend.codegen.cpp.whole_vectors import with_whole_vectors
from altbackend.ir import expr as ex
from altbackend.ir import value as va
from test.compare import check, check_gradients, compiled

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
LENGTHS = (1, 3, 8, 9, 15, 16, 24, 31, 33, 77, 100, 152, 255, 257, 1000, 1030)


def softmax(x: T) -> T:
    return torch.log_softmax(x, -1) * torch.softmax(x, -1)


def norm(x: T) -> T:
    return torch.nn.functional.layer_norm(x, x.shape[-1:]).exp()


def extrema(x: T) -> tuple[T, T, T]:
    return x.amax(-1), x.amin(-1), (x.exp() - x).sum(-1)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_of_every_length(length: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, length).to(dtype)
    for fn in (softmax, norm, extrema):
        check(fn, x)


@pytest.mark.parametrize("length", [8, 24, 100])
def test_rows_with_nan_and_infinities(length: int) -> None:
    x = torch.randn(6, length)
    x[0, length // 2], x[1, -1], x[2, 0], x[3] = float("nan"), float("inf"), -float("inf"), -float("inf")
    for fn in (softmax, extrema):
        check(fn, x)


def test_gradients_of_rows() -> None:
    check_gradients(softmax, torch.randn(4, 3, 27))


def source(fn: object, x: T, folder: Path) -> str:
    compiled(fn, debug_dir=str(folder), cache_graphs=False)(x)  # type: ignore[arg-type]
    return "".join(p.read_text() for p in folder.glob("*/*kernels.cpp"))


def test_what_short_rows_become(tmp_path: Path) -> None:
    text = source(lambda x: torch.softmax(x, -1), torch.randn(8, 27), tmp_path)
    assert "alt::row_max(" in text
    assert "alt::row_sum(" in text
    assert "reduction(" not in text
    assert "for (int64_t vector = 0; vector < 27" in text


@pytest.mark.parametrize(("in_place", "whole"), [({}, 16), ({"p1": "p0"}, 0), ({"p1": "p2"}, 16)], ids=str)
def test_a_loop_that_may_write_what_it_reads_runs_once(in_place: dict[str, str], whole: int) -> None:
    """The second computation of an element would read the first one's result."""
    v = ex.dim(0, 27)
    row = va.load("p0", ex.ix(v), torch.float32)
    terms = (Let("t0", row), Store("p1", ex.ix(v), va.apply("exp", name("t0", torch.float32))))
    params = tuple(Param(p, torch.float32, p == "p1") for p in ("p0", "p1", "p2"))
    f = Function(params, (), 5, None, (), (Loop(v, "0", "", terms, simd=True),), (), 1, False)
    (loop,) = with_whole_vectors(f, 16, in_place).body
    assert isinstance(loop, Loop)
    assert loop.vector == whole
