"""python -m benchmarks: cases side by side over backends. See README.md."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cases import SUITES, Case, choose
from benchmarks.chart import draw
from benchmarks.options import backend_options, case_mode, names, positive
from benchmarks.records import Request, Row
from benchmarks.runner import run_row
from benchmarks.table import comparison_table, geomean, own_seconds, results_table


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks", description="torch.compile backends, side by side.")
    p.add_argument("suite", nargs="?", choices=sorted(SUITES), default="micro")
    p.add_argument("--backends", type=names, default=["aot_eager", "inductor", "alt"], metavar="A,B")
    p.add_argument("--cases", type=names, default=[], metavar="A,B", help="only these; all of the suite by default")
    p.add_argument("--mode", choices=["inference", "training"], default="inference")
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16 on cuda, float32 on the CPU")
    p.add_argument("--preset", choices=["tiny", "cpu", "gpu", "serve"], help="sizes; by default the device's")
    p.add_argument("--reps", type=positive, metavar="N", help="timed pairs of calls; by default from the time per call")
    p.add_argument("--seconds", type=float, default=10.0, help="about how long the timed calls of a process may take")
    p.add_argument("--processes", type=positive, default=1, metavar="N", help="repeat each measurement in N processes")
    p.add_argument("--no-warm", action="store_true", help="skip the second process with the first one's cache")
    p.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds a process may take")
    p.add_argument(
        "--options", type=backend_options, default={}, metavar="K=V", help="k=v is alt's, NAME:k=v another backend's"
    )
    p.add_argument("--out", type=Path, default=Path("bench_results"), metavar="DIR")
    p.add_argument("--list", action="store_true", help="print the suite's cases and stop")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; exit status 1 if any row failed."""
    p = parser()
    args = p.parse_args(argv)
    try:
        cases = choose(args.suite, args.cases)
    except LookupError as error:
        p.error(str(error.args[0]))
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    info = machine.describe(args.device)
    print(headline(info), flush=True)
    rows = []
    for row in measure_all(cases, args):
        rows.append(row)
        print(progress(row), file=sys.stderr, flush=True)
    print(results_table(rows))
    comparison = comparison_table(rows)
    if comparison:
        print(f"\n{comparison}")
    for line in write_files(args, info, rows):
        print(line)
    return 0 if all(row.ok for row in rows) else 1


def measure_all(cases: Sequence[Case], args: argparse.Namespace) -> Iterator[Row]:
    """All backends of a case one after another, so that they meet the machine in much the same state."""
    for case in cases:
        for backend in args.backends:
            yield run_row(request(case, backend, args), args.processes, not args.no_warm, args.timeout)


def request(case: Case, backend: str, args: argparse.Namespace) -> Request:
    on_gpu = args.device.startswith("cuda")
    return Request(
        case=case.name,
        backend=backend,
        mode=case_mode(case, args.mode),
        preset=args.preset or ("gpu" if on_gpu else "cpu"),
        device=args.device,
        dtype=args.dtype or ("bfloat16" if on_gpu else "float32"),
        repetitions=args.reps,
        seconds=args.seconds,
        options=args.options.get(backend, {}),
    )


def headline(info: dict[str, Any]) -> str:
    where = info.get("gpu", info["cpu"])
    load = f", load {info['load'][0]:.1f}" if info["load"] else ""
    return f"{where}, {info['cores']} cores, {info['threads']} threads{load}; torch {info['torch']}; {info['date']}"


def progress(row: Row) -> str:
    if row.failure is not None:
        return f"{row.case} {row.backend}: FAILED {row.failure.summary}"
    return f"{row.case} {row.backend}: {row.cold_seconds:.1f} s cold, {row.speedup:.2f} x eager"


def write_files(args: argparse.Namespace, info: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """results.json and chart.png under names with suite, mode and time; returns one line about each."""
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"{args.suite}-{args.mode}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{os.getpid()}"
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    results = {"machine": info, "settings": settings, "rows": [row_record(row, rows) for row in rows]}
    path = args.out / f"{stem}.json"
    path.write_text(json.dumps({**results, "summary": summary(rows)}, indent=1))
    title = f"{args.suite}, {args.mode}: {headline(info)}"
    return [f"\nresults: {path}", draw(rows, title, args.out / f"{stem}.png")]


def row_record(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """A row with every sample, and the figures of the table beside them."""
    figures = {
        "cold_seconds": row.cold_seconds,
        "cold_own_seconds": own_seconds(row, rows),
        "warm_seconds": row.warm_seconds,
        "warm_own_seconds": own_seconds(row, rows, warm=True),
        "eager_ms": row.eager_ms,
        "compiled_ms": row.compiled_ms,
        "x_eager": row.speedup,
        "x_eager_per_process": row.speedups,
    }
    return {**asdict(row), "figures": figures}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Per backend: how many cases finished, and geometric means over those."""
    result = {}
    for backend in dict.fromkeys(row.backend for row in rows):
        done = [row for row in rows if row.backend == backend and row.ok]
        result[backend] = {
            "finished": len(done),
            "of": sum(row.backend == backend for row in rows),
            "x_eager": geomean(row.speedup for row in done if row.speedup is not None),
            "cold_seconds": geomean(row.cold_seconds for row in done if row.cold_seconds is not None),
            "warm_seconds": geomean(row.warm_seconds for row in done if row.warm_seconds is not None),
        }
    return result


if __name__ == "__main__":
    sys.exit(main())
