"""Times two callables in turn and compares their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

MIN_PAIRS = 3
MAX_PAIRS = 200
Call = Callable[[], Sequence[Tensor]]


def seconds_of(call: Call, device: torch.device) -> tuple[float, Sequence[Tensor]]:
    """Return the seconds of one call, including the device's work, and its result."""
    start = perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start, result


def medians(first: Call, second: Call, device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the median seconds of two calls, made in turn for about `seconds` so that both see the same machine."""
    times: tuple[list[float], list[float]] = ([], [])
    end = perf_counter() + seconds
    while len(times[0]) < MIN_PAIRS or (perf_counter() < end and len(times[0]) < MAX_PAIRS):
        for call, taken in zip((first, second), times, strict=True):
            taken.append(seconds_of(call, device)[0])
    return median(times[0]), median(times[1])


def relative_error(results: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Return the largest over the tensors of max|result - reference| / max|reference|.

    It is infinite if shapes, dtypes, or the positions and signs of NaN and Inf differ. A reference of zeros counts
    as 1.
    """
    if len(results) != len(references):
        return math.inf
    return max((_error(a, b) for a, b in zip(results, references, strict=True)), default=0.0)


def _error(result: Tensor, reference: Tensor) -> float:
    if result.shape != reference.shape or result.dtype != reference.dtype:
        return math.inf
    if reference.numel() == 0:
        return 0.0
    a, b = result.detach().double(), reference.detach().double()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].nan_to_num(0), b[~finite].nan_to_num(0)):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / (b.abs().max() or 1.0))
