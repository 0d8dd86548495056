"""python -m benchmarks.sweep: architectures of transformers and timm in their smallest form, compiled against eager.

Every model is called twice with random weights and inputs, in training (loss, outputs, all gradients, buffers) and in
inference, and compared as `benchmarks.check` does. `strict` is on: a graph that cannot be compiled is a failure. Where
a model fails, `backend="aot_eager"` is tried too, which tells a fault of the compiler from one of the model or torch:

    ok          within the tolerance, or no further from float64 than eager, or from eager than eager is from itself
                when its parameters move by roundings             differs     it is not
    error       compilation or the call raised                                     crash       the process died
    timeout     it ran past --timeout                                              not built   eager raises
    empty       no graph was compiled          aot_eager too   `backend="aot_eager"` does not pass either

Findings go to `--out` as they come; `--resume` leaves out what that file holds; `--page` writes all of it as a page.
Exit status 1 if a model fails that aot_eager passes.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from altbackend.report import stats
from benchmarks import sweep_page
from benchmarks.cases import SWEEPS, Case, Mode, find
from benchmarks.check import verdict
from benchmarks.measure import measure, spread
from benchmarks.opinfo import one_line
from benchmarks.options import names, positive
from benchmarks.records import Request
from benchmarks.runner import environment
from benchmarks.subject import build, eager, surroundings
from benchmarks.workers import ANSWER, Ended, Worker

MODES: tuple[Mode, ...] = ("training", "inference")
FAILING = ("differs", "empty", "error", "crash", "timeout")


@dataclass(frozen=True)
class Key:
    """One model in one mode."""

    suite: str
    case: str
    mode: Mode


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description="Many small models against eager.")
    p.add_argument("--suites", type=names, default=list(SWEEPS), metavar="A,B", help="of: " + ", ".join(SWEEPS))
    p.add_argument("--cases", type=names, default=[], metavar="A,B", help="only these")
    p.add_argument("--modes", type=names, default=list(MODES), metavar="A,B")
    p.add_argument("--device", default="cpu")
    p.add_argument("--backend", default="alt")
    p.add_argument("--jobs", type=positive, default=1, metavar="N", help="worker processes side by side")
    p.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds one model may take in one mode")
    p.add_argument("--out", type=Path, metavar="FILE", help="append findings as JSON lines")
    p.add_argument("--resume", action="store_true", help="leave out what --out holds, failures included")
    p.add_argument("--retry", action="store_true", help="with --resume: try the failures again")
    p.add_argument("--page", type=Path, metavar="FILE", help="write the findings of --out as a page")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Print every finding and a summary."""
    p = parser()
    args = p.parse_args(argv)
    if unknown := [m for m in args.modes if m not in get_args(Mode)] + [s for s in args.suites if s not in SWEEPS]:
        p.error(f"there is no {unknown[0]!r}; modes: {', '.join(MODES)}; suites: {', '.join(SWEEPS)}")
    if args.worker:
        return work(sys.stdin, sys.stdout)
    before = held(args.out) if args.resume and args.out else {}
    done = {k: f for k, f in before.items() if not (args.retry and f["status"] in FAILING)}
    keys = [k for k in plan(args) if k not in done]
    print(f"{len(keys)} models and modes, {args.jobs} workers", flush=True)
    found: dict[Key, dict[str, Any]] = {}
    with open(args.out or os.devnull, "a") as out:
        for key, finding in sweep(args, keys):
            found[key] = finding
            out.write(json.dumps({**asdict(key), **finding}) + "\n")
            out.flush()
            print(line(key, finding), flush=True)
    if args.page:
        args.page.write_text(sweep_page.page(list((before | found).items())))
    counts = Counter(f["status"] for f in found.values())
    print(", ".join(f"{n} {status}" for status, n in sorted(counts.items())))
    return int(any(f["status"] in FAILING for f in found.values()))


def line(key: Key, f: dict[str, Any]) -> str:
    figures = sweep_page.figures(f) if f["status"] == "ok" else ()
    return " ".join([f"{key.case:32} {key.mode:9} {f['status']:13} {f['seconds']:5.1f} s", *figures, f["detail"]])


def held(out: Path) -> dict[Key, dict[str, Any]]:
    """The findings of a file, the last of each model and mode."""
    rows = out.read_text().splitlines() if out.exists() else []
    found: dict[Key, dict[str, Any]] = {}
    for row in map(json.loads, rows):
        found[Key(row.pop("suite"), row.pop("case"), row.pop("mode"))] = row
    return found


def plan(args: argparse.Namespace) -> list[Key]:
    chosen = [(suite, c) for suite in args.suites for c in SWEEPS[suite] if not args.cases or c.name in args.cases]
    return [Key(suite, c.name, mode) for mode in args.modes for suite, c in chosen]


# --- processes -------------------------------------------------------------------------------------------------------


def sweep(args: argparse.Namespace, keys: Sequence[Key]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Findings as they come from `--jobs` workers, which share an empty cache folder."""
    waiting: queue.SimpleQueue[Key] = queue.SimpleQueue()
    for key in keys:
        waiting.put(key)
    found: queue.SimpleQueue[tuple[Key, dict[str, Any]]] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="altbackend-sweep-", ignore_cleanup_errors=True) as cache:
        threads = [threading.Thread(target=_feed, args=(args, Path(cache), waiting, found)) for _ in range(args.jobs)]
        for t in threads:
            t.start()
        for _ in keys:
            yield found.get()
        for t in threads:
            t.join()


def _feed(args: argparse.Namespace, cache: Path, waiting: Any, found: Any) -> None:
    worker = Worker([sys.executable, "-m", "benchmarks.sweep", "--worker"], environment(cache))
    try:
        while True:
            key = waiting.get_nowait()
            found.put((key, _finding(worker, key, args)))
    except queue.Empty:
        worker.stop()


def _finding(worker: Worker, key: Key, args: argparse.Namespace) -> dict[str, Any]:
    options = {"fallback_random": True} if args.backend == "alt" else {}  # models that draw numbers draw eager's
    request = Request(key.case, args.backend, key.mode, "tiny", args.device, task="check", options=options)
    finding = _asked(worker, request, args.timeout)
    if finding["status"] not in FAILING or args.backend == "aot_eager":
        return finding
    other = _asked(worker, replace(request, backend="aot_eager", options={}), args.timeout)
    if other["status"] == "ok":
        return finding
    return {**finding, "status": "aot_eager too", "detail": f"{finding['detail']} | aot_eager: {other['detail']}"[:600]}


def _asked(worker: Worker, request: Request, seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    answer = worker.ask(asdict(request), seconds)
    if isinstance(answer, Ended):
        how = ("timeout", f"longer than {seconds:.0f} s") if answer.late else ("crash", answer.words)
        answer = {"status": how[0], "detail": how[1]}
    return {**answer, "seconds": round(time.monotonic() - began, 1)}


def work(requests: Iterable[str], answers: Any) -> int:
    """The worker process: one request a line, one finding a line."""
    warnings.simplefilter("ignore")
    for text in requests:
        answers.write(ANSWER + json.dumps(examine(Request(**json.loads(text)))) + "\n")
        answers.flush()
    return 0


# --- one model -------------------------------------------------------------------------------------------------------


def examine(request: Request) -> dict[str, Any]:
    """Return what `measure` says of a model, as a status and its figures."""
    if words := not_built(find(request.case), request):
        return {"status": "not built", "detail": words}
    torch._dynamo.reset()
    before = stats.snapshot()
    try:
        m = measure(request)
    except Exception as error:
        return {"status": "error", "detail": one_line(error)[:600]}
    made = stats.snapshot() - before
    said = verdict(m)
    if not said.startswith("ok") and m.worst_error <= (usual := spread(request)):
        said = f"ok, eager moves by {usual:.1e} when its parameters move by roundings, this by {m.worst_error:.1e}"
    empty = request.backend == "alt" and not made.graphs
    return {
        "status": "empty" if empty else "ok" if said.startswith("ok") else "differs",
        "detail": said.partition(", ")[2],
        "output_error": m.output_error,
        "gradient_error": m.gradient_error,
        "graphs": m.graphs,
        "graph_breaks": m.graph_breaks,
        "kernels": made.kernels,
        "library_calls": made.library_calls,
    }


def not_built(case: Case, request: Request) -> str:
    """Return why eager itself does not run the model; '' where it does."""
    try:
        subject = eager(case, build(case, "tiny", request), request)
        with surroundings(request):
            subject.run()
    except Exception as error:
        return one_line(error)[:600]
    return ""


if __name__ == "__main__":
    sys.exit(main())
