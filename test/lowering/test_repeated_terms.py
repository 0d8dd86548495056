"""Costly factors of a reduction's terms, and functions of totals, that many results would compute anew on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir import value as va
from altbackend.ir.loops import Node, Pointwise, Reduction
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


@pytest.mark.sample(2)
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


def normalised(x: T, y: T) -> T:
    return (x * (x.square().mean(2, keepdim=True) + 1e-5).rsqrt() * y).log_softmax(3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("any_work")
def test_a_root_of_a_total_is_computed_once_a_row(dtype: torch.dtype, layout: torch.memory_format) -> None:
    x, y = (torch.randn(3, 8, 6, 10).to(dtype).to(memory_format=layout) for _ in range(2))
    roots = [n for n in nodes(normalised, x, y) if isinstance(n, Pointwise | Reduction) and computes(n.value, "rsqrt")]
    assert [len(n.dims) for n in roots] == [3]
    expected = normalised(x.double(), y.double()).to(dtype)
    assert not difference(triton_run.compiled(normalised)(x, y), expected, tolerance=16 * torch.finfo(dtype).eps)


def test_a_root_that_few_elements_read_is_no_node() -> None:
    x = torch.randn(3, 8, 6, 10)
    assert not any(isinstance(n, Pointwise) and len(n.dims) == 3 for n in nodes(normalised, x, x))
