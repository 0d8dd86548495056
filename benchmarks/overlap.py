"""The share of communication that runs beside computation, from a profile of torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch._C._autograd import DeviceType

Span = tuple[float, float]  # begin and end
COMMUNICATION = ("nccl", "gloo:")  # kernels of a GPU, and the threads of gloo


def share_of(events: Iterable[Any], on_gpu: bool) -> float | None:
    """Return the share of a profile's communication during which something computes; None without communication.

    On a GPU, both are kernels. On a CPU, computation is every operator that autograd or a program calls.
    """
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spans: tuple[list[Span], list[Span]] = ([], [])
    for e in events:
        if e.device_type != wanted:
            continue
        communicates = e.name.startswith(COMMUNICATION)
        if communicates or on_gpu or e.name.startswith(("aten::", "mkldnn::")):
            spans[communicates].append((e.time_range.start, e.time_range.end))
    computation, communication = map(merged, spans)
    total = sum(end - begin for begin, end in communication)
    return common(computation, communication) / total if total else None


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, with those that touch as one."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def common(a: Sequence[Span], b: Sequence[Span]) -> float:
    """Return the time that two merged lists of spans have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total
