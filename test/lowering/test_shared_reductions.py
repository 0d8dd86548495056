"""Equal reductions share a buffer, results that may be written to share none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from test import triton_run
from test.compare import compiled

T = torch.Tensor
AT = torch.tensor([1, 3])


def both_returned(x: T) -> tuple[T, ...]:
    return x.sum(1), x.sum(1)


def one_written(x: T) -> tuple[T, ...]:
    a, b = x.sum(1), x.sum(1)
    b[2:4] = 7
    return a, b


def one_put(x: T) -> tuple[T, ...]:
    a, b, c = x.softmax(1).sum(0), x.amax(1), x.amax(1)
    c.index_put_((AT,), torch.ones(2))
    return a, b, c, x.max(1).values


def kept_dimension(x: T) -> tuple[T, ...]:
    a, b = x.sum(1, keepdim=True), x.sum(1)
    b[0] = 5
    return a, b, a + 1


def written_before(x: T) -> tuple[T, ...]:
    b = x.sum(1)
    y = b.view(2, -1)
    y[0] = 5
    return x.sum(1), b, y


PROGRAMS = [both_returned, one_written, one_put, kept_dimension, written_before]


@pytest.mark.parametrize("compile_", [compiled, triton_run.compiled], ids=["cpu", "gpu"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_values_and_memory_are_those_of_eager(f: Callable[[T], Any], compile_: Callable[..., Any]) -> None:
    x = torch.randn(6, 40)
    got, want = compile_(f)(x), f(x)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    assert _shared(got) == _shared(want)


def _shared(results: tuple[T, ...]) -> list[list[bool]]:
    places = [t.untyped_storage().data_ptr() for t in results]
    return [[p == q for q in places] for p in places]
