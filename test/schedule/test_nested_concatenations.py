"""Layers read concatenations inside of later ones that have the same parts; all else stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import as_list, check, difference, twin
from test.graphs import around_pass

T = torch.Tensor
GPU = ScheduleContext(H200)
LAST = torch.channels_last


def block(x: T, *weights: T) -> T:
    """Layers that concatenate all results before them; a library call makes each."""
    results = [x.sin()]
    for w in weights:
        results.append(torch.softmax(torch.cat(results, -1), -1) @ w)
    return torch.cat(results, -1) * 2


def images(x: T, *weights: T) -> T:
    results = [x.sin()]
    for w in weights:
        results.append(torch.conv2d(torch.cat(results, 1).relu(), w, padding=1))
    return torch.cat(results, 1) * 2


def middle(x: T, w: T) -> list[T]:
    """The range begins behind the first part of the last concatenation, and the last one is a result."""
    a, b = (x @ w).cumsum(1), x @ w.t()
    return [torch.softmax(torch.cat([a, b], 1), 1), torch.cat([x, a, b], 1)]


def other_order(x: T, w: T) -> list[T]:
    a, b = x @ w, x @ w.t()
    return [torch.softmax(torch.cat([b, a], 1), 1), torch.cat([x, a, b], 1)]


def with_gap(x: T, w: T) -> list[T]:
    a, b = x @ w, x @ w.t()
    return [torch.softmax(torch.cat([a, b], 1), 1), torch.cat([a, x, b], 1)]


def read_by_a_call(x: T, w: T, v: T) -> list[T]:
    a, b = x @ w, x @ w.t()
    return [torch.cat([a, b], 1) @ v, torch.cat([a, b, x], 1)]


def returned(x: T, w: T) -> list[T]:
    a, b = x @ w, x @ w.t()
    return [torch.cat([a, b], 1), torch.cat([a, b, x], 1)]


def far_larger(x: T, w: T) -> list[T]:
    a, b = x @ w, x @ w.t()
    return [torch.softmax(torch.cat([a, b], 1), 1), torch.cat([a, b, x, x, x, x.sin()], 1)]


def twice(x: T, w: T) -> list[T]:
    """One buffer is two parts of the concatenations."""
    a = x @ w
    return [torch.softmax(torch.cat([a, a], 1), 1), torch.cat([a, a, x], 1)]


def written(x: T, w: T) -> list[T]:
    """The input is written between the two concatenations."""
    a = x @ w
    first = torch.softmax(torch.cat([x, a], 1), 1)
    x.mul_(2)
    return [first, torch.cat([x, a, x @ w.t()], 1)]


def weights(*sizes: tuple[int, ...]) -> list[T]:
    return [torch.randn(*s) for s in sizes]


ROWS = [torch.randn(6, 8), torch.randn(8, 8)]
CASES: dict[str, tuple[Callable[..., Any], list[T], int]] = {  # the buffers that are gone
    "rows": (block, [torch.randn(6, 8), *weights((8, 4), (12, 4), (16, 4))], 2),
    "images": (images, [torch.randn(2, 8, 5, 6), *weights(*((4, 8 + 4 * k, 3, 3) for k in range(4)))], 3),
    "one image": (images, [torch.randn(1, 8, 5, 6), *weights(*((4, 8 + 4 * k, 3, 3) for k in range(4)))], 3),
    "middle": (middle, ROWS, 1),
    "other order": (other_order, ROWS, 0),
    "with a gap": (with_gap, ROWS, 0),
    "read by a call": (read_by_a_call, [*ROWS, torch.randn(16, 8)], 0),
    "returned": (returned, ROWS, 0),
    "far larger": (far_larger, ROWS, 0),
    "twice": (twice, ROWS, 0),
    "unaligned": (block, [torch.randn(6, 8), *weights((8, 3), (11, 4), (15, 4))], 0),
}


@pytest.mark.parametrize("name", CASES)
def test_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, inputs, gone = CASES[name]
    before, after = around_pass("nest_concatenations", fn, inputs, monkeypatch)
    assert len(before.buffers) - len(after.buffers) == gone
    assert (before is after) == (gone == 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    fn, inputs, _ = CASES[name]
    got = as_list(triton_run.compiled(fn, ctx=GPU)(*twin(inputs)))
    for g, w in zip(got, as_list(fn(*inputs)), strict=True):
        assert difference(g, w, None, 2e-5) == ""
    check(fn, *inputs)


def test_channels_last_and_symbolic_sizes() -> None:
    _, (x, *ws), _ = CASES["images"]
    check(images, x.to(memory_format=LAST), *ws)
    check(images, x, *ws, dynamic=True)
    check(block, *CASES["rows"][1], dynamic=True)


def test_an_input_that_is_written_between() -> None:
    check(written, *ROWS)
