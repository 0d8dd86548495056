"""Random programs with checks: the compiled program gives eager's values, or raises where eager raises, as it does.

    python -m test.fuzz_checks --programs 300 --seed 0
    python -m test.fuzz_checks --programs 300 --seed 0 --warm
    python -m test.fuzz_checks --programs 300 --seed 0 --asan

Programs draw sizes and numbers that data decides, and symbolic floats. Checks hold or do not, and positions are in or
out of range. The calls after the first have other data. Each program runs in a child process, several in a row, so
that a crash is a finding too. With `--warm` a second child runs them again from the graphs that the first has cached;
the last line counts the graphs that came from there. With `--asan` the generated C++ is built with AddressSanitizer:
`ALTBACKEND_CXX` names a script that adds `-fsanitize=address`. The child then runs under `LD_PRELOAD` of
`g++ -print-file-name=libasan.so` and of `libstdc++.so`, with `ASAN_OPTIONS=detect_leaks=0`; what it reports ends the
child and is printed. Programs that torch itself cannot trace count as such.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.opinfo import is_untraced
from test.compare import compiled, difference, twin
from test.fuzz_check_operators import KINDS, WEIGHTS, State, inputs, step
from test.ways import Verdicts

CALLS = 5
BATCH = 50  # programs of one child
ROUNDING = 2**-23  # of a float32 number of magnitude 1: a sum of such terms that cancel keeps it
TIMEOUT = 900  # seconds of a batch
OUT_OF_RANGE = (IndexError, RuntimeError)  # one operator of eager raises either, by the shapes and the machine
Step = tuple[str, str, tuple[int, int, int]]


@dataclass(frozen=True)
class Program:
    """Steps as (kind, operator, integers that pick operands), the seed of the inputs, how it is compiled."""

    seed: int
    steps: tuple[Step, ...]
    dynamic: bool | None = None

    def __call__(self, x: Any, y: Any, at: Any, n: Any, f: Any) -> list[Any]:
        s = State([x, y], [at], [n], [f])
        for kind, name, numbers in self.steps:
            step(s, kind, name, numbers)
        return s.results


def program(seed: int, k: int) -> Program:
    """Program number `k` of a seed."""
    r = random.Random(f"checks-{seed}-{k}")
    steps: list[Step] = []
    for _ in range(r.randint(2, 7)):
        (kind,) = r.choices(list(WEIGHTS), list(WEIGHTS.values()))
        steps.append((kind, r.choice(list(KINDS[kind])), (r.randrange(64), r.randrange(64), r.randrange(64))))
    return Program(r.randrange(10_000), tuple(steps), r.choice((None, True)))


def outcome(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    try:
        return fn(*args)
    except Exception as cause:
        return cause


def settings() -> Any:
    names = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True, "specialize_float": False}
    return torch._dynamo.config.patch({**names, "recompile_limit": 32})


def disagreement(p: Program, **options: Any) -> str | None:
    """Return how the compiled program differs from eager, "" if it does not, None if torch does not trace it."""

    def fn(x: Any, y: Any, at: Any, n: Any, f: Any) -> list[Any]:
        return p(x, y, at, n, f)

    with settings():
        torch._dynamo.reset()
        run = compiled(fn, dynamic=p.dynamic, **{"cache_graphs": False, "repro": "never", **options})
        for call in range(CALLS):
            args = inputs(p.seed, call, p.dynamic is True)
            theirs, mine = twin(args), twin(args)
            want, got = outcome(fn, theirs), outcome(run, mine)
            if isinstance(got, Exception) and _untraced(got):
                return None if call == 0 else ""  # data of this call specialises what torch cannot
            text = _differ(got, want, mine, theirs)
            if text and (_plain_too(fn, p, call, got, mine)):
                text = ""
            if text:
                return f"call {call}: {text}"
    return ""


def _untraced(cause: Exception) -> bool:
    own = type(cause).__module__.startswith(("torch._dynamo", "torch.fx")) and "altbackend" not in str(cause)
    return own or is_untraced(cause)


def _differ(got: Any, want: Any, mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    if isinstance(got, Exception) or isinstance(want, Exception):
        if type(got) is type(want) or (isinstance(got, OUT_OF_RANGE) and isinstance(want, OUT_OF_RANGE)):
            return ""
        return f"{_said(got)} instead of {_said(want)}"
    pairs = zip((*got, *mine), (*want, *theirs), strict=True)
    return "; ".join(f"result {k}: {text}" for k, (g, w) in enumerate(pairs) if (text := _apart(g, w)))


def _said(x: Any) -> str:
    return f"{type(x).__name__}: {str(x)[:300]}" if isinstance(x, Exception) else f"{len(x)} results"


def _apart(got: Any, want: Any) -> str:
    if isinstance(want, float) and isinstance(got, (int, float)):
        limit = 1e-6 * abs(want) + ROUNDING
        return "" if got == want or abs(got - want) <= limit else f"{got} instead of {want}"
    return difference(got, want, None, 1e-5 if isinstance(want, torch.Tensor) else None, strides=False)


def _plain_too(fn: Callable[..., Any], p: Program, call: int, got: Any, mine: Sequence[Any]) -> bool:
    """Return whether aot_eager, without a backend's compiler, differs from eager in the same way."""
    torch._dynamo.reset()
    plain = torch.compile(fn, backend="aot_eager", dynamic=p.dynamic, fullgraph=True)
    held: list[Any] = []
    found: Any = None
    for k in range(call + 1):
        held = twin(inputs(p.seed, k, p.dynamic is True))
        found = outcome(plain, held)
    return not _differ(got, found, mine, held)


def shrink(p: Program, fails: Callable[[Program], bool]) -> Program:
    """Fewer steps that still fail."""
    k = 0
    while k < len(p.steps):
        shorter = replace(p, steps=p.steps[:k] + p.steps[k + 1 :])
        if shorter.steps and fails(shorter):
            p = shorter
        else:
            k += 1
    return p


def worker(seed: int, first: int, count: int, cached: bool) -> None:
    """Run programs and print a line of JSON before and after each; a child process, so that it may die.

    `cached`: with the cache of graphs; then a program that disagrees is not shrunk, since it may only do so warm.
    """
    warnings.simplefilter("ignore")
    faulthandler.enable()  # an abort at exit says what each thread did
    torch.set_num_threads(1)
    # graphs whose IR is verified come from no cache
    judge = functools.partial(disagreement, cache_graphs=cached, verify_ir=not cached)
    for k in range(first, first + count):
        print(json.dumps({"began": k}), flush=True)
        p = program(seed, k)
        with Verdicts("warm start", "cache") as seen:
            found = outcome(judge, (p,))
        text = repr(found) if isinstance(found, Exception) else found
        if text and not cached:
            p = shrink(p, lambda c: bool(outcome(judge, (c,))))
            text = outcome(judge, (p,)) or text
        hits = sum(verdict == "hit" for verdict, _ in seen.found)
        print(json.dumps({"ended": k, "text": f"{p}\n{text}" if text else text, "hits": hits}), flush=True)


@dataclass(frozen=True)
class Ended:
    """The outcome of one program: `text` is "" where it agrees, None where torch does not trace it."""

    number: int
    text: str | None
    hits: int = 0  # graphs that came from the cache


def batches(seed: int, first: int, count: int, env: dict[str, str], cached: bool = False) -> Iterator[Ended]:
    """Yield the outcome of each program. A child that dies is followed by another."""
    k, end = first, first + count
    while k < end:
        size = min(BATCH, end - k)
        job = ["--worker", *map(str, (seed, k, size, int(cached)))]
        command = [sys.executable, "-m", "test.fuzz_checks", *job]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=TIMEOUT, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield from (Ended(line["ended"], line["text"], line["hits"]) for line in lines if "ended" in line)
        last = max((line["began"] for line in lines if "began" in line), default=k)
        if done.returncode:
            said = f"the process ended with {done.returncode}: {program(seed, last)}\n{_report(done.stderr)}"
            yield Ended(last, said)
        k = last + 1


def cold_and_warm(seed: int, first: int, count: int, env: dict[str, str]) -> Iterator[Ended]:
    """Yield the outcome of each program, twice: in a child that fills the cache, and in one that finds it full."""
    for k in range(first, first + count, BATCH):
        with tempfile.TemporaryDirectory(prefix="altbackend-warm-") as folder:
            for _ in range(2):
                size = min(BATCH, first + count - k)
                yield from batches(seed, k, size, {**env, "ALTBACKEND_CACHE_DIR": folder}, True)


def _report(said: str) -> str:
    """Return what AddressSanitizer reports, or the last lines of what a process has said."""
    at = said.find("ERROR: AddressSanitizer")
    return said[at : at + 3000] if at >= 0 else said[-3000:]


def asan_environment(folder: Path) -> dict[str, str]:
    """Variables under which children build C++ with AddressSanitizer and run it; the script is put into `folder`."""
    script = folder / "g++-asan"
    script.write_text('#!/bin/sh\nunset LD_PRELOAD\nexec g++ -fsanitize=address -g -fno-omit-frame-pointer "$@"\n')
    script.chmod(0o755)
    names = ("libasan.so", "libstdc++.so")  # the second since the first looks for what throws when it starts
    found = [
        subprocess.run(["g++", f"-print-file-name={n}"], capture_output=True, text=True, check=True) for n in names
    ]
    return {
        "ALTBACKEND_CXX": str(script),
        "LD_PRELOAD": " ".join(f.stdout.strip() for f in found),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:detect_odr_violation=0:allocator_may_return_null=1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="number of the first program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--asan", action="store_true", help="under AddressSanitizer")
    parser.add_argument("--warm", action="store_true", help="again in another process, from the cache of graphs")
    parser.add_argument("--worker", type=int, nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        seed, first, count, cached = args.worker
        worker(seed, first, count, bool(cached))
        return 0
    failures, untraced, hits, start = 0, 0, 0, time.monotonic()
    run = cold_and_warm if args.warm else batches
    with tempfile.TemporaryDirectory(prefix="altbackend-fuzz-") as folder:
        env = {**os.environ, "ALTBACKEND_CACHE_DIR": folder, **(asan_environment(Path(folder)) if args.asan else {})}
        for ended in run(args.seed, args.first, args.programs, env):
            failures += bool(ended.text)
            untraced += ended.text is None
            hits += ended.hits
            if ended.text:
                print(f"program {ended.number} of seed {args.seed}: {ended.text}\n", flush=True)
            if (ended.number + 1) % 100 == 0:
                print(f"{ended.number + 1 - args.first} programs, {time.monotonic() - start:.0f} s", flush=True)
    runs = args.programs * (2 if args.warm else 1)
    said = f"{runs - untraced} runs of {args.programs} programs of seed {args.seed} from {args.first}"
    print(f"{said}: {failures} disagree; {untraced} not traced by torch; {hits} graphs from the cache")
    if args.warm and not hits:
        print("no graph came from the cache: the second runs have tested nothing")
        return 1
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
