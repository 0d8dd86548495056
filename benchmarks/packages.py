"""python -m benchmarks.packages: packages beside the reference's: seconds to build and to load, and time of a call.

Both begin with empty caches; the object that all libraries share is compiled before the first of our packages.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import altbackend
from benchmarks.options import positive
from benchmarks.package_reference import Reference, ReferenceEnded, error, exported, milliseconds
from benchmarks.subject import found

WARM_UP = 3  # turns that are not counted


def timed(f: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the seconds that it took."""
    start = time.perf_counter()
    return f(), time.perf_counter() - start


def in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median time of a call of each, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for k in range(rounds + WARM_UP):
        for name, call in calls.items():
            t = call()
            if k >= WARM_UP:
                times[name].append(t)
    return {name: median(t) for name, t in times.items()}


def one(name: str, device: str, rounds: int, reference: Reference | None) -> str:
    """Build, load, check and time the packages of one model, and return a line of text."""
    case = exported(name, device)
    compiled = torch.compile(case.model, backend=found("alt"))
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "ours.pt2"
        _, built = timed(lambda: altbackend.aot_package(ours, case.program, programs=False))
        loaded, load = timed(lambda: altbackend.aot_load(ours))
    difference = error(loaded(*case.args, **case.kwargs), case.model(*case.args, **case.kwargs))
    calls = {
        "package": lambda: milliseconds(lambda: loaded(*case.args, **case.kwargs), device),
        "jit": lambda: milliseconds(lambda: compiled(*case.args, **case.kwargs), device),
    }
    text = f"{name}: built in {built:.2f} s, loaded in {load:.3f} s"
    if reference is None:
        return text + ended(in_turns(calls, rounds), difference)
    try:
        seconds = reference.ask("build")
        text += f"; reference built in {seconds:.2f} s ({built / seconds:.2f} of it)"
        text += f", loaded in {reference.ask('load'):.3f} s"
        with_reference = {**calls, "reference": lambda: reference.ask("call")}
        return text + ended(in_turns(with_reference, rounds), difference)
    except ReferenceEnded as cause:
        return f"{text}; {cause}" + ended(in_turns(calls, rounds), difference)


def ended(times: dict[str, float], difference: float) -> str:
    """Return the end of a line: the times of calls, and the error of our package."""
    return "; ms " + "  ".join(f"{k} {v:.3f}" for k, v in times.items()) + f"; error {difference:.1e}"


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=__doc__)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--cases", default="resnet50,bert")
    p.add_argument("--calls", type=positive, default=20)
    p.add_argument("--reference", action="store_true", help="also build inductor's package, in a process of its own")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ |= {name: f"{folder}/{name}" for name in ("ALTBACKEND_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        altbackend.aot_compile(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)))  # what all libraries share
        for name in args.cases.split(","):
            reference = Reference(name, args.device) if args.reference else None
            try:
                print(one(name, args.device, args.calls, reference), flush=True)
            finally:
                if reference:
                    reference.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
