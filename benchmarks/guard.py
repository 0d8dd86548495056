"""python -m benchmarks.guard: what it costs a call to know that no parameter was written.

Rows: parameters as (count, elements each). Columns, microseconds a call, medians: the kernel's notes, the
addresses of all tensors that a call asks for anyway, and version counters (`freezing=True` without a guard). Then, in
milliseconds: making a guard, renewing it after a write to one page, and writing all memory once it is guarded, beside
writing it again.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from altbackend.compiled.load import page_guard_library
from altbackend.config.resolve import resolve
from altbackend.runtime import page_guard
from altbackend.runtime.frozen import Versions

CASES = ((1, 25 << 20), (100, 1 << 18), (1000, 25_000), (1000, 300), (300, 1 << 20))
CALLS = 200


def microseconds(call: Callable[[], object]) -> float:
    """Median over calls."""
    taken = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e6


def row(count: int, elements: int) -> str:
    tensors = [torch.randn(elements) for _ in range(count)]
    library = page_guard_library(resolve())
    begin = time.perf_counter()
    guard = page_guard.Guard(tensors, library)
    made = time.perf_counter() - begin
    counted = Versions(tensors)
    guarded = microseconds(guard.unchanged)
    if not guard.unchanged():
        raise AssertionError("the guard reports a write where there was none")
    addresses = microseconds(lambda: tuple(map(torch.Tensor.data_ptr, tensors)))
    versions = microseconds(lambda: counted.unchanged(tensors))
    tensors[-1].view(-1)[0] = 1.0
    begin = time.perf_counter()
    guard.renew()
    renewed = time.perf_counter() - begin
    writes = []
    for _ in range(2):
        begin = time.perf_counter()
        torch._foreach_zero_(tensors)
        writes.append(time.perf_counter() - begin)
    size = f"{count} x {elements} ({count * elements * 4 / 1e6:.0f} MB)"
    times = (guarded, addresses, versions)
    return (
        f"| {size} | {' | '.join(f'{t:.1f}' for t in times)} | {made * 1e3:.1f} | {renewed * 1e3:.1f} "
        f"| {writes[0] * 1e3:.1f} | {writes[1] * 1e3:.1f} |"
    )


def main() -> int:
    if isinstance(reason := page_guard.pages(), str):
        print(reason, file=sys.stderr)
        return 1
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| parameters | guard us | addresses us | counters us | made ms | renewed ms | first write ms | second ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        print(row(*case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
