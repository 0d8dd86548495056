"""python -m benchmarks.host: time of calls of many small steps, with the host program in Python and in C++."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.options import positive
from benchmarks.subject import found

STEPS = 100


class Unrolled(nn.Module):
    """An LSTM over 24 steps, unrolled: two products and one kernel a step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 64)
        out = []
        for step in x:
            h, c = self.cell(step, (h, c))
            out.append(h)
        return torch.stack(out)


def products(x: Tensor) -> Tensor:
    """Return products of small matrices: library calls alone."""
    for _ in range(STEPS):
        x = x @ x
    return x


def pointwise(x: Tensor) -> Tensor:
    """Return a chain of kernels, one an operator."""
    for _ in range(STEPS // 2):
        x = torch.cos(torch.sin(x))
    return x


def compiled(fn: Any, backend: str, **options: Any) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    call: Callable[[Tensor], Tensor] = torch.compile(fn, backend=found(backend), options=options or None)
    return call


def microseconds(calls: dict[str, Callable[[Tensor], Tensor]], x: Tensor, rounds: int) -> dict[str, float]:
    """Median time of a call of each, taken in turns; a GPU is idle before each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    for k in range(rounds + 5):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call(x)
            if k >= 5:
                times[name].append((time.perf_counter() - start) * 1e6)
    return {name: median(t) for name, t in times.items()}


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--calls", type=positive, default=200)
    p.add_argument("--inductor", action="store_true", help="also time inductor")
    args = p.parse_args()
    alone: dict[str, Any] = {"fuse": False, "inline_limit": 0}
    cases: list[tuple[str, Any, tuple[int, ...], dict[str, Any], int]] = [
        ("kernel", pointwise, (256,), alone, STEPS),
        ("library call", products, (8, 8), {}, STEPS),
        ("LSTM of 24 steps", Unrolled().to(args.device).eval(), (24, 4, 64), {}, 1),
    ]
    print(f"torch {torch.__version__}, {args.device}, medians of {args.calls} calls, taken in turns; us")
    with torch.no_grad():
        for name, fn, sizes, options, count in cases:
            x = torch.rand(sizes, device=args.device) / 8
            calls = {"eager": fn, **{h: compiled(fn, "alt", host=h, **options) for h in ("python", "cpp")}}
            if args.inductor:
                calls["inductor"] = compiled(fn, "inductor")
            for call in calls.values():
                call(x)
            found_times = microseconds(calls, x, args.calls)
            print(f"{name:18}" + "  ".join(f"{k} {v / count:8.2f}" for k, v in found_times.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
