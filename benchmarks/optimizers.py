"""python -m benchmarks.optimizers: the step of an optimizer over BERT-base's parameters, compiled and in eager.

Each row is a way to run the step: eager one by one, eager `foreach`, eager `fused=True`, and the step compiled by a
backend. The compiled ways give their kernels (altbackend's own count) and the seconds of the first call, in which
Dynamo's tracing is included; `backend s` is the part inside altbackend. Times are medians of steps in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from altbackend.report import stats
from benchmarks.options import positive

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
HIDDEN, LAYERS, TOKENS, POSITIONS = 768, 12, 30522, 512


def bert_base() -> list[tuple[int, ...]]:
    """Return the shapes of BERT-base's parameters."""
    norm, square = [(HIDDEN,), (HIDDEN,)], [(HIDDEN, HIDDEN), (HIDDEN,)]
    wide = [(4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (HIDDEN, 4 * HIDDEN), (HIDDEN,)]
    embeddings = [(TOKENS, HIDDEN), (POSITIONS, HIDDEN), (2, HIDDEN), *norm]
    return [*embeddings, *LAYERS * [*3 * square, *square, *norm, *wide, *norm], *square]


@dataclass(frozen=True)
class Way:
    """A way to run a step, with the seconds of its first call and its kernels where they are known."""

    name: str
    step: Callable[[], object]
    first_s: float = 0.0
    backend_s: float = 0.0
    kernels: int = 0

    def row(self, ms: float) -> str:
        compiled = f"{self.first_s:8.2f} {self.backend_s:10.2f} {self.kernels:8}" if self.first_s else ""
        return f"{self.name:16} {ms:9.3f} {compiled}".rstrip()


def way(chosen: argparse.Namespace, name: str) -> Way:
    """Return one way with parameters of its own, after its first step."""
    torch.manual_seed(0)
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.dtype)
    shapes = bert_base()[: chosen.tensors or None]
    parameters = [torch.nn.Parameter(torch.randn(s, device=device, dtype=dtype)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    flags = {name: True} if name in ("foreach", "fused") else {"foreach": name != "eager" and chosen.foreach}
    if device.type == "cuda" and chosen.optimizer != "sgd":
        flags["capturable"] = True
    optimizer = OPTIMIZERS[chosen.optimizer](parameters, lr=1e-4, **flags)
    is_compiled = name in chosen.backends
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend=name) if is_compiled else optimizer.step
    before, start = stats.snapshot(), time.perf_counter()
    step()
    synchronise(device)
    seconds, new = time.perf_counter() - start, stats.snapshot() - before
    return Way(name, step, seconds if is_compiled else 0.0, new.compile_seconds, new.kernels)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(w: Way, device: torch.device) -> float:
    start = time.perf_counter()
    w.step()
    synchronise(device)
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--foreach", action="store_true", help="compile the multi-tensor form")
    parser.add_argument("--tensors", type=positive, help="only the first tensors")
    parser.add_argument("--backends", nargs="*", default=["alt", "inductor"])
    parser.add_argument("--steps", type=positive, default=20)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    ways = [way(chosen, name) for name in ("eager", "foreach", "fused", *chosen.backends)]
    rounds = [[milliseconds(w, device) for w in ways] for _ in range(chosen.steps)]
    print(f"{'step':16} {'ms':>9} {'first s':>8} {'backend s':>10} {'kernels':>8}")
    for w, times in zip(ways, zip(*rounds, strict=True), strict=True):
        print(w.row(median(times)))


if __name__ == "__main__":
    main()
