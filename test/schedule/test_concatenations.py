"""Values live in the concatenations that copy them, on both devices, and nothing else changes."""

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


def dense(x: T, *weights: T) -> T:
    """Layers that each concatenate the results before them, with a library call between."""
    for w in weights:
        x = torch.cat([x, torch.sin(x) @ w], -1)
    return x * 2


def dense_block(x: T, *weights: T) -> T:
    """Layers that keep all results, and concatenate them for each library call."""
    results = [torch.tanh(x)]
    for w in weights:
        results.append(torch.relu(torch.cat(results, 1)) @ w)
    return torch.cat(results, 1) * 2


def branches(x: T) -> T:
    """Values that are read once more than the concatenation copies them."""
    a = torch.tanh(x)
    b = torch.sigmoid(a)
    return torch.cat([a, b, torch.relu(b)], 1)


def images(x: T) -> list[T]:
    y = torch.cat([x.sin(), x.cos()], 1)
    z = torch.cat([y, y.mean(1, keepdim=True).expand_as(x)], 1)
    return [z, y.sum((0, 2, 3)), z.roll(1, 3)]


def read_afterwards(x: T, w: T) -> list[T]:
    y = torch.cat([x, x @ w], 1)
    z = torch.cat([y, y @ torch.cat([w, w], 0)], 1)
    return [z, (y @ torch.cat([w, w], 0)).relu(), y.flip(1) + 1]


def returned(x: T, w: T) -> list[T]:
    y = torch.cat([x, x @ w], 1)
    return [torch.cat([y, y @ torch.cat([w, w], 0)], 1), y]


def outermost(x: T, w: T) -> T:
    y = torch.cat([x, x @ w], 0)
    return torch.cat([y, y @ w], 0).sin()


def weights(*sizes: tuple[int, int]) -> list[T]:
    return [torch.randn(*s) for s in sizes]


CASES: dict[str, tuple[Callable[..., Any], list[T], int]] = {  # the buffers that are gone
    "dense": (dense, [torch.randn(6, 8), *weights((8, 4), (12, 4), (16, 4))], 2),
    "dense block": (dense_block, [torch.randn(6, 8), *weights(*((8 + 4 * k, 4) for k in range(12)))], 0),
    "branches": (branches, [torch.randn(6, 8)], 0),
    "images": (images, [torch.randn(2, 8, 5, 6)], 0),
    "channels last": (images, [torch.randn(2, 8, 5, 6).to(memory_format=LAST)], 0),
    "read afterwards": (read_afterwards, [torch.randn(6, 8), torch.randn(8, 8)], 0),
    "returned": (returned, [torch.randn(6, 8), torch.randn(8, 8)], 0),
    "outermost": (outermost, [torch.randn(6, 8), torch.randn(8, 8)], 0),
    "unaligned": (dense, [torch.randn(6, 8), *weights((8, 3), (11, 4), (15, 4))], 0),
}


@pytest.mark.parametrize("name", CASES)
def test_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, inputs, gone = CASES[name]
    before, after = around_pass("share_concatenations", fn, inputs, monkeypatch)
    assert len(before.buffers) - len(after.buffers) >= gone
    assert len(before.nodes) - len(after.nodes) == len(before.buffers) - len(after.buffers)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    fn, inputs, _ = CASES[name]
    got = as_list(triton_run.compiled(fn, ctx=GPU)(*twin(inputs)))
    for g, w in zip(got, as_list(fn(*inputs)), strict=True):
        assert difference(g, w, None, 2e-5) == ""
    check(fn, *inputs)


def test_symbolic_sizes() -> None:
    check(dense, torch.randn(6, 8), *weights((8, 4), (12, 4), (16, 4)), dynamic=True)


def test_a_value_that_a_library_call_reads_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call would copy a region, which has gaps between its rows."""

    def fn(x: T, w: T) -> T:
        y = torch.cat([x, x.sin()], 1)
        return torch.cat([y, y @ w], 1)

    before, after = around_pass("share_concatenations", fn, [torch.randn(6, 8), torch.randn(16, 8)], monkeypatch)
    assert before is after


def test_values_that_fusion_hands_on_stay() -> None:
    """Stored in the concatenation, they would be read back by a kernel of its own for each of their readers."""
    steps: list[Any] = []
    triton_run.compiled(branches, seen=steps)(torch.randn(6, 8))
    assert len(steps) == 1
