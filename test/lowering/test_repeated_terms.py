"""Costly factors of a reduction's terms that many results would compute anew are stored, on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir import value as va
from altbackend.ir.loops import Node, Reduction
from altbackend.lowering import repeated_terms
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import difference
from test.graphs import schedule, trace

T = torch.Tensor
Function = Callable[[T, T], T]


@pytest.fixture
def any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_terms, "WORK", 0)


def nodes(fn: Function, *inputs: T) -> list[Node]:
    (gm,) = trace(fn, *inputs)
    return list(schedule(gm, None, ScheduleContext(H200)).program.nodes)


def weighted(scores: T, values: T) -> T:
    return (scores.softmax(2)[..., None] * values[:, None]).sum(2)


def smallest(a: T, b: T) -> T:
    return (a.sigmoid()[:, :, :, None] + b[:, None]).amin(2)


def padded(a: T, b: T) -> T:
    return (F.pad(a, (1, 1)).exp()[:, :, 1:-1, None] * b[:, None]).sum(2)


def computes(root: va.Value, op: str) -> bool:
    return any(v.op == op for v in va.walk(root))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("fn", "op"), [(weighted, "exp"), (smallest, "exp"), (padded, "exp")])
@pytest.mark.usefixtures("any_work")
def test_a_costly_factor_is_computed_once(fn: Function, op: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(6, 5, 16).to(dtype), torch.randn(6, 16, 8).to(dtype)
    (total,) = [n for n in nodes(fn, a, b) if isinstance(n, Reduction) and len(n.dims) == 3]
    assert not computes(total.value, op)
    expected = fn(a.double(), b.double()).to(dtype)
    assert not difference(triton_run.compiled(fn)(a, b), expected, tolerance=16 * torch.finfo(dtype).eps)


def test_little_work_is_repeated() -> None:
    a, b = torch.randn(6, 5, 16), torch.randn(6, 16, 8)
    assert any(isinstance(n, Reduction) and computes(n.value, "exp") for n in nodes(weighted, a, b))


@pytest.mark.usefixtures("any_work")
def test_few_results_repeat_the_work() -> None:
    a, b = torch.randn(6, 5, 16), torch.randn(6, 16, 3)
    assert any(isinstance(n, Reduction) and computes(n.value, "exp") for n in nodes(weighted, a, b))
