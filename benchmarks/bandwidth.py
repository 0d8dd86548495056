"""python -m benchmarks.bandwidth: bytes a second of memory-bound kernels on a GPU, beside a device copy of the run.

A case counts the bytes that it cannot avoid: every input read once, every result written once. Times are medians of the
device's own clock over several calls, backends in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.options import names, positive
from benchmarks.subject import found

Inputs = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """`backward`: time the gradients of `fn`'s result with respect to its inputs, not the call."""

    name: str
    fn: Callable[..., Tensor]
    inputs: Inputs
    backward: bool = False


def _random(*sizes: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.randn(*sizes, dtype=dtype, device="cuda").requires_grad_(grad)


def _classes(rows: int, classes: int, grad: bool) -> Inputs:
    return lambda: (_random(rows, classes, grad=grad), torch.randint(classes, (rows,), device="cuda"))


def _norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _padded() -> tuple[Tensor, ...]:
    return _random(8192, 50264), torch.randint(50257, (8192,), device="cuda")


def _wide(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target)


def _rows(columns: int, elements: int = 1 << 28) -> Inputs:
    return lambda: (_random(elements // columns, columns),)


def _norm_inputs(columns: int, grad: bool) -> Inputs:
    return lambda: (_random((1 << 28) // columns, columns, grad=grad), *(_random(columns, grad=grad) for _ in range(2)))


CASES: tuple[Case, ...] = (
    Case("pointwise, 3 in 1 out", lambda a, b, c: a * b + c, lambda: tuple(_random(1 << 27) for _ in range(3))),
    Case("softmax, rows of 1024", lambda x: torch.softmax(x, -1), _rows(1024)),
    Case("softmax, rows of 4096", lambda x: torch.softmax(x, -1), _rows(4096)),
    Case("softmax, rows of 16384", lambda x: torch.softmax(x, -1), _rows(16384)),
    Case("softmax, rows of 32768", lambda x: torch.softmax(x, -1), _rows(32768)),
    Case("layer norm, rows of 4096", _norm, _norm_inputs(4096, False)),
    Case("layer norm, rows of 16384", _norm, _norm_inputs(16384, False)),
    Case("layer norm, rows of 32768", _norm, _norm_inputs(32768, False)),
    Case("log-softmax, rows of 50257", lambda x: torch.log_softmax(x, -1), _rows(50257)),
    Case("layer norm backward, rows of 768", _norm, _norm_inputs(768, True), backward=True),
    Case("layer norm backward, rows of 4096", _norm, _norm_inputs(4096, True), backward=True),
    Case("sum of columns", lambda x: x.sum(0), _rows(4096)),
    Case("sum of rows", lambda x: x.sum(1), _rows(4096)),
    Case("transpose", lambda x: x.t().contiguous(), _rows(16384)),
    Case("cross-entropy, 128256 classes", F.cross_entropy, _classes(2048, 128256, False)),
    Case("cross-entropy, 50257 of 50264 classes", lambda x, t: F.cross_entropy(x[:, :50257], t), _padded),
    Case("cross-entropy in float32, 128256 classes", _wide, _classes(2048, 128256, False)),
    Case("cross-entropy backward, 128256 classes", F.cross_entropy, _classes(2048, 128256, True), backward=True),
)


def needed_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def ready(case: Case, backend: str, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], Any], int]:
    """Return the call to time, and the bytes that it moves."""
    torch._dynamo.reset()
    options: dict[str, Any] | None = {"strict": True} if backend == "alt" else None
    fn = case.fn if backend == "eager" else torch.compile(case.fn, backend=found(backend), options=options)
    if not case.backward:
        with torch.no_grad():
            out = fn(*inputs)

        def call() -> Tensor:
            with torch.no_grad():
                return fn(*inputs)

        return call, needed_bytes((*inputs, out))
    leaves = [x for x in inputs if x.requires_grad]
    out = fn(*inputs)
    grad = torch.randn_like(out)

    def gradients() -> Any:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return gradients, needed_bytes((*inputs, grad if grad.numel() > 1 else None, *gradients()))


def milliseconds(call: Callable[[], Any], times: int) -> float:
    """Median of the device's time, every call between two events and queued behind the one before."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # so that the device does not wait for the host
    marks[0].record()
    for m in marks[1:]:
        call()
        m.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks))


def copy_rate() -> float:
    """GB/s, read and written, of a device copy."""
    source = _random(1 << 28)
    target = torch.empty_like(source)
    return 2 * needed_bytes([source]) / milliseconds(lambda: target.copy_(source), 50) / 1e6


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.bandwidth", description=__doc__)
    p.add_argument("--backends", type=names, default=["eager", "inductor", "alt"], metavar="A,B")
    p.add_argument("--cases", type=names, default=[], metavar="A,B", help="parts of names; all by default")
    p.add_argument("--repetitions", type=positive, default=20)
    args = p.parse_args()
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; device copy {copy:.0f} GB/s read + written")
    print(f"{'GB/s (share of the copy)':42}" + "".join(f"{b:>20}" for b in args.backends))
    for case in CASES:
        if args.cases and not any(part in case.name for part in args.cases):
            continue
        cells = []
        for backend in args.backends:
            torch.manual_seed(0)
            call, needed = ready(case, backend, case.inputs())
            rate = needed / milliseconds(call, args.repetitions) / 1e6
            cells.append(f"{rate:12.0f} ({rate / copy:4.0%})")
            del call
            torch.cuda.empty_cache()
        print(f"{case.name:42}" + "".join(f"{c:>20}" for c in cells), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
