"""python -m benchmarks.leaks: what a process keeps of every graph that it has compiled and forgotten again.

Each round compiles a graph that no round before it had, calls it, and resets Dynamo. What torch itself keeps shows in
`--backend aot_eager`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PAGE = os.sysconf("SC_PAGE_SIZE")
WARM_UP = 20  # rounds before the first count: imports, pools of allocators


@dataclass(frozen=True)
class Held:
    """The resources of a process after some rounds. `resident`: bytes; `libraries`: of the cache folder, mapped."""

    rounds: int
    resident: int
    objects: int
    descriptors: int
    children: int
    threads: int
    libraries: int


def held(rounds: int, folder: Path) -> Held:
    """Return what this process holds now, garbage aside."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Held(
        rounds,
        int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
        len(gc.get_objects()),
        len(os.listdir("/proc/self/fd")),
        children(os.getpid()),
        len(os.listdir("/proc/self/task")),
        len({line.split()[-1] for line in maps if str(folder) in line or "altbackend-build-" in line}),
    )


def children(parent: int) -> int:
    """Processes that a process has started and that have not ended or not been waited for."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            found += int(path.read_text().rpartition(")")[2].split()[1]) == parent
    return found


def rounds(backend: str, count: int, every: int, folder: Path, again: bool) -> Iterator[Held]:
    """Compile `count` graphs, every one another or, with `again`, a few in turn that the cache keeps."""
    strict: dict[str, Any] = {"strict": True, "cache_graphs": True, "cache_dir": str(folder)}
    options = strict if backend == "alt" else None
    x = torch.linspace(0, 1, 256).reshape(16, 16)
    for n in range(-WARM_UP, count + 1):
        factor = float(n % 5 if again else n)

        def f(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
            return torch.softmax(x * factor, -1) + x.sum(0)

        torch.testing.assert_close(torch.compile(f, backend=backend, options=options)(x), f(x))
        torch._dynamo.reset()
        if n >= 0 and n % every == 0:
            yield held(n, folder)


def report(rows: Sequence[Held]) -> str:
    """A table of counts, and the growth of each per round over the second half."""
    heads = ("rounds", "MiB", "objects", "descriptors", "children", "threads", "libraries")
    lines = [heads, *((r.rounds, f"{r.resident / 2**20:.1f}", *_counts(r)) for r in rows)]
    table = "\n".join(" ".join(f"{cell!s:>12}" for cell in line) for line in lines)
    first, last = rows[len(rows) // 2 - (len(rows) == 2)], rows[-1]
    spent = max(last.rounds - first.rounds, 1)
    grown = [(b - a) / spent for a, b in zip(_counts(first), _counts(last), strict=True)]
    each = ", ".join(f"{n:.2f} {name}" for n, name in zip(grown, heads[2:], strict=True))
    kib = (last.resident - first.resident) / spent / 1024
    return f"{table}\na round since round {first.rounds}: {kib:.1f} KiB, {each}"


def _counts(r: Held) -> tuple[int, ...]:
    return r.objects, r.descriptors, r.children, r.threads, r.libraries


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.leaks", description=__doc__)
    p.add_argument("--backend", default="alt")
    p.add_argument("--count", type=int, default=1000)
    p.add_argument("--every", type=int, default=100)
    p.add_argument("--again", action="store_true", help="graphs that are found in the cache")
    args = p.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="altbackend-leaks-") as folder:
        for row in rounds(args.backend, args.count, args.every, Path(folder), args.again):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    print(f"{args.backend}{', from the cache' * args.again}, torch {torch.__version__}")
    print(report(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
