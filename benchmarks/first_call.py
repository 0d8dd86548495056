"""python -m benchmarks.first_call: seconds of the first call that are the backend's own, against inductor's.

Each round runs every backend in fresh processes, cold with empty caches and then warm with what the cold process left
(`aot_eager`, which leaves nothing, cold only).
Own cold seconds are those above `aot_eager`'s cold first call (Dynamo, AOTAutograd and eager kernels); own warm seconds
are those above `eager`'s warm first call (Dynamo alone), since a warm process need not run AOTAutograd. Our modules are
made byte code before, as an installed package's are.
"""

from __future__ import annotations

import argparse
import compileall
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import altbackend
from benchmarks import machine
from benchmarks.cases import Case, Mode, choose
from benchmarks.options import backend_options, names, positive
from benchmarks.records import Failure, Request
from benchmarks.runner import cache_folder, run_process
from benchmarks.table import geomean

BASES = ("eager", "aot_eager")
MODES = ("inference", "training")


@dataclass
class Seconds:
    """First calls of one case and mode: backend -> seconds per round."""

    case: str
    mode: str
    cold: dict[str, list[float]] = field(default_factory=dict)
    warm: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def own_cold(self, backend: str) -> float | None:
        return _above(self.cold, backend, "aot_eager")

    def own_warm(self, backend: str) -> float | None:
        return _above(self.warm, backend, "eager")

    def ratio(self, own: Callable[[str], float | None]) -> float | None:
        """alt's own seconds over inductor's. At most the clock's noise counts as nothing: 1 ms."""
        ours, theirs = own("alt"), own("inductor")
        return None if ours is None or theirs is None or theirs <= 0 else max(ours, 1e-3) / theirs


def _above(found: dict[str, list[float]], backend: str, base: str) -> float | None:
    if not found.get(backend) or not found.get(base):
        return None
    return median(found[backend]) - median(found[base])


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.first_call", description=(__doc__ or "").splitlines()[0])
    p.add_argument("suite", nargs="?", choices=["models", "micro"], default="models")
    p.add_argument("--cases", type=names, default=[], metavar="A,B")
    p.add_argument("--modes", type=names, default=list(MODES), metavar="A,B", help="inference, training")
    p.add_argument("--backends", type=names, default=["inductor", "alt"], metavar="A,B")
    p.add_argument("--device", default="cpu")
    p.add_argument("--preset", choices=["tiny", "cpu", "gpu"], default=None, help="sizes; by default the device's")
    p.add_argument("--rounds", type=positive, default=3, metavar="N", help="medians of N pairs of processes")
    p.add_argument("--timeout", type=float, default=900.0, metavar="S", help="seconds a process may take")
    p.add_argument("--options", type=backend_options, default={}, metavar="K=V")
    p.add_argument("--out", type=Path, default=None, metavar="FILE", help="every sample as JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 if a process failed."""
    args = parser().parse_args(argv)
    print(" ".join(f"{k}={v}" for k, v in machine.describe(args.device).items()), flush=True)
    print(header(), flush=True)
    # Installers compile modules to byte code, torch's among them; a checkout may be used where no process may write it.
    compileall.compile_dir(Path(altbackend.__file__).parent, quiet=2)
    found = []
    for case in choose(args.suite, args.cases):
        for mode in args.modes:
            found.append(measure(case, mode, args))
            print(line(found[-1]), flush=True)
            if args.out:
                args.out.write_text(json.dumps([vars(s) for s in found], indent=1))
    print(summary(found))
    return 1 if any(s.failures for s in found) else 0


def measure(case: Case, mode: Mode, args: argparse.Namespace) -> Seconds:
    """All backends in turns, so that a busy machine meets them alike."""
    out = Seconds(case.name, mode)
    for _ in range(args.rounds):
        for backend in (*BASES, *args.backends):
            with cache_folder() as cache:
                for label, seconds in (("cold", out.cold), ("warm", out.warm)):
                    if (label, backend) == ("warm", "aot_eager"):
                        break  # it keeps nothing, and no figure needs it
                    answer = run_process(request(case, mode, backend, args), cache, args.timeout)
                    if isinstance(answer, Failure):
                        out.failures.append(f"{backend} {label}: {answer.summary}")
                        break
                    seconds.setdefault(backend, []).append(answer.compile_seconds)
    return out


def request(case: Case, mode: Mode, backend: str, args: argparse.Namespace) -> Request:
    on_gpu = args.device.startswith("cuda")
    return Request(
        case=case.name,
        backend=backend,
        mode=mode,
        preset=args.preset or ("gpu" if on_gpu else "cpu"),
        device=args.device,
        dtype="bfloat16" if on_gpu else "float32",
        repetitions=1,
        seconds=0.1,
        options=args.options.get(backend, {}),
    )


def header() -> str:
    columns = ("dynamo", "aot", "inductor", "alt", "alt/ind")
    return (
        f"{'case':<14} {'mode':<10}"
        + "".join(f"{'cold ' + c:>14}" for c in columns[1:])
        + "".join(f"{'warm ' + c:>14}" for c in (columns[0], *columns[2:]))
    )


def line(s: Seconds) -> str:
    """Medians in seconds: first call of the base, own seconds of the backends, their ratio."""
    cold = (_median(s.cold, "aot_eager"), s.own_cold("inductor"), s.own_cold("alt"), s.ratio(s.own_cold))
    warm = (_median(s.warm, "eager"), s.own_warm("inductor"), s.own_warm("alt"), s.ratio(s.own_warm))
    return f"{s.case:<14} {s.mode:<10}" + "".join(map(_cell, (*cold, *warm))) + "".join(f"  {f}" for f in s.failures)


def summary(found: Sequence[Seconds]) -> str:
    """Geometric means of alt over inductor."""
    ratios = {"cold": [s.ratio(s.own_cold) for s in found], "warm": [s.ratio(s.own_warm) for s in found]}
    means = {name: geomean(r for r in values if r is not None) for name, values in ratios.items()}
    return "alt / inductor, geometric means: " + ", ".join(
        f"{name} {'-' if mean is None else f'{mean:.4f} (1/{1 / mean:.1f})'}" for name, mean in means.items()
    )


def _median(found: dict[str, list[float]], backend: str) -> float | None:
    return median(found[backend]) if found.get(backend) else None


def _cell(value: float | None) -> str:
    return f"{'-':>14}" if value is None else f"{value:>14.3f}"


if __name__ == "__main__":
    sys.exit(main())
