"""Helpers of the `__main__` part of a generated host program."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch


def rand_strided(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the given layout with small random contents (indices stay valid: integers are 0)."""
    out = torch.empty_strided(sizes, strides, dtype=dtype)
    return out.normal_() if dtype.is_floating_point else out.zero_()


def time_calls(call: Callable[[list[Any]], Any], inputs: Callable[[], list[Any]], reps: int = 20) -> str:
    """Median milliseconds of one call, as text."""
    made = inputs()
    call(list(made))
    spent = []
    for _ in range(reps):
        start = time.perf_counter()
        call(list(made))
        spent.append(time.perf_counter() - start)
    return f"{median(spent) * 1e3:.3f} ms a call"
