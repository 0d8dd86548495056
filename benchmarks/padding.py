"""Time padded matrix products on a GPU, and fit the constants of `altbackend/fx_passes/padding_cost.py` to them.

    python -m benchmarks.padding [--rounds 20] [--shapes 8205x2949x5921,...] [--no-inductor]

A row is one shape and dtype. It has the microseconds of the library's product of odd sizes, and of padded sizes alone.
Then come compiled calls: without padding, as the model decides, and by inductor (medians of rounds in turns).
At the end come the lines to put into `RATES`, and every case where the model's choice is slower than no padding by 3%.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from altbackend.fx_passes.padding_cost import ALIGNED, START_US, alignment, missing

T = torch.Tensor
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = (
    (8205, 2949, 5921),
    (4097, 4097, 4097),
    (4098, 4098, 4098),
    (4100, 4100, 4100),
    (2049, 1023, 2047),
    (2050, 1022, 2046),
    (2052, 1020, 2044),
    (1025, 1025, 1025),
    (1028, 1028, 1028),
    (512, 769, 3073),
    (8192, 768, 50257),
    (64, 4095, 4095),
)
DTYPES: dict[str, tuple[torch.dtype, str]] = {
    "bfloat16": (torch.bfloat16, "highest"),
    "float16": (torch.float16, "highest"),
    "tf32": (torch.float32, "high"),
    "float32": (torch.float32, "highest"),
}


@dataclass(frozen=True)
class Row:
    """One measurement in microseconds."""

    kind: str
    shape: Shape
    unpadded: float
    padded: float
    compiled: dict[str, float]

    @property
    def alignment(self) -> int:
        """Return the smallest power of two in the bytes of a row."""
        itemsize = DTYPES[self.kind][0].itemsize
        return min(alignment(n, itemsize) for n in self.shape[1:])

    @property
    def operations(self) -> float:
        return 2.0 * math.prod(self.shape)

    @property
    def text(self) -> str:
        cells = [self.kind, "x".join(map(str, self.shape)), f"{self.unpadded:.1f}", f"{self.padded:.1f}"]
        return " | ".join(["", *cells, *(f"{us:.1f}" for us in self.compiled.values()), ""]).strip()


def microseconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each call on the GPU; the calls run in turns, ten in a row."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                call()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 100)
    return {name: statistics.median(samples) for name, samples in times.items()}


def product(a: T, b: T) -> T:
    """The function that is compiled: a product whose result a generated kernel reads."""
    return torch.relu(torch.mm(a, b))


def compiled(inductor: bool) -> dict[str, Callable[[T, T], T]]:
    """Return compiled forms of `product`."""
    options: dict[str, dict[str, Any]] = {"alt, unpadded": {"disabled_passes": "pad matmuls"}, "alt": {}}
    calls: dict[str, Callable[[T, T], T]] = {}
    for name, chosen in options.items():
        calls[name] = torch.compile(product, backend="alt", options=chosen, dynamic=False)
    if inductor:
        calls["inductor"] = torch.compile(product, dynamic=False)
    return calls


def measure(kind: str, shape: Shape, rounds: int, inductor: bool) -> Row:
    """Time one shape in one dtype."""
    dtype, precision = DTYPES[kind]
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.reset()
    m, k, n = shape
    wide = [size + missing(size, dtype.itemsize) for size in shape]
    a, b = (torch.randn(s, device="cuda", dtype=dtype) for s in ((m, k), (k, n)))
    c, d = (torch.randn(s, device="cuda", dtype=dtype) for s in ((m, wide[1]), (wide[1], wide[2])))
    calls: dict[str, Callable[[], object]] = {"unpadded": lambda: a @ b, "padded": lambda: c @ d}
    for name, call in compiled(inductor).items():
        calls[name] = lambda call=call: call(a, b)  # type: ignore[misc]
    with torch.no_grad():
        times = microseconds(calls, rounds)
    return Row(kind, shape, times.pop("unpadded"), times.pop("padded"), times)


def fitted(rows: list[Row]) -> list[str]:
    """Return the lines of `RATES`: the best rate of aligned products, and slowdowns as medians over large shapes.

    The times of tiles and blocks, which follow in a line, are measured otherwise.
    """
    lines = []
    for name, kinds in {"16-bit": ("bfloat16", "float16"), "tf32": ("tf32",), "float32": ("float32",)}.items():
        large = [r for r in rows if r.kind in kinds and r.operations > 1e9]
        if not large:
            continue
        rate = max(r.operations / max(r.padded - START_US, 0.1) for r in large)
        slowdowns: dict[int, list[float]] = {}
        for r in large:
            slowdowns.setdefault(r.alignment, []).append((r.unpadded - START_US) / (r.padded - START_US))
        table = {k: round(statistics.median(v), 2) for k, v in sorted(slowdowns.items()) if k < ALIGNED}
        lines.append(f'        "{name}": Rate({rate / 1e6:.0f}e6, MappingProxyType({table}), ...),')
    return lines


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--no-inductor", action="store_true")
    args = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes.split(",") if s] or list(SHAPES)
    rows: list[Row] = []
    print("kind | rows x depth x columns | unpadded | padded alone | alt, unpadded | alt | inductor")
    for kind in DTYPES:
        for shape in shapes:
            rows.append(measure(kind, shape, args.rounds, not args.no_inductor))  # type: ignore[arg-type]
            print(rows[-1].text, flush=True)
    print("\n".join(["", "RATES:", *fitted(rows)]))
    for r in rows:
        if r.compiled["alt"] > 1.03 * r.compiled["alt, unpadded"]:
            print(f"slower than unpadded: {r.text}")


if __name__ == "__main__":
    main()
