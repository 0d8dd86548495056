"""The share of communication beside computation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from benchmarks.overlap import common, merged, share_of


def event(name: str, begin: float, end: float, device: DeviceType = DeviceType.CUDA) -> Any:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=begin, end=end))


def test_spans() -> None:
    assert merged([(3, 4), (0, 1), (1, 2), (0, 0.5)]) == [(0, 2), (3, 4)]
    assert common([(0, 2), (3, 4)], [(1, 3.5)]) == 1.5
    assert common([], [(1, 2)]) == 0


def test_share_on_a_gpu() -> None:
    events = [
        event("ncclDevKernel_AllReduce", 0, 4),
        event("kernel0", 1, 2),
        event("gemm", 3, 6),
        event("aten::mm", 0, 9, DeviceType.CPU),
    ]
    assert share_of(events, on_gpu=True) == pytest.approx(0.5)
    assert share_of(events[1:], on_gpu=True) is None


def test_share_on_a_cpu() -> None:
    cpu = DeviceType.CPU
    events = [event("gloo:all_reduce", 0, 4, cpu), event("aten::mm", 3, 9, cpu), event("Optimizer.step", 0, 9, cpu)]
    assert share_of(events, on_gpu=False) == pytest.approx(0.25)
