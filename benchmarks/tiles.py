"""python -m benchmarks.tiles: what measuring blocks and warps (`max_autotune`) gains over the rules, kernel by kernel.

Compiles cases for a GPU with every variant of every kernel measured, and prints the kernels that gain most. With
--json, the times of all variants with the kernels' sources, to find better rules.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import subject
from benchmarks.cases import SUITES, Mode, choose
from benchmarks.options import names
from benchmarks.records import Request

ROWS = 12


def measured(suite: str, case_name: str, mode: Mode, folder: Path) -> list[dict[str, Any]]:
    """The stored measurements of one case: times in microseconds by variant, and the question with the source."""
    (case,) = choose(suite, [case_name])
    options = {"max_autotune": True, "matmul_templates": "off", "cache_graphs": False, "cache_dir": str(folder)}
    request = Request(case.name, "alt", mode, "gpu", "cuda", "bfloat16", options=options)
    torch._dynamo.reset()
    with subject.surroundings(request):
        made = subject.compiled(case, subject.build(case, "gpu", request), request)
        made.clear()
        made.run()
        torch.cuda.synchronize()
    return [json.loads(f.read_text()) for f in sorted(folder.glob("autotune/*/*.json"))]


def row(times: dict[str, float]) -> tuple[float, float, str]:
    """Microseconds by the rules, of the fastest variant, and its name."""
    best = min(times, key=times.__getitem__)
    return times["rules"], times[best], best


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.tiles")
    p.add_argument("cases", type=names)
    p.add_argument("--suite", choices=sorted(SUITES), default="models")
    p.add_argument("--mode", choices=["inference", "training"], default="inference")
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    for name in args.cases:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            found = measured(args.suite, name, args.mode, Path(folder))
            seconds = time.perf_counter() - start
        rows = sorted(
            (row(f["microseconds"]) for f in found if "rules" in f["microseconds"]), key=lambda r: r[1] - r[0]
        )
        rules, best = sum(r[0] for r in rows), sum(r[1] for r in rows)
        print(f"{name} {args.mode}: {len(rows)} kernels, {seconds:.0f} s")
        print(f"  {rules:9.1f} -> {best:9.1f} us  all together, once each")
        for slow, fast, label in rows[:ROWS]:
            print(f"  {slow:9.1f} -> {fast:9.1f} us  {label}", flush=True)
        if args.json is not None:
            with args.json.open("a") as out:
                out.writelines(json.dumps({"case": name, "mode": args.mode} | f) + os.linesep for f in found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
