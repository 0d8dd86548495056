"""The order of the loops of a reduction on a GPU, where operands lack a dimension or are rolled along one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.loops import Reduction
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import difference
from test.graphs import schedule, trace

T = torch.Tensor


def products(a: T, b: T) -> T:
    return (a[:, :, :, None] * b[:, None]).sum(2)


def distances(a: T, b: T) -> T:
    return (a[:, :, None] - b[:, None]).abs().amax(3)


def reductions(fn: Callable[..., T], *inputs: T) -> list[Reduction]:
    (gm,) = trace(fn, *inputs)
    return [n for n in schedule(gm, None, ScheduleContext(H200)).program.nodes if isinstance(n, Reduction)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("fn", "shape"), [(products, (64, 6)), (distances, (6, 64))])
def test_rows_lie_as_results_where_the_main_operand_lacks_a_dimension(
    fn: Callable[..., T], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    a, b = torch.randn(40, 5, 64).to(dtype), torch.randn(40, *shape).to(dtype)
    (total,) = reductions(fn, a, b)
    assert [ex.coefficient(total.index, v) for v in total.dims] == [30, 6, 1]
    expected = fn(a.double(), b.double()).to(dtype)
    assert not difference(triton_run.compiled(fn)(a, b), expected, tolerance=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_rolled_dimension_keeps_its_place_in_memory(dim: int) -> None:
    def fn(x: T) -> T:
        return x.roll(1, dim).amax(2)

    x = torch.randn(3, 8, 40, 7).to(memory_format=torch.channels_last)
    (total,) = reductions(fn, x)
    ((_, index),) = va.loads(total.value)
    sizes = [ex.size_of(v) for v in total.dims]
    assert sizes == [3, 7, 8], ex.show(index)  # batches, columns, channels
    assert not difference(triton_run.compiled(fn)(x), fn(x), strides=False, tolerance=0)
