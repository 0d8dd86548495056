"""Random programs of several reductions that fusion may join: GPU kernels are printed, small ones also interpreted.

    python -m test.fuzz_reductions --programs 300 --seed 0
    python -m test.fuzz_reductions --programs 300 --seed 0 --values

A program computes two to five results from a matrix, a second one, a number of each row, one of each column and a
scalar: reductions over rows, columns and all, normalisations, scans and positions of extremes, each of an elementwise
expression that may broadcast. Without `--values` sizes are those of real models and kernels are printed for two GPUs.
With it sizes are small, one of the two GPUs has few registers, and results are compared with eager's.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.compare import as_list, difference
from test.graphs import schedule, trace

T = torch.Tensor
Element = Callable[[list[T]], T]
GPUS = (ScheduleContext(H200), ScheduleContext(replace(H200, sms=4, registers=64)))  # rows over 16 are long on one
SIZES = (9, 16, 50, 255, 300, 1000, 1024, 4096, 5000, 50257)
SMALL_SIZES = (1, 3, 9, 16, 50, 130)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.int64)

ELEMENTS: dict[str, Element] = {
    "x": lambda a: a[0],
    "y": lambda a: a[1],
    "x * y": lambda a: a[0] * a[1],
    "x * row": lambda a: a[0] * a[2][:, None],
    "x + column": lambda a: a[0] + a[3],
    "row * column": lambda a: a[2][:, None] * a[3],
    "x * most": lambda a: a[0] * a[0].amax(1, keepdim=True),
    "x + column sum": lambda a: a[0] + a[0].sum(0),
    "relu": lambda a: F.relu(a[1]) + a[4],
    "transposed": lambda a: a[0].t().contiguous().t() * 2,
    "flipped": lambda a: a[0].flip(1) + a[1],
    "shifted": lambda a: F.pad(a[0], (1, 0))[:, :-1],
    "row": lambda a: a[2][:, None],
    "column": lambda a: a[3][None],
    "scalar": lambda a: a[4].expand(1, 1),
}
RESULTS: dict[str, Callable[[T], T]] = {
    "sum(1)": lambda e: e.sum(1),
    "sum(0)": lambda e: e.sum(0),
    "sum()": lambda e: e.sum(),
    "mean(0)": lambda e: e.double().mean(0),
    "amax(1)": lambda e: e.amax(1),
    "amin(0)": lambda e: e.amin(0),
    "argmax(1)": lambda e: e.argmax(1),
    "max(0)": lambda e: e.max(0).indices,
    "any(1)": lambda e: (e > 0).any(1),
    "count": lambda e: (e > 0).sum(),
    "var(1)": lambda e: e.double().var(1, correction=0),
    "var(0)": lambda e: e.double().var(0, correction=0),
    "softmax(1)": lambda e: e.float().softmax(1),
    "softmax(0)": lambda e: e.float().softmax(0),
    "log_softmax(1)": lambda e: e.float().log_softmax(1),
    "logsumexp(0)": lambda e: e.float().logsumexp(0),
    "norm": lambda e: F.layer_norm(e.float(), e.shape[1:]),
    "rms": lambda e: e.float() * (e.float() ** 2).mean(1, keepdim=True).add(1).rsqrt(),
    "cumsum(1)": lambda e: e.double().cumsum(1),
    "cumsum(0)": lambda e: e.double().cumsum(0),
    "squares": lambda e: (e * e).sum(),
    "itself": lambda e: e + 1,
}


@dataclass(frozen=True)
class Program:
    """Results as pairs of names, a reduction and its element."""

    rows: int
    columns: int
    dtype: torch.dtype
    results: tuple[tuple[str, str], ...]

    def __call__(self, *inputs: T) -> list[T]:
        return [RESULTS[r](ELEMENTS[e](list(inputs))) for r, e in self.results]

    def inputs(self) -> list[T]:
        shapes = ((self.rows, self.columns),) * 2 + ((self.rows,), (self.columns,), ())
        drawn = [torch.randint(-3, 4, s).to(self.dtype) for s in shapes]
        return drawn if self.dtype == torch.int64 else [x / 2 for x in drawn]  # sums of halves are exact


def draw(rng: random.Random, small: bool) -> Program:
    """Draw a program; of large sizes at most 2^25 elements."""
    sizes = SMALL_SIZES if small else SIZES
    rows, columns = rng.choice(sizes), rng.choice(sizes)
    while rows * columns > 1 << 25:
        rows, columns = rng.choice(sizes), rng.choice(sizes)
    count = rng.randint(2, 5)
    shared = rng.choice(list(ELEMENTS))  # most results read what others read, so that kernels are fused
    elements = [rng.choice([shared, *ELEMENTS]) for _ in range(count)]
    results = tuple((rng.choice(list(RESULTS)), e) for e in elements)
    dtype = rng.choice((torch.float32, torch.float64, torch.int64) if small else DTYPES)
    return Program(rows, columns, dtype, results)


def printed(p: Program) -> str:
    """Return what is wrong when the kernels of a program are printed, or ""."""
    (graph,) = trace(p, *p.inputs(), computes=False)
    for gpu in GPUS:
        triton_run.steps_of(schedule(graph, ctx=gpu), gpu)
    return ""


def valued(p: Program) -> str:
    """Return in which result the interpreted kernels of a program differ from eager, or ""."""
    inputs = p.inputs()
    want = as_list(p(*inputs))
    exact = as_list(p(*(x.double() if x.is_floating_point() else x for x in inputs)))
    for gpu in GPUS:
        torch._dynamo.reset()
        got = as_list(triton_run.compiled(p, ctx=gpu)(*inputs))
        for (name, element), g, w, e in zip(p.results, got, want, exact, strict=True):
            if wrong := difference(g, w, e, strides=False):
                return f"{name} of {element} on {gpu.device}: {wrong}"
    return ""


def failure(p: Program, check: Callable[[Program], str]) -> str:
    """Return what is wrong with a program, or ""."""
    torch._dynamo.reset()
    try:
        return check(p)
    except Exception:
        return traceback.format_exc(limit=-4)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m test.fuzz_reductions")
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--values", action="store_true", help="interpret small kernels and compare with eager")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    wrong = 0
    for k in range(args.programs):
        p = draw(rng, args.values)
        torch.manual_seed(k)
        if text := failure(p, valued if args.values else printed):
            wrong += 1
            print(f"program {k} of seed {args.seed}: {p}\n{text}", flush=True)
    print(f"{args.programs} programs, {wrong} fail")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
