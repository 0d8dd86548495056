"""Helpers for the `__main__` part of a generated host program."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


def rand_strided(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of the given layout with small random values. Integers are 0, so that indices are valid."""
    out = torch.empty_strided(sizes, strides, dtype=dtype)
    return out.normal_() if dtype.is_floating_point else out.zero_()


def time_calls(call: Callable[[list[object]], object], inputs: Callable[[], list[object]], reps: int = 20) -> str:
    """Return the median time of one call, as text in milliseconds."""
    args = inputs()
    call(list(args))
    spent = []
    for _ in range(reps):
        start = time.perf_counter()
        call(list(args))
        spent.append(time.perf_counter() - start)
    return f"{median(spent) * 1e3:.3f} ms a call"
