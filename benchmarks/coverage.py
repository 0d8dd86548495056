"""python -m benchmarks.coverage: which operators become generated loops, which library calls, and which are wrong.

Sample inputs of torch's own operator database are compiled, forward and where supported backward, and compared with
eager. Every case, an operator with a dtype in one direction, is one of:

    generated   no library call is left             library         some are, and they are named
    wrong       a result differs from eager's       error           compilation or the call raised
    crash       the process died                    timeout         it ran past --timeout
    untraced    Dynamo does not capture it          empty           nothing was left to compile
    not run     --budget was spent before           aot_eager too   `backend="aot_eager"` fails as well

Low-precision results may be twice as far from the float64 result as eager's, and some roundings.

Worker processes, each started again after a crash, take operators one by one. Findings go to `--out` as they come;
`--resume` leaves out what that file holds already. The exit status is 1 if a case fails that the table of known
failures does not list.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from . import core_page
from .opinfo import Case, Finding, Settings, cases_of, check, database, one_line, select
from .workers import ANSWER, Ended, Worker

FAILING = ("wrong", "error", "crash", "timeout")
DTYPES = {"cpu": "float32", "triton": "float32", "cuda": "float32,bfloat16,int64,bool,float16"}
SAMPLES = {"cpu": 16, "triton": 3, "cuda": 3}
KNOWN = {"cpu": "test/known_failures_cpu.txt", "triton": "", "cuda": "test/gpu/known_failures.txt"}
LAST_START = 5.0  # seconds before the end of the budget at which no operator is handed out any more
Unit = tuple[Case, ...]  # what one worker takes at a time


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description="Operators against eager.")
    p.add_argument(
        "--device", choices=["cpu", "cuda", "triton"], default="cpu", help="triton: a GPU's kernels, interpreted"
    )
    p.add_argument("--ops", default="", metavar="A,B", help="names, or prefixes ending in *; all by default")
    p.add_argument("--dtypes", default="", metavar="A,B", help="dtypes of the sample inputs, in order of importance")
    p.add_argument("--samples", type=int, metavar="N", help="most sample inputs per case")
    p.add_argument("--direction", choices=["forward", "backward", "both"], default="both")
    p.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes side by side")
    p.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds one case may take")
    p.add_argument("--budget", type=float, metavar="S", help="seconds the whole sweep may take")
    p.add_argument("--cubin", action="store_true", help="with --device triton: compile kernels to machine code too")
    p.add_argument("--warm", action="store_true", help="all cases twice, the second time from the first one's cache")
    p.add_argument("--out", type=Path, metavar="FILE", help="append findings as JSON lines")
    p.add_argument("--resume", action="store_true", help="leave out the cases that --out holds")
    p.add_argument("--all", action="store_true", help="print every finding, not only failures")
    p.add_argument("--page", type=Path, metavar="FILE", help="write what becomes of every core operator, and stop")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print the failures and a summary; exit status 1 if there is an unknown failure."""
    args = parser().parse_args(argv)
    settings = Settings(args.device, args.samples or SAMPLES[args.device], args.cubin, args.warm)
    if args.page:
        args.page.write_text(core_page.page())
        return 0
    if args.worker:
        return work(settings, sys.stdin, sys.stdout)
    began = time.monotonic()
    units = plan(args, held(args.out) if args.resume and args.out else frozenset())
    print(f"{sum(map(len, units))} cases, {args.jobs} workers, {settings.samples} samples a case", flush=True)
    known = known_failures(Path(KNOWN[args.device])) if KNOWN[args.device] else frozenset()
    findings: list[Finding] = []
    with open(args.out or os.devnull, "a") as out:
        for finding in _twice(args, units) if args.warm else sweep(args, units):
            findings.append(finding)
            if finding.status != "not run":
                out.write(json.dumps(asdict(finding)) + "\n")
                out.flush()
            if args.all or (finding.status in FAILING and finding.case not in known):
                print(finding, flush=True)
    return summary(findings, known, time.monotonic() - began)


def summary(findings: Sequence[Finding], known: frozenset[Case], seconds: float) -> int:
    counts = Counter((f.case.dtype, f.status) for f in findings)
    for dtype in dict.fromkeys(f.case.dtype for f in findings):
        row = ", ".join(f"{n} {status}" for (d, status), n in sorted(counts.items()) if d == dtype)
        print(f"{dtype:9} {row}")
    failed = {f.case for f in findings if f.status in FAILING}
    mended = known & {f.case for f in findings if f.status in ("generated", "library")}
    for c in sorted(mended, key=str):
        print(f"passes now, remove it from the known failures: {c.op} {c.dtype} {c.direction}")
    missing = sum(f.status == "not run" for f in findings)
    left = f", {missing} not run: repeat with --resume" if missing else ""
    print(f"{len(failed - known)} failures, {len(failed & known)} known ones, {seconds:.0f} s{left}")
    return int(bool(failed - known))


def known_failures(table: Path) -> frozenset[Case]:
    """Cases of a table with lines `operator dtype direction  # reason`."""
    rows = table.read_text().splitlines() if table.exists() else []
    return frozenset(Case(*row.partition("#")[0].split()) for row in rows if row.partition("#")[0].strip())


def held(out: Path) -> frozenset[Case]:
    """Cases that a file of findings has."""
    rows = out.read_text().splitlines() if out.exists() else []
    return frozenset(Case(**json.loads(row)["case"]) for row in rows)


def plan(args: argparse.Namespace, done: frozenset[Case]) -> list[Unit]:
    """Return the units of work, most important dtype first; the directions of one operator go together."""
    device = "cuda" if args.device == "cuda" else "cpu"
    directions = ("forward", "backward") if args.direction == "both" else (args.direction,)
    names = list(select(database(), args.ops))
    units = []
    for dtype in (args.dtypes or DTYPES[args.device]).split(","):
        for name in names:
            cases = [c for op in database()[name] for c in cases_of(op, dtype, device, directions) if c not in done]
            units.append(tuple(dict.fromkeys(cases)))
    return [u for u in units if u]


# --- worker processes ------------------------------------------------------------------------------------------------


def command(a: argparse.Namespace) -> list[str]:
    """Return the command that starts a worker."""
    line = [sys.executable, "-m", "benchmarks.coverage", "--worker", "--device", a.device]
    return [
        *line,
        "--samples",
        str(a.samples or SAMPLES[a.device]),
        *(["--cubin"] if a.cubin else []),
        *(["--warm"] if a.warm else []),
    ]


def ask(worker: Worker, case: Case, seconds: float, only_aot: bool = False) -> Finding:
    answer = worker.ask([asdict(case), only_aot], seconds)
    if isinstance(answer, Ended):
        if answer.late:
            return Finding(case, "timeout", detail=f"longer than {seconds:.0f} s")
        return Finding(case, "crash", detail=answer.words)
    return Finding(**{**answer, "case": case, "library": tuple(answer["library"])})


def sweep(args: argparse.Namespace, units: Sequence[Unit]) -> Iterator[Finding]:
    """Findings as they come from `--jobs` workers."""
    end = time.monotonic() + args.budget if args.budget else float("inf")
    waiting: queue.SimpleQueue[Unit] = queue.SimpleQueue()
    for u in units:
        waiting.put(u)
    found: queue.SimpleQueue[Finding] = queue.SimpleQueue()
    threads = [threading.Thread(target=_feed, args=(args, waiting, found, end)) for _ in range(args.jobs)]
    for t in threads:
        t.start()
    for _ in range(sum(map(len, units))):
        yield found.get()
    for t in threads:
        t.join()


def _twice(args: argparse.Namespace, units: Sequence[Unit]) -> Iterator[Finding]:
    """Findings of a sweep that fills a cache folder, then those of one whose processes find it full."""
    with tempfile.TemporaryDirectory(prefix="altbackend-coverage-") as folder, patch.dict(os.environ):
        os.environ["ALTBACKEND_CACHE_DIR"] = folder
        for _ in range(2):
            yield from sweep(args, units)


def _feed(args: argparse.Namespace, waiting: Any, found: Any, end: float) -> None:
    worker = Worker(command(args))
    try:
        while True:
            for case in waiting.get_nowait():
                found.put(_finding(worker, case, args.timeout, end))
    except queue.Empty:
        worker.stop()


def _finding(worker: Worker, case: Case, timeout: float, end: float) -> Finding:
    left = end - time.monotonic()
    if left < LAST_START:
        return Finding(case, "not run")
    f = ask(worker, case, min(timeout, left))
    if f.status == "timeout" and left < timeout:
        return Finding(case, "not run")
    left = end - time.monotonic()
    if f.status in ("crash", "timeout") and left > LAST_START:
        other = ask(worker, case, min(timeout, left), only_aot=True)
        if other.status in FAILING:
            return replace(f, status="aot_eager too", detail=f"{f.detail} | aot_eager: {other.detail}")
    return f


def work(settings: Settings, requests: Iterable[str], answers: Any) -> int:
    """The worker process: one case per line in, one line with its finding out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1 if settings.way == "cuda" else torch.get_num_threads())
    for line in requests:
        case, only_aot = json.loads(line)
        try:
            found = asdict(check(Case(**case), settings, only_aot))
        except Exception as cause:
            found = asdict(Finding(Case(**case), "error", detail=f"in the comparison: {one_line(cause)}"))
        broken = settings.way == "cuda" and not _device_works()
        if broken and found["status"] != "aot_eager too":
            found["status"] = "crash"
        answers.write(ANSWER + json.dumps({**found, "broken": broken}) + "\n")
        answers.flush()
    return 0


def _device_works() -> bool:
    """False after a kernel has failed: nothing runs in this process any more."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
