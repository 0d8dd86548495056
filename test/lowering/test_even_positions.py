"""Positions of upsamplings as fractions of loop variables."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.loops import Pointwise
from altbackend.lowering.operators.even_positions import MOST_COMPARED, evenly_spaced
from altbackend.lowering.tensor import points
from altbackend.schedule.device import H200, Cpu, ScheduleContext
from test.graphs import schedule, trace

CPU, GPU = ScheduleContext(Cpu(2)), ScheduleContext(H200)


def scaled(n: int, factor: float) -> va.Value:
    """Return int(factor * d) for a loop variable d of n points."""
    (d,) = points((n,))
    return va.cast(va.apply("mul", va.cast(va.index(d), torch.float32), va.const(factor, torch.float32)), torch.int64)


@pytest.mark.parametrize(("n", "factor", "size", "text"), [
    (12, 0.5, 6, "(d0 // 2)"),
    (10, 1 / 1.5, 9, "((7*d0) // 10)"),
    (10, 0.7, 7, "((7*d0) // 10)"),
    (12, 0.5, 5, None),  # the last one lies outside
    (12, 0.3, 6, None),
    (12, -0.5, 6, None),
    (MOST_COMPARED + 2, 0.5, MOST_COMPARED, None),
])  # fmt: skip
def test_positions_are_compared_at_all_points(n: int, factor: float, size: int, text: str | None) -> None:
    index = evenly_spaced(scaled(n, factor), size)
    assert (None if index is None else ex.show(index)) == text


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_an_upsampling_looks_nothing_up(device: ScheduleContext) -> None:
    (gm,) = trace(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), torch.randn(1, 2, 4, 5))
    nodes = schedule(gm, ctx=device).program.nodes
    reads = [index for n in nodes if isinstance(n, Pointwise) for _, index in va.loads(n.value)]
    assert len(reads) == 1
    assert not ex.lookups(reads[0])
