"""Search for programs that are slower than with TorchInductor, on this machine.

    python -m benchmarks.rivals --count 200 --seed 1 --device cuda --dtypes float32,bfloat16 --modes inference
    python -m benchmarks.rivals --programs benchmarks/rivals/reported.txt --device cuda     # a program a line
    python -m benchmarks.rivals --count 60 --device cpu --shrink 3     # the three worst, with fewer steps

Programs compile in several processes side by side; a lock lets one measure at a time. A row: eager's, TorchInductor's
and our milliseconds, TorchInductor's over ours, and peak memory. Errors are those against eager in float32 without
TF32; a line names each program whose error is much larger than eager's own and TorchInductor's. `--out` keeps all rows
as JSON lines. The first calls of other programs disturb a measurement. `--again` therefore measures what is far from 1,
on both sides, once more in few processes. The later figures count. `--errors-only` times nothing. It calls each program
twice, without TF32, in memory full of NaN, so that a value which no kernel wrote shows. `--dynamo` adds eager's kernels
behind Dynamo's guards, where every backend begins. The summary then tells how many programs are slower than those.
`--tf32 convolutions` measures float32 under torch's own settings, and `--tf32 none` without TF32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.rivals.grammar import checked, draw, parse
from benchmarks.rivals.measure import TF32
from benchmarks.table import geomean
from benchmarks.workers import Ended, Worker

WORST = 25
BEHIND = 0.9  # of TorchInductor's speed
WRONG = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-3}  # smaller errors are not reported
TIMES_WORSE = 3  # than the errors of eager and of TorchInductor
EDGE = 0.95
FAR_AHEAD = 1.4  # of TorchInductor's speed
PROCESSES_AGAIN, ATTEMPTS = 3, 2


@dataclass(frozen=True)
class Pool:
    """Processes that measure programs for one device."""

    idle: SimpleQueue[Worker]
    device: str
    lock: str
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)

    def measure(self, text: str) -> dict[str, Any]:
        worker = self.idle.get()
        try:
            request = {"text": text, "device": self.device, "lock": self.lock, **self.options}
            answer = worker.ask(request, self.seconds)
        finally:
            self.idle.put(worker)
        return {
            "text": text,
            **({"failed": f"{'late: ' if answer.late else ''}{answer.words}"} if isinstance(answer, Ended) else answer),
        }


def speed(row: dict[str, Any]) -> float | None:
    """Return TorchInductor's time over ours; None where either did not run."""
    ms = row.get("milliseconds", {})
    return ms["inductor"] / ms["alt"] if "inductor" in ms and "alt" in ms else None


def shrunk(pool: Pool, row: dict[str, Any]) -> dict[str, Any]:
    """Return a program with fewer steps that is as far behind, the first found."""
    for text in _shorter(row["text"], pool.device):
        candidate = pool.measure(text)
        if (ratio := speed(candidate)) is not None and ratio <= min((speed(row) or 0) * 1.1, EDGE):
            return shrunk(pool, candidate)
    return row


def _shorter(text: str, device: str) -> Iterator[str]:
    program = parse(text)
    for i in reversed(range(len(program.steps))):
        shorter = replace(program, steps=program.steps[:i] + program.steps[i + 1 :])
        if shorter.steps and checked(shorter, device) is not None:
            yield shorter.text


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summary and the slowest programs as text."""
    compared = sorted(((s, r) for r in rows if (s := speed(r)) is not None), key=lambda pair: pair[0])
    if all("inductor" not in r.get("errors", {}) for r in rows):
        return "\n".join([f"all {len(rows)}: errors only", *_faults(rows)])
    lines = [_summary(f"all {len(rows)}", compared)]
    heads = sorted({" ".join(r["text"].split()[:2]) for r in rows})
    lines += [_summary(head, [(s, r) for s, r in compared if r["text"].startswith(head)]) for head in heads]
    lines += ["", "inductor/alt | eager ms | inductor ms | alt ms | peak inductor, alt MB | program"]
    for ratio, r in compared[:WORST]:
        ms, peak = r["milliseconds"], r["peak_bytes"]
        memory = f"{peak['inductor'] / 1e6:.0f}, {peak['alt'] / 1e6:.0f}"
        times = " | ".join(f"{ms[name]:.3f}" for name in ("eager", "inductor", "alt"))
        lines.append(f"{ratio:.2f} | {times} | {memory} | {r['text']}")
    return "\n".join([*lines, *_faults(rows)])


def _summary(name: str, compared: Sequence[tuple[float, dict[str, Any]]]) -> str:
    if not compared:
        return f"{name}: none compared"
    ratios = [s for s, _ in compared]
    slower = [r for _, r in compared if r["milliseconds"]["alt"] > 1.05 * r["milliseconds"]["eager"]]
    memory = [
        r["peak_bytes"]["inductor"] / r["peak_bytes"]["alt"]
        for _, r in compared
        if r["peak_bytes"]["alt"] and r["peak_bytes"]["inductor"]
    ]
    first = geomean(r["first_seconds"]["inductor"] / r["first_seconds"]["alt"] for _, r in compared)
    behind_dynamo = [r for r in slower if r["milliseconds"]["alt"] > 1.05 * r["milliseconds"].get("dynamo", 0.0)]
    known = all("dynamo" in r["milliseconds"] for _, r in compared)
    of_them = f" ({len(behind_dynamo)} than eager behind Dynamo)" if known else ""
    below = ", ".join(f"{sum(s < b for s in ratios)} below {b}" for b in (0.95, BEHIND, 0.7, 0.5))
    return (
        f"{name}: {len(ratios)} compared, geometric mean {geomean(ratios):.3f}, {below}, "
        f"{len(slower)} over 5% slower than eager{of_them}, memory {geomean(memory) or 0:.2f}, first call {first:.1f}"
    )


def _faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each program that failed or whose result is not eager's."""
    lines = []
    for r in rows:
        errors = r.get("errors", {})
        rivals = max((e for name, e in errors.items() if name != "alt"), default=0.0)
        limit = max(WRONG[r["text"].split()[0]], TIMES_WORSE * rivals)
        if "failed" in r:
            lines.append(f"FAILED {r['text']}: {r['failed']}")
        elif "alt" in r["failures"]:
            lines.append(f"REFUSED {r['text']}: {r['failures']['alt']}")
        elif errors.get("alt", 0.0) > limit:
            figures = ", ".join(f"{name} {e:.1e}" for name, e in errors.items())
            lines.append(f"ERROR {figures}: {r['text']}")
    return lines


def _texts(args: argparse.Namespace) -> list[str]:
    if args.programs:
        lines = Path(args.programs).read_text(encoding="utf-8").splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    rng = random.Random(args.seed)
    kinds = [(d, m) for m in args.modes.split(",") for d in args.dtypes.split(",")]
    return [draw(rng, *kinds[i % len(kinds)], args.device).text for i in range(args.count)]


def main() -> None:
    """Run the search from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--modes", default="inference")
    parser.add_argument("--programs", help="a file with one program a line, in place of drawn ones")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one program")
    parser.add_argument("--seconds", type=float, default=0, help="start no further program after so many; 0: no limit")
    parser.add_argument("--shrink", type=int, default=0, help="how many of the worst to shrink")
    parser.add_argument("--again", action="store_true", help="measure programs that are far behind or ahead once more")
    parser.add_argument("--errors-only", action="store_true", help="compare results with eager's; time nothing")
    parser.add_argument("--dynamo", action="store_true", help="time eager's kernels behind Dynamo's guards too")
    parser.add_argument(
        "--tf32", default="all", choices=TF32, help="what may round float32 to TF32; torch's default: convolutions"
    )
    parser.add_argument("--out", help="a file for all rows, a line of JSON each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = _search(args, folder)
    print(report(rows))


def _search(args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    texts, end = _texts(args), time.monotonic() + (args.seconds or 1e9)
    count = min(args.processes, len(texts))
    threads_each = str(max((os.cpu_count() or 2) // count, 1))
    environment = {"OMP_NUM_THREADS": threads_each, "TORCHINDUCTOR_COMPILE_THREADS": threads_each, **os.environ}
    options = {"errors_only": args.errors_only, "dynamo": args.dynamo, "tf32": args.tf32}
    pool = Pool(SimpleQueue(), args.device, f"{folder}/measure.lock", args.timeout, options)
    workers = [Worker([sys.executable, "-m", "benchmarks.rivals.measure"], environment) for _ in range(count)]
    for worker in workers:
        pool.idle.put(worker)

    def one(text: str) -> dict[str, Any] | None:
        row = pool.measure(text) if time.monotonic() < end else None
        if row is not None and args.out:
            with Path(args.out).open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
        return row

    try:
        with ThreadPoolExecutor(count) as threads:
            rows = [row for row in threads.map(one, texts) if row is not None]
        if args.again:
            rows = _measured_again(pool, rows)
        behind = sorted((r for r in rows if (speed(r) or 1) < BEHIND), key=lambda r: speed(r) or 1)
        for row in behind[: args.shrink]:
            print(f"shrunk: {shrunk(pool, row)['text']}", flush=True)
    finally:
        for worker in workers:
            worker.stop()
    return rows


def _measured_again(pool: Pool, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, those of programs far behind or far ahead measured once more while little else runs.

    A measurement that fails, as for want of memory that other processes hold, has a second attempt in a new process.
    """

    def again(row: dict[str, Any]) -> dict[str, Any]:
        ratio = speed(row)
        if ratio is None or EDGE <= ratio <= FAR_AHEAD:
            return row
        for _ in range(ATTEMPTS):
            if speed(second := pool.measure(row["text"])) is not None:
                return {**second, "first_seconds": row["first_seconds"]}
        return row

    with ThreadPoolExecutor(PROCESSES_AGAIN) as threads:
        return list(threads.map(again, rows))


if __name__ == "__main__":
    main()
