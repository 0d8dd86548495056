"""Operators of `torch.library`: results in lists beside others, and torch's small databases of such operators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from altbackend.ir.loops import Extern, results_text
from benchmarks.opinfo import BROKEN, Case, Settings, cases_of, check, database
from test import triton_run
from test.compare import check as same
from test.compare import compiled, difference

pytestmark = pytest.mark.sample(2)

T = torch.Tensor
SCHEMA = "(Tensor x, int[] lengths) -> (Tensor, Tensor[], int, Tensor[])"


@pytest.fixture
def pieces() -> Iterator[Any]:
    """x -> (sum, the pieces of given lengths, how many, their doubles)."""

    def kernel(x: T, lengths: list[int]) -> tuple[T, list[T], int, list[T]]:
        parts = [p.clone() for p in x.split(lengths)]
        return x.sum(), parts, len(parts), [2 * p for p in parts]

    with torch.library._scoped_library("altbackend_test", "FRAGMENT") as library:
        library.define(f"pieces{SCHEMA}")
        library.impl("pieces", kernel, "CompositeExplicitAutograd")
        yield torch.ops.altbackend_test.pieces


@pytest.mark.parametrize("way", ["cpu", "gpu"])
def test_results_in_lists(pieces: Any, way: str) -> None:
    def fn(x: T) -> tuple[T, ...]:
        total, parts, count, doubles = pieces(x + 1, [2, 0, 3])
        return total * count, *(p.sin() for p in parts), parts[2] + doubles[2], doubles[0]

    run = compiled(fn) if way == "cpu" else triton_run.compiled(fn, host=True)
    x = torch.randn(5, 3)
    for got, want in zip(run(x), fn(x), strict=True):
        assert not difference(got, want)


def test_a_list_of_lists_as_text() -> None:
    call = Extern(("a", None, "b", "c"), None, (), multi=True, lists=((1, 0), (1, 2)))
    assert results_text(call) == "a, [], [_, b], c"
    assert results_text(Extern(("a",), None, (), multi=True)) == "a,"
    assert results_text(Extern(("a",), None, (), multi=True, lists=((0, 1),))) == "[a],"


def test_results_in_lists_with_dynamic_sizes(pieces: Any) -> None:
    def fn(x: T) -> tuple[T, ...]:
        total, parts, _, _ = pieces(x, [x.shape[0] - 1, 1])
        return total + parts[0].sum(), parts[1]

    run = compiled(fn, dynamic=True)
    for n in (4, 7):
        same(fn, torch.randn(n, 3), run=run)


def small_databases() -> list[Case]:
    names = [n for n in database() if n.startswith(("hop.", "custom_op."))]
    found = [c for n in names for op in database()[n] for c in cases_of(op, "float32", "cpu", ("forward", "backward"))]
    return list(dict.fromkeys(found))


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", small_databases(), ids=lambda c: f"{c.op}-{c.direction}")
def test_higher_order_and_custom_operators(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # torch's partitioner leaves a file where it fails
    found = check(case, Settings("cpu", 4))
    assert found.status not in BROKEN, found.detail
