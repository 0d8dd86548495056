"""Time oneDNN calls with fused epilogues beside the same calls followed by a generated kernel, on this CPU.

    python -m benchmarks.onednn [--rounds 15] [--threads 1] [--kinds linear,conv2d] [--write]

A row is one kind of call, dtype and epilogue: microseconds without and with fusion, and their quotient. Times are the
least of alternating rounds, which other processes disturb least. `--write` replaces benchmarks/results/onednn.md. Rows
whose fusion does not pay in either dtype belong into `UNPROFITABLE` of altbackend/fx_passes/onednn_epilogues.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from altbackend.fx_passes import onednn, onednn_epilogues
from benchmarks.machine import cpu_model

T = torch.Tensor
PAGE = Path(__file__).parent / "results" / "onednn.md"
SLICE = 0.004  # seconds of one measurement

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(768, 3072), (128, 768)),
    "conv1d": (lambda: nn.Conv1d(256, 256, 3, padding=1), (1, 256, 512)),
    "conv2d": (lambda: nn.Conv2d(64, 64, 3, padding=1), (1, 64, 56, 56)),
    "conv3d": (lambda: nn.Conv3d(32, 32, 3, padding=1), (1, 32, 16, 16, 16)),
    "transposed2d": (lambda: nn.ConvTranspose2d(64, 64, 2, stride=2), (1, 64, 28, 28)),
}
UNARY: dict[str, Callable[[T], T]] = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
BINARY: dict[str, Callable[[T, T], T]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "add, relu": lambda x, y: torch.relu(x + y),
}


@dataclass(frozen=True)
class Row:
    """One measurement in microseconds."""

    kind: str
    dtype: str
    epilogue: str
    separate: float
    fused: float

    @property
    def text(self) -> str:
        gain = self.separate / self.fused
        return f"| {self.kind} | {self.dtype} | {self.epilogue} | {self.separate:.0f} | {self.fused:.0f} | {gain:.2f} |"


class Layer(nn.Module):
    """A layer and its epilogue; `other` is the second operand of a binary one."""

    def __init__(self, layer: nn.Module, epilogue: Callable[..., T], binary: bool) -> None:
        super().__init__()
        self.layer, self.epilogue, self.binary = layer, epilogue, binary

    def forward(self, x: T, other: T) -> T:
        y = self.layer(x)
        return self.epilogue(y, other) if self.binary else self.epilogue(y)


def compiled(model: nn.Module, fused: bool, inputs: tuple[T, T]) -> Callable[[], object]:
    """Return a call of the compiled model; it has run once."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"strict": True, "disabled_passes": "" if fused else "oneDNN epilogues"}
    with patch.object(onednn_epilogues, "UNPROFITABLE", frozenset()):
        call = torch.compile(model, backend="alt", options=options)
        call(*inputs)
    return lambda: call(*inputs)


def seconds_of(call: Callable[[], object]) -> float:
    """Return the time of one call, the mean over a slice."""
    count, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < SLICE:
        call()
        count += 1
    return (now - begin) / count


def measure(kind: str, dtype: torch.dtype, name: str, rounds: int) -> Row:
    """Time one combination, fused and separate in turns."""
    build, shape = KINDS[kind]
    binary = name in BINARY
    layer = build().eval().to(dtype)
    x = torch.randn(shape).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(shape) in formats:  # as between two convolutions
        x = x.to(memory_format=formats[len(shape)])
    other = layer(x).clone()
    model = Layer(layer, BINARY[name] if binary else UNARY[name], binary)
    calls = [compiled(model, fused, (x, other)) for fused in (False, True)]
    times = [[seconds_of(call) for call in calls] for _ in range(rounds)]
    separate, fused = (min(column) * 1e6 for column in zip(*times, strict=True))
    return Row(kind, str(dtype).removeprefix("torch."), name, separate, fused)


def page(rows: list[Row]) -> str:
    """Return the table as Markdown."""
    head = "| call | dtype | epilogue | separate, us | fused, us | separate / fused |\n|---|---|---|---:|---:|---:|\n"
    where = f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads"
    intro = (
        "# oneDNN calls with epilogues\n\n"
        f"`python -m benchmarks.onednn --write` on {where}, torch {torch.__version__}.\n"
        "Separate: the call, then a generated kernel. The least of alternating rounds.\n\n"
    )
    return intro + head + "\n".join(r.text for r in rows) + "\n"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    with torch.no_grad():
        for kind in args.kinds.split(","):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for name in (*UNARY, *BINARY) if onednn.computes(dtype) else ():
                    if not (kind.startswith("transposed") and name in BINARY):
                        rows.append(measure(kind, dtype, name, args.rounds))
                        print(rows[-1].text, flush=True)
    if args.write:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
