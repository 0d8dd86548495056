"""Kernels read no memory outside their tensors, be it for elements that they drop afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run, triton_worker
from test.compare import difference

T = torch.Tensor
SMALL_GPU = ScheduleContext(replace(H200, sms=1))

PAST_THE_END = """
import triton
import triton.language as tl


@triton.jit
def kernel(in0, out0, XBLOCK: tl.constexpr):
    x = tl.arange(0, XBLOCK)
    t0 = tl.load(in0 + x + SHIFT)
    tl.store(out0 + x, t0)
"""


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_interpreter_refuses_to_read_outside_a_tensor(shift: int) -> None:
    x, out = (triton_worker.pack(torch.zeros(8)) for _ in range(2))
    source = PAST_THE_END.replace("SHIFT", str(shift))
    with pytest.raises(Exception, match="a kernel reaches byte"):  # a class of Triton, which this process lacks
        triton_run._worker(True).submit(triton_worker.launch, source, [x, out], [], {"XBLOCK": 8}, 1).result()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: F.conv2d(x, w, stride=2, padding=1, groups=64).cumsum(3),
        lambda x, w: F.conv2d(F.pad(x, (1, 0, 1, 0)), w, padding=1, groups=64).cumsum(2),
        lambda x, w: (F.pad(x, (2, 1, 2, 1)) * w.mean((1, 2, 3))[:, None, None]).cumsum(3),
    ],
    ids=["padding", "padding twice", "factors"],
)
def test_conditions_on_the_number_of_a_program_guard_its_loads(fn: Callable[[T, T], T]) -> None:
    """A program of 64 neighbouring rows writes a row's position by its own number."""
    x = torch.randn(6, 64, 4, 4).to(memory_format=torch.channels_last)
    w = torch.randn(64, 1, 3, 3)
    assert not difference(triton_run.compiled(fn, ctx=SMALL_GPU)(x, w), fn(x, w), strides=False, tolerance=2e-5)
