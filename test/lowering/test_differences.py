"""Differences of a value and itself: 0, or NaN, whatever the value is computed from."""

from __future__ import annotations

import pytest
import torch

from altbackend.ir import value as va
from altbackend.ir.loops import Pointwise
from altbackend.schedule.device import H200, ScheduleContext
from test.compare import compiled
from test.graphs import schedule, trace

T = torch.Tensor


def _without_its_maximum(x: T, w: T) -> T:
    """A softmax's difference in rows of one element."""
    y = x * w
    return y - y.amax(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_difference_of_equal_products(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(500), torch.tensor([float("inf"), -float("inf"), float("nan"), 1e30, -0.0])])
    x = x.to(dtype).view(-1, 1)
    w = torch.tensor([0.3]).to(dtype)
    got = compiled(_without_its_maximum)(x, w)
    want = _without_its_maximum(x, w)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert not torch.signbit(got[got == 0]).any()


def test_a_gpu_computes_no_difference_of_equal_products() -> None:
    """Contracted to fma(x, w, -(x * w)), it would be the rounding error of the product."""
    gm = trace(_without_its_maximum, torch.randn(500, 1), torch.randn(1))[0]
    program = schedule(gm, ctx=ScheduleContext(H200)).program
    values = [v for n in program.nodes if isinstance(n, Pointwise) for v in va.walk(n.value)]
    assert any(v.op == "mul" for v in values)
    assert not any(v.op == "sub" and v.args[0] is v.args[1] for v in values)
