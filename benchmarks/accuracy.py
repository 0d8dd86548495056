"""python -m benchmarks.accuracy: how far sums, means, variances and normalisations are from float64, beside eager.

Every line is one function at one number of elements per result. An error is the root mean square of the differences
from eager's float64 result, over that of the float64 result itself. It covers all results of all draws, in units of
float32's rounding (2^-24). Below LEVEL such units nothing is compared, since a float32 result is a rounding off by
itself. The columns are the ratios of mean to deviation of the data, the last one data that are all 0.1.

The exit status is 1 if an error is more than `--limit` times eager's.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import machine

UNIT = 2.0**-24  # largest relative error of rounding to float32
LEVEL = 0.5  # units below which errors are level: a correct rounding has about 0.3
RATIOS = (0.0, 1.0, 1e3, 1e6)
SIZES = (100, 1000, 10_000, 100_000, 1_000_000, 10_000_000)
ELEMENTS = 1 << 20  # of a draw, where one result takes fewer
RESULTS = 12  # at least, of all draws
CHANNELS = 4

Function = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Case:
    """`shape` makes the input's shape of (results, elements of each). What is equal has no deviation to divide by."""

    name: str
    run: Function
    shape: Callable[[int, int], tuple[int, ...]]
    ratios: tuple[float | None, ...] = (*RATIOS, None)


def _rows(results: int, n: int) -> tuple[int, ...]:
    return results, n


def _columns(results: int, n: int) -> tuple[int, ...]:
    return n, results


def _images(results: int, n: int) -> tuple[int, ...]:
    """[N, C, L] of which every channel has `n` elements."""
    batch = max(b for b in (1, 2, 5, 10) if n % b == 0)
    return batch, results, n // batch


def _planes(results: int, n: int) -> tuple[int, ...]:
    """[N, C, L] of which every group of CHANNELS channels of an image has `n` elements."""
    return -(-results // 2), 2 * CHANNELS, n // CHANNELS


def _channels(results: int, n: int) -> tuple[int, ...]:
    """[N, C, L] of which every channel of every image has `n` elements."""
    return -(-results // CHANNELS), CHANNELS, n


def _batch_norm(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, var = torch.zeros_like(x[0, :, 0]), torch.ones_like(x[0, :, 0])
    y = torch.nn.functional.batch_norm(x, mean, var, training=True, momentum=1.0)
    return y, mean, var


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


CASES = (
    Case("sum of rows", lambda x: x.sum(-1), _rows),
    Case("sum of columns", lambda x: x.sum(0), _columns),
    Case("sum beside a scan", lambda x: (x.sum(-1), x.cumsum(-1)), _rows),
    Case("mean of rows", lambda x: x.mean(-1), _rows),
    Case("mean of columns", lambda x: x.mean(0), _columns),
    Case("variance of rows", lambda x: x.var(-1), _rows),
    Case("variance of columns", lambda x: x.var(0), _columns),
    Case("deviation and mean", lambda x: torch.std_mean(x, -1), _rows),
    Case("layer norm", _layer_norm, _rows, RATIOS),
    Case("group norm", lambda x: torch.nn.functional.group_norm(x, 2), _planes, RATIOS),
    Case("batch norm, statistics", _batch_norm, _images, RATIOS),
    Case("instance norm", torch.nn.functional.instance_norm, _channels, RATIOS),
    Case("rms norm", lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:]), _rows),
)


@dataclass(frozen=True)
class Errors:
    """In units of float32's rounding."""

    ours: float
    eager: float

    @property
    def quotient(self) -> float:
        return max(self.ours, LEVEL) / max(self.eager, LEVEL)


def draws(case: Case, n: int, ratio: float | None, device: str) -> Iterator[torch.Tensor]:
    """Inputs of `n` elements per result: normal numbers of deviation 1 around `ratio`, scaled; None: all are 0.1."""
    results = max(1, min(256, ELEMENTS // n))
    shape = case.shape(results, n)
    if ratio is None:
        yield torch.full(shape, 0.1, device=device)
        return
    for seed in range(max(3, RESULTS // results)):
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.float64)
        yield ((x + ratio) / max(ratio, 1.0)).float()


def _tensors(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else list(x)


def _apart(got: Sequence[Sequence[torch.Tensor]], exact: Sequence[Sequence[torch.Tensor]]) -> float:
    """The worst of a function's results over all draws; NaN counts as infinitely far."""
    worst = 0.0
    for mine, want in zip(zip(*got, strict=True), zip(*exact, strict=True), strict=True):
        off = sum(float((a.double() - b).square().sum()) for a, b in zip(mine, want, strict=True))
        size = sum(float(b.square().sum()) for b in want)
        if size:
            worst = max(worst, (off / size) ** 0.5 / UNIT)
        worst = float("inf") if off != off else worst
    return worst


def measure(case: Case, compiled: Function, n: int, ratio: float | None, device: str) -> Errors:
    """Errors of a compiled function and of eager, each against eager in float64."""
    ours, eager, exact = [], [], []
    with torch.no_grad():
        for x in draws(case, n, ratio, device):
            ours.append(_tensors(compiled(x)))
            eager.append(_tensors(case.run(x)))
            exact.append(_tensors(case.run(x.double())))
    return Errors(_apart(ours, exact), _apart(eager, exact))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description="Errors against float64.")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--cases", default="", metavar="A,B", help="parts of names; all by default")
    p.add_argument("--most", type=int, default=SIZES[-1], metavar="N", help="most elements per result")
    p.add_argument("--limit", type=float, default=1.5, help="times eager's error that is a failure")
    return p


def table(cases: Sequence[Case], sizes: Sequence[int], device: str, limit: float) -> Iterator[tuple[str, bool]]:
    """Lines of the table, each with whether all of its errors are within the limit."""
    for case, n in itertools.product(cases, sizes):
        torch._dynamo.reset()
        compiled = torch.compile(case.run, backend="alt", dynamic=False, options={"strict": True})
        found = [measure(case, compiled, n, ratio, device) for ratio in case.ratios]
        cells = [f"{e.ours:.3g} / {e.eager:.3g}{' !' if e.quotient > limit else ''}" for e in found]
        cells += [""] * (len(RATIOS) + 1 - len(cells))
        yield f"| {case.name} | {n:,} | {' | '.join(cells)} |", all(e.quotient <= limit for e in found)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, ours / eager's; exit status 1 where ours is beyond the limit."""
    args = parser().parse_args(argv)
    warnings.simplefilter("ignore")
    wanted = [c for c in CASES if not args.cases or any(part in c.name for part in args.cases.split(","))]
    on = machine.describe(args.device)
    print(f"{on.get('gpu', on['cpu'])}, {on['capability']}, {on['threads']} threads, torch {on['torch']}\n")
    print(f"| ours / eager's | elements | {' | '.join(f'mean = {r:g} x deviation' for r in RATIOS)} | all 0.1 |")
    print(f"|---|---|{'---|' * (len(RATIOS) + 1)}")
    good = True
    for line, within in table(wanted, [n for n in SIZES if n <= args.most], args.device, args.limit):
        good &= within
        print(line, flush=True)
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
