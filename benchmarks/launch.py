"""python -m benchmarks.launch: host time of a launch on a GPU, and whether a compiled call waits for the device."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import positive
from benchmarks.subject import found

STEPS = 200
EACH_ALONE: dict[str, Any] = {"fuse": False, "inline_limit": 0, "strict": True}  # one kernel an operator


def chain(x: Tensor) -> Tensor:
    for _ in range(STEPS // 2):
        x = torch.sin(x)
        x = torch.cos(x)
    return x


def microseconds(call: Callable[[], Any], calls: int) -> float:
    """Median host time of a call; the device is idle before each."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.launch", description=__doc__)
    p.add_argument("--calls", type=positive, default=50)
    args = p.parse_args()
    x = torch.randn(1024, device="cuda")
    one = torch.compile(torch.sin, backend=found("alt"), options=EACH_ALONE)
    many = torch.compile(chain, backend=found("alt"), options=EACH_ALONE)
    replayed = torch.compile(chain, backend=found("alt"), options=EACH_ALONE | {"cudagraphs": True})
    with torch.no_grad():
        for fn in (one, many, replayed):
            for _ in range(5):
                fn(x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for fn in (one, many, replayed):
                fn(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        single, whole = (microseconds(lambda f=f: f(x), args.calls) for f in (one, many))  # type: ignore[misc]
        graph = microseconds(lambda: replayed(x), args.calls)
        eager = microseconds(lambda: chain(x), args.calls)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32[1024], medians of {args.calls} calls")
    print(f"call of one kernel                       {single:8.1f} us (guards, wrappers and one launch)")
    print(f"each further kernel, with its allocation {(whole - single) / (STEPS - 1):8.2f} us")
    print(f"call of {STEPS} kernels as a CUDA graph      {graph:8.1f} us")
    print(f"eager, an operator                       {eager / STEPS:8.2f} us")
    print("device synchronisations in calls: 0 (torch.cuda.set_sync_debug_mode('error') raised nothing)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
