"""The loops within rows of GPU kernels run as the rows lie in memory; results stay those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.loop_mapping import Kind
from test import triton_run
from test.compare import as_list, difference
from test.graphs import schedule, trace

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
LAST = torch.channels_last


def image(*sizes: int, dtype: torch.dtype = torch.float32) -> T:
    return torch.randn(*sizes).to(dtype).contiguous(memory_format=LAST)


def group_norm(x: T) -> T:
    return F.group_norm((x * 1.5).sigmoid(), 4, torch.linspace(0.5, 1.5, x.shape[1]), torch.ones(x.shape[1]))


def layer_norm(x: T) -> T:
    return F.layer_norm(x.sin(), x.shape[1:])


def totals(x: T) -> tuple[T, ...]:
    return x.sum((1, 2, 3)), x.abs().amax((1, 2, 3)), x.flatten(1).logsumexp(1), x.flatten(1).argmax(1)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "group norm": (group_norm, (3, 16, 6, 7)),
    "group norm of wide groups": (group_norm, (2, 64, 5, 5)),
    "few large groups": (lambda x: F.group_norm(x.sigmoid(), 2), (1, 4, 260, 256)),
    "layer norm": (layer_norm, (3, 12, 5, 7)),
    "totals": (totals, (3, 12, 5, 7)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager(name: str, dtype: torch.dtype) -> None:
    fn, sizes = PROGRAMS[name]
    x = image(*sizes, dtype=dtype)
    for got, want in zip(as_list(triton_run.compiled(fn)(x)), as_list(fn(x)), strict=True):
        assert not difference(got, want, strides=False, tolerance=2e-2 if dtype == torch.bfloat16 else 1e-5)


def fastest_strides(k: Kernel) -> set[object]:
    """The strides of the loads from the kernel's largest input along the fastest loop of its reductions."""
    reductions = [q for q in k.nodes if q.kind is Kind.IN_ROW and len(q.inner) > 1]
    points = [q for q in k.nodes if q.inner in {r.inner for r in reductions}]
    written = {q.node.out for q in k.nodes}
    loads = [(q, b, i) for q in points for b, i in va.loads(q.value) if ex.vars_of(i) >= {*q.inner}]
    return {ex.coefficient(i, q.inner[-1]) for q, b, i in loads if b not in written}


def kernels_of(fn: Callable[..., Any], x: T) -> list[Kernel]:
    steps = schedule(trace(fn, x)[0], ctx=ScheduleContext(H200)).steps
    return [k for k in steps if not isinstance(k, Extern)]


@pytest.mark.parametrize("name", ["group norm", "group norm of wide groups", "layer norm"])
def test_neighbouring_threads_read_neighbours(name: str) -> None:
    fn, sizes = PROGRAMS[name]
    strides = [fastest_strides(k) for k in kernels_of(fn, image(*sizes))]
    assert {1} in strides
    assert all(s <= {1} for s in strides)


@pytest.mark.sample(6)
@pytest.mark.parametrize("fn", [
    lambda x: (x * 2).softmax(1),
    lambda x: (x * 2).log_softmax(1) + 1,
    lambda x: x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt(),
    lambda x: (x * 2).logsumexp(1),
    lambda x: x / x.abs().sum((0, 2), keepdim=True),
])  # fmt: skip
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST], ids=str)
def test_a_reduction_over_any_dimension_is_one_kernel_with_what_it_reads(
    fn: Callable[..., Any], memory_format: torch.memory_format
) -> None:
    x = torch.randn(4, 24, 10, 13).contiguous(memory_format=memory_format)
    assert len(kernels_of(fn, x)) == 1
    for got, want in zip(as_list(triton_run.compiled(fn)(x)), as_list(fn(x)), strict=True):
        assert not difference(got, want, strides=False, tolerance=1e-5)


def test_a_contiguous_image_keeps_its_order() -> None:
    fn, sizes = PROGRAMS["group norm"]
    (k,) = kernels_of(fn, torch.randn(*sizes))
    assert fastest_strides(k) <= {1}


def test_parts_of_few_large_groups_are_stretches_of_memory() -> None:
    """The image is stored as it lies, and a program sums whole points."""
    fn, sizes = PROGRAMS["few large groups"]
    partial = [k for k in kernels_of(fn, image(*sizes)) if any(q.node.out.endswith("_parts") for q in k.nodes)]
    assert partial
    assert all(fastest_strides(k) == {1} for k in partial)
