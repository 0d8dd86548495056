"""python -m benchmarks.dynamic: kernels for any size beside kernels for one size, at the same sizes.

Every case of the micro suite is compiled twice, with `dynamic=False` and with `dynamic=True`, and called in turns in
one process. The ratio is static over dynamic time: 0.9 means that the dynamic kernels take 11% longer. Optimizer steps,
which take no inputs, are left out.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.cases import Case, choose
from benchmarks.measure import MINIMUM_REPETITIONS, WARM_UPS, cpu_ms, repetitions
from benchmarks.options import case_mode, names, positive
from benchmarks.records import Request
from benchmarks.subject import Subject, build, compiled, surroundings
from benchmarks.table import geomean

LIMIT = 1.1  # dynamic over static time that a case may have


@dataclass(frozen=True)
class Pair:
    """Median milliseconds of a call."""

    case: str
    static_ms: float
    dynamic_ms: float

    @property
    def ratio(self) -> float:
        return self.static_ms / self.dynamic_ms

    def __str__(self) -> str:
        mark = "  slow" if self.ratio < 1 / LIMIT else ""
        return f"{self.case:26} {self.static_ms:10.3f} {self.dynamic_ms:10.3f} {self.ratio:7.2f}{mark}"


def measured(case: Case, request: Request) -> Pair:
    """Compile a case both ways and time calls in turns. Raises what compiling raises."""
    torch._dynamo.reset()
    sides = [_compiled(case, request, dynamic) for dynamic in (False, True)]
    with surroundings(request):
        rounds = [[cpu_ms(s) for s in sides] for _ in range(WARM_UPS)]
        count = request.repetitions or repetitions(median(map(sum, rounds)) / 1e3, request.seconds)
        gc.collect()
        gc.disable()
        try:
            # the first of a round may meet colder caches than the second, so they take turns at that, too
            rounds = [_round(sides, k % 2 == 1) for k in range(max(count, MINIMUM_REPETITIONS))]
        finally:
            gc.enable()
    static, dynamic = (median(times) for times in zip(*rounds, strict=True))
    return Pair(case.name, static, dynamic)


def _compiled(case: Case, request: Request, dynamic: bool) -> Subject:
    side = compiled(case, build(case, request.preset, request), request, dynamic=dynamic)
    with surroundings(request):
        side.run()
    return side


def _round(sides: list[Subject], turned: bool) -> list[float]:
    times = [cpu_ms(s) for s in (reversed(sides) if turned else sides)]
    return times[::-1] if turned else times


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.dynamic", description=__doc__)
    p.add_argument("--cases", type=names, default=[], help="names with commas between, by default all")
    p.add_argument("--preset", choices=("tiny", "cpu", "serve"), default="cpu")
    p.add_argument("--mode", choices=("inference", "training"), default="inference")
    p.add_argument("--threads", type=positive, default=1)
    p.add_argument("--seconds", type=float, default=2.0, help="of calls a case")
    p.add_argument("--rounds", type=positive, default=1, help="compilations a case; the median ratio counts")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'case':26} {'static ms':>10} {'dynamic ms':>10} {'ratio':>7}")
    found: list[Pair] = []
    for case in choose("micro", args.cases):
        if case.mode == "step":
            continue
        request = Request(case.name, "alt", case_mode(case, args.mode), preset=args.preset, seconds=args.seconds)
        pairs = sorted((measured(case, request) for _ in range(args.rounds)), key=lambda pair: pair.ratio)
        found.append(pairs[len(pairs) // 2])
        print(found[-1], flush=True)
    slow = [pair.case for pair in found if pair.ratio < 1 / LIMIT]
    print(
        f"geometric mean {geomean(pair.ratio for pair in found):.3f}, more than 10% slower: {', '.join(slow) or 'none'}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
