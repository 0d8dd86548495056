"""python -m benchmarks.packages: packages beside the reference's: seconds to build and to load, and time of a call."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import altbackend
from benchmarks.cases import find
from benchmarks.options import positive
from benchmarks.subject import found


def timed(f: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the seconds that it took."""
    start = time.perf_counter()
    return f(), time.perf_counter() - start


def milliseconds(calls: dict[str, Callable[[], Any]], rounds: int, wait: Callable[[], None]) -> dict[str, float]:
    """Median time of a call of each, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for k in range(rounds + 3):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            if k >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: median(t) for name, t in times.items()}


def tensors_of(result: Any) -> list[Tensor]:
    """Return the tensors of a result of any tree."""
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]


def one(name: str, device: str, rounds: int, reference: bool) -> None:
    """Build, load, check and time the packages of one model."""
    module, args, kwargs = find(name).build("cpu")
    model: nn.Module = module.eval().to(device)
    inputs = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to(device), (tuple(args), dict(kwargs or {})))
    program = torch.export.export(model, *inputs)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    compiled = torch.compile(model, backend=found("alt"))
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours.pt2", Path(folder) / "theirs.pt2"
        _, built = timed(lambda: altbackend.aot_package(ours, program, programs=False))
        loaded, load = timed(lambda: altbackend.aot_load(ours))
        calls = {"package": loaded, "jit": compiled}
        text = f"{name}: built in {built:.2f} s, loaded in {load:.3f} s"
        if reference:
            _, seconds = timed(lambda: torch._inductor.aoti_compile_and_package(program, package_path=str(theirs)))
            calls["reference"] = torch._inductor.aoti_load_package(str(theirs))
            text += f"; reference built in {seconds:.2f} s ({built / seconds:.2f} of it)"
        want = tensors_of(model(*inputs[0], **inputs[1]))
        got = tensors_of(loaded(*inputs[0], **inputs[1]))
        error = max(float((g - w).abs().max() / (w.abs().max() + 1e-30)) for g, w in zip(got, want, strict=True))
        found_times = milliseconds({k: lambda c=c: c(*inputs[0], **inputs[1]) for k, c in calls.items()}, rounds, wait)  # type: ignore[misc]
    print(
        f"{text}; ms " + "  ".join(f"{k} {v:.3f}" for k, v in found_times.items()) + f"; error {error:.1e}", flush=True
    )


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=__doc__)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--cases", default="resnet50,bert")
    p.add_argument("--calls", type=positive, default=20)
    p.add_argument("--reference", action="store_true", help="also build inductor's package")
    args = p.parse_args()
    altbackend.aot_compile(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)))  # what all libraries share
    with torch.no_grad():
        for name in args.cases.split(","):
            one(name, args.device, args.calls, args.reference)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
