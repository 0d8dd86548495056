"""Time models with several compilers, all compiling side by side and one measuring at a time.

    python -m benchmarks.together --device cuda --mode inference
    python -m benchmarks.together --device cuda --mode training --cases bert,resnet50 --processes 8
    python -m benchmarks.together --device cpu --frozen --processes 1 --cases resnet50,timm:resnest50d
    python -m benchmarks.together --suite programs --device cuda --dtype float32
    python -m benchmarks.together --suite tasks --device cpu --processes 1 --seconds 0.3 --cases "box overlaps"

`benchmarks models` takes a fresh process for each model and compiler. This command takes one process for each model, so
that a whole suite fits into minutes on a machine with many cores. A row begins with eager's, TorchInductor's and our
milliseconds, medians of alternating calls, and TorchInductor's time over ours. The largest relative error, the peak
memory beyond what is allocated before a call, and the seconds of a first call beside other compilations follow. A last
line names the cases whose errors are far above TorchInductor's.
`--frozen` adds both compilers with `freezing=True`. A case `timm:NAME` is any network of timm. On a GPU, float32 allows
TF32. `--worst N` prints the N rows that are furthest behind.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks import subject
from benchmarks.cases import SUITES, choose
from benchmarks.cases.vision import of_timm
from benchmarks.measure import output_error
from benchmarks.records import Request
from benchmarks.rivals.measure import milliseconds, peak_bytes
from benchmarks.table import geomean
from benchmarks.workers import ANSWER, Ended, Worker

BACKENDS = ("inductor", "alt")
FROZEN = tuple(f"{name} frozen" for name in BACKENDS)
TIMM = "timm:"
WARM_UPS = 3
FEWEST_ROUNDS = 7
SLOW = 1.05  # times eager's time
WORSE, SMALL_ERROR = 10, 1e-3  # times TorchInductor's error, and the error below which neither counts as wrong


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one model: median milliseconds, error, peak bytes, seconds of the first call, by name."""
    device = torch.device(asked["device"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    name = asked["case"]
    case = of_timm(name.removeprefix(TIMM)) if name.startswith(TIMM) else choose(asked["suite"], [name])[0]
    requests = _requests(asked)
    first = requests[BACKENDS[0]]
    built = subject.build(case, asked["preset"], first)
    eager = subject.eager(case, built, first)
    with subject.surroundings(first):
        calls = {"eager": _call(eager)}
        expected = calls["eager"]()
        answer: dict[str, Any] = {"case": case.name, "ms": {}, "errors": {}, "peaks": {}, "first": {}, "failures": {}}
        for name, request in requests.items():
            call = _call(subject.compiled(case, built, request, dynamic=False))
            begin = time.perf_counter()
            try:
                got = call()
                milliseconds(list, device)  # waits for the device
            except Exception as cause:  # a model that one compiler refuses is a figure too
                answer["failures"][name] = f"{type(cause).__name__}: {str(cause)[:200]}"
                continue
            answer["first"][name] = time.perf_counter() - begin
            answer["errors"][name] = output_error(tuple(got), tuple(expected))
            calls[name] = call
        with FileLock(asked["lock"]):
            _time(calls, device, asked["seconds"], answer)
    return answer


def _requests(asked: dict[str, Any]) -> dict[str, Request]:
    """Return what to compile, by the name of its columns."""
    of = {k: asked[k] for k in ("case", "mode", "preset", "device", "dtype")}
    requests = {name: Request(**of, backend=name) for name in BACKENDS}
    if asked["frozen"]:
        frozen: dict[str, Any] = {"freezing": True}
        requests |= {
            key: Request(**of, backend=name, options=frozen) for key, name in zip(FROZEN, BACKENDS, strict=True)
        }
    return requests


def _call(s: subject.Subject) -> Callable[[], list[Tensor]]:
    def call() -> list[Tensor]:
        s.clear()
        return [x.detach() for x in pytree.tree_leaves(s.run()) if isinstance(x, Tensor)]

    return call


def _time(calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float, answer: dict[str, Any]) -> None:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(WARM_UPS):
            call()
        answer["peaks"][name] = peak_bytes(call, device)
    begin = time.perf_counter()
    while len(times["eager"]) < FEWEST_ROUNDS or time.perf_counter() - begin < seconds:
        for name, call in calls.items():
            times[name].append(milliseconds(call, device))
    answer["ms"] = {name: median(values) for name, values in times.items()}


def report(rows: Sequence[dict[str, Any]], worst: int | None = None) -> str:
    """Return the tables and their geometric means; with `worst`, only so many rows, the furthest behind first."""
    pairs = [BACKENDS, FROZEN] if any(FROZEN[0] in r.get("ms", {}) for r in rows) else [BACKENDS]
    return "\n\n".join(_table(rows, pair, worst) for pair in pairs)


def _table(rows: Sequence[dict[str, Any]], pair: tuple[str, ...], worst: int | None) -> str:
    rival, ours = pair
    head = f"{rival} ms | {ours} ms | {rival}/{ours} | errors | peak MB {rival}, {ours} | first s {rival}, {ours}"
    lines: list[tuple[float, str]] = []
    ratios: list[float] = []
    slow, wrong = 0, list[str]()
    for r in sorted(rows, key=lambda r: str(r["case"])):
        ms = r.get("ms", {})
        if not {rival, ours} <= set(ms):
            lines.append((0.0, f"{r['case']} | {r.get('failed') or r.get('failures')}"))
            continue
        ratios.append(ms[rival] / ms[ours])
        slow += ms[ours] > SLOW * ms["eager"]
        if r["errors"][ours] > max(WORSE * r["errors"][rival], SMALL_ERROR):
            wrong.append(r["case"])
        times = " | ".join(f"{ms[name]:.3f}" for name in ("eager", rival, ours))
        errors = ", ".join(f"{r['errors'][name]:.0e}" for name in (rival, ours))
        peaks = ", ".join(f"{r['peaks'][name] / 1e6:.0f}" for name in (rival, ours))
        firsts = ", ".join(f"{r['first'][name]:.1f}" for name in (rival, ours))
        lines.append((ratios[-1], f"{r['case']} | {times} | {ratios[-1]:.2f} | {errors} | {peaks} | {firsts}"))
    if worst is not None:
        lines = sorted(lines)[:worst]
    counts = ", ".join(f"{sum(x < limit for x in ratios)} below {limit}" for limit in (1.0, 0.9, 0.7))
    mean = f"geometric mean of {len(ratios)}: {geomean(ratios) or 0:.3f}; {counts}; {slow} slower than eager by 5 %"
    text = "\n".join([f"case | eager ms | {head}", *(line for _, line in lines), mean])
    return f"{text}\nerrors are more than {WORSE} times those of {rival}: {', '.join(wrong)}" if wrong else text


def _serve() -> None:
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except Exception as cause:
            answer = {"failed": f"{type(cause).__name__}: {str(cause)[:200]}", "broken": True}
        print(ANSWER + json.dumps(answer), flush=True)


def main() -> None:
    """Run the comparison from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="models", choices=sorted(SUITES))
    parser.add_argument("--cases", help="these, separated by commas (by ';' where names have commas); all by default")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--mode", default="inference", choices=("inference", "training"))
    parser.add_argument("--preset", help="sizes; by default the device's")
    parser.add_argument("--dtype", help="bfloat16 on cuda, float32 on a CPU")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the timed calls of a model")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of one model")
    parser.add_argument("--frozen", action="store_true", help="also with freezing=True, both compilers")
    parser.add_argument("--worst", type=int, metavar="N", help="print the N rows that are furthest behind")
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) - 2, 1))
    args = parser.parse_args()
    names = _names(args.cases) if args.cases else [c.name for c in SUITES[args.suite] if c.mode in (None, args.mode)]
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "device": args.device,
            "suite": args.suite,
            "mode": args.mode,
            "preset": args.preset or {"cuda": "gpu", "cpu": "cpu"}[args.device],
            "dtype": args.dtype or {"cuda": "bfloat16", "cpu": "float32"}[args.device],
            "seconds": args.seconds,
            "frozen": args.frozen,
            "lock": f"{folder}/measure.lock",
        }

        def one(name: str) -> dict[str, Any]:
            worker = Worker([sys.executable, "-m", "benchmarks.together", "--serve"])
            try:
                answer = worker.ask({"case": name, **asked}, args.timeout)
            finally:
                worker.stop()
            row = {"case": name, **({"failed": answer.words} if isinstance(answer, Ended) else answer)}
            print(report([row]).splitlines()[1], file=sys.stderr, flush=True)  # what is known if the command is ended
            return row

        with ThreadPoolExecutor(args.processes) as threads:
            print(report(list(threads.map(one, names)), args.worst))


def _names(text: str) -> list[str]:
    return text.split(";") if ";" in text else text.split(",")


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        _serve()
    else:
        main()
