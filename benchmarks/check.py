"""python -m benchmarks.check: does every model, compiled, give eager's results? See README.md."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from benchmarks.cases import SUITES, Case, Mode, choose
from benchmarks.options import backend_options, names
from benchmarks.records import CHECK_TOLERANCE, Failure, Measurement, Request
from benchmarks.runner import cache_folder, run_process
from benchmarks.table import layout

HEADER = ("case", "mode", "error", "gradients", "graphs", "breaks", "result")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.check", description="Compiled against eager, float32.")
    p.add_argument("suite", nargs="?", choices=sorted(SUITES), default="models")
    p.add_argument("--preset", choices=["tiny", "cpu", "gpu"], default="tiny")
    p.add_argument("--backend", default="alt")
    p.add_argument("--cases", type=names, default=[], metavar="A,B")
    p.add_argument("--mode", choices=["inference", "training"], help="both by default")
    p.add_argument("--device", default="cpu")
    p.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds a process may take")
    p.add_argument(
        "--options", type=backend_options, default={}, metavar="K=V", help="k=v is alt's, NAME:k=v another backend's"
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Check, print as it goes; exit status 1 if any case failed, could not run, or nothing ran."""
    p = parser()
    args = p.parse_args(argv)
    try:
        cases = choose(args.suite, args.cases)
    except LookupError as error:
        p.error(str(error.args[0]))
    lines = []
    for case, mode in runs(cases, args.mode):
        lines.append(line(case, mode, answer(case, mode, args)))
        print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    print(layout([HEADER, *lines], left=2))
    failed = sum(not found[-1].startswith("ok") for found in lines)
    rule = f"relative error at most {CHECK_TOLERANCE:g}, or no further from float64 than eager"
    print(f"{len(lines) - failed} of {len(lines)} ok ({rule})")
    return 1 if failed or not lines else 0


def runs(cases: Sequence[Case], mode: Mode | None) -> Iterator[tuple[Case, Mode]]:
    """Every case in inference and in training, or in its only mode, or in the mode asked for."""
    for case in cases:
        modes: tuple[Mode, ...] = (mode,) if mode else ("inference", "training")
        for chosen in (case.mode,) if case.mode else modes:
            yield case, chosen


def answer(case: Case, mode: Mode, args: argparse.Namespace) -> Measurement | Failure:
    missing = [package for package in case.requires if find_spec(package) is None]
    if missing:
        return Failure(f"needs {', '.join(missing)}")
    request = Request(
        case=case.name,
        backend=args.backend,
        mode=mode,
        preset=args.preset,
        device=args.device,
        task="check",
        options=args.options.get(args.backend, {}),
    )
    with cache_folder() as cache:
        return run_process(request, cache, args.timeout)


def line(case: Case, mode: Mode, found: Measurement | Failure) -> tuple[str, ...]:
    """The printed cells; the last is the verdict."""
    if isinstance(found, Failure):
        return case.name, mode, f"FAILED {found.summary}"
    gradients = "" if found.gradient_error is None else f"{found.gradient_error:.1e}"
    breaks = str(found.graph_breaks)
    return case.name, mode, f"{found.output_error:.1e}", gradients, str(found.graphs), breaks, verdict(found)


def verdict(found: Measurement) -> str:
    """Begins with "ok" within the tolerance, or where float64 is no further from compiled than from eager."""
    if found.worst_error <= CHECK_TOLERANCE:
        return "ok"
    if found.exact_errors is None:
        return "FAILED"
    eager, mine = found.exact_errors
    distances = f"from float64: eager {eager:.1e}, compiled {mine:.1e}"
    return f"ok, {distances}" if mine <= max(eager, CHECK_TOLERANCE) else f"FAILED, {distances}"


if __name__ == "__main__":
    sys.exit(main())
