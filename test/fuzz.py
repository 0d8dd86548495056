"""Random small programs: eager = interpreter of the loop IR = compiled C++, forward and backward.

    python -m test.fuzz --programs 500 --seed 0
    python -m test.fuzz --programs 500 --seed 0 --warm

A program is a list of steps, each an operator name with integer arguments that pick its operands and parameters,
so that it prints, replays and shrinks. Every step appends one tensor; operands are picked among those that fit.
Program `k` of a seed is the same whatever ran before it, so `--first K` goes on where a run ended. Most programs are
recorded as a flat graph, which Dynamo captures in a third of the time; every eighth is captured as it is and compiled
for any size, then called with other sizes. With `--triton N` every N-th also runs its Triton kernels, interpreted.
With `--warm` all programs run once more in other processes, from the graphs that the first ones have cached.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from altbackend import backend
from altbackend.config.options import Config
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.ir import interp
from altbackend.ir.ops import LOW_PRECISION
from altbackend.ir.verify import verify
from altbackend.lowering.graph import lower_graph
from altbackend.pipeline import compile_graph
from benchmarks.opinfo import is_untraced
from test import fuzz_operators, triton_run
from test.compare import as_list, compiled, difference, twin, wide
from test.fuzz_operators import OPERATORS, OTHER_SIZES, Tensor, make_input
from test.recorded import record

SMALL = 4096  # elements that a step's result may have
SHARING = frozenset({"compiled", "other sizes"})  # ways whose results should share memory as those of eager do
NEIGHBOURS = 6
DYNAMIC = 8  # every so many programs are compiled for any size
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)  # of eager, for a combination that it does not take
Run = Callable[..., Any]


@dataclass(frozen=True)
class Step:
    """`op` of the table of operators, with as many free integers as any operator needs."""

    op: str
    n: tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """Seeds of the inputs (shape, dtype and layout follow from each), steps, how many inputs are mutated at the end.

    `numerics`: the option; "fast" keeps 16-bit chains in float32, so there each 16-bit result is widened at once, and
    comparisons see what eager's do. `grads`: gradients of the float inputs are compared too.
    """

    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    mutate: int = 0
    numerics: str = "eager"
    grads: bool = False

    def __str__(self) -> str:
        more = f", numerics={self.numerics!r}, grads={self.grads}"
        lines = [f"Case(inputs={self.inputs}, mutate={self.mutate}{more}, steps=("]
        return "\n".join([*lines, *(f"    {s}," for s in self.steps), "))"])


def function(case: Case, jitter: int | None = None) -> Callable[..., list[Tensor]]:
    """The program as a torch function; its results are those of every step.

    `jitter`: a seed by which every float is moved by up to four roundings, as another order of additions may.
    """
    generator = None if jitter is None else torch.Generator().manual_seed(jitter)

    def kept(x: Tensor) -> Tensor:
        x = x if x.numel() <= SMALL else x.flatten()[:8]
        if generator is not None and x.is_floating_point():
            moved = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 8 - 4
            x = (x.double() * (1 + moved * torch.finfo(x.dtype).eps)).to(x.dtype)
        return x.float() if case.numerics == "fast" and x.dtype in LOW_PRECISION else x

    def run(*inputs: Tensor) -> list[Tensor]:
        made = [kept(x) for x in inputs]
        for s in case.steps:
            made.append(kept(OPERATORS[s.op](made, s.n)))
        results = made[len(inputs) :]
        for k in range(min(case.mutate, len(inputs))):
            if inputs[k].dim():
                inputs[k].copy_(inputs[k].flip(0))
        return results

    return run


def random_case(r: random.Random) -> Case:
    names = list(OPERATORS)
    steps = [Step(r.choice(names), tuple(r.randrange(64) for _ in range(4))) for _ in range(r.randint(2, 9))]  # type: ignore[arg-type]
    inputs = tuple(r.randrange(10_000) for _ in range(r.randint(1, 3)))
    grads = r.random() < 0.3
    return Case(
        inputs, tuple(steps), 0 if grads else r.choice((0, 0, 0, 1, 2)), r.choice(("eager", "fast", "fast")), grads
    )


def program(seed: int, k: int) -> Case:
    """Program number `k` of a seed."""
    return random_case(random.Random(f"{seed}-{k}"))


def results(run: Run, inputs: list[Any], grads: bool) -> list[Any]:
    """Return what a program gives, and with `grads` the gradients of its float inputs for fixed cotangents."""
    if not grads:
        return as_list(run(*inputs))
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    outs = as_list(run(*inputs))
    live = [o for o in outs if o.requires_grad]
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in live]
    found = torch.autograd.grad(live, leaves, weights, allow_unused=True) if live and leaves else ()
    return [*(o.detach() for o in outs), *found]


class Interpreted:
    """Stands in for the compilation of graphs: each has its compiled call, and the interpreter when `using` it."""

    def __init__(self) -> None:
        self.using = False

    def compile_graph(self, gm: torch.fx.GraphModule, cfg: Config, trace: Trace, job: Any, *rest: Any) -> Run:
        lowered, constants = lower_graph(torch.fx.GraphModule(gm, _copied(gm.graph)), cfg)
        verify(lowered)
        call = backend_compile(gm, cfg, trace, job, *rest)

        def run(args: list[Any]) -> Any:
            if not self.using:
                return call(args)
            held = list(args)
            args.clear()
            return interp.run(lowered, held, constants)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


backend_compile = compile_graph


def _copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    fresh = torch.fx.Graph()
    out = fresh.graph_copy(graph, {})
    fresh.output(out)
    fresh.eliminate_dead_code()
    return fresh


def _tolerance(x: Any) -> float | None:
    # a chain of several low-precision steps: eager rounds after each, kernels keep float32
    low = isinstance(x, Tensor) and x.dtype in LOW_PRECISION
    return 0.05 if low else 2e-5 if isinstance(x, Tensor) and x.dtype == torch.float32 else None


@dataclass(frozen=True)
class Way:
    """One way to run a program. `flat`: recorded first. `dynamic`: for any size. `triton`: by Triton kernels."""

    flat: bool = True
    dynamic: bool = False
    triton: bool = False
    interpret: bool = True


def disagreement(case: Case, options: dict[str, Any] | None = None, way: Way = Way()) -> str:
    """Return what the interpreter or the compiled program does differently from eager, or ""."""
    inputs = [make_input(s) for s in case.inputs]
    try:
        want = results(function(case), twin(inputs), case.grads)
        fn = record(function(case), _leaves(case, inputs)) if way.flat else function(case)
    except REFUSALS:
        return ""
    del want
    torch._dynamo.reset()
    seen = Interpreted()
    cfg = {"numerics": case.numerics, "cache_graphs": False, "repro": "never", **(options or {})}
    # sizes are marked: with dynamic=True Dynamo takes the steps' numbers for symbols too
    run = compiled(fn, dynamic=None if way.dynamic else False, **cfg)
    wrong: list[str] = []
    with patch.object(backend, "compile_graph", seen.compile_graph if way.interpret else backend_compile):
        wrong += _compare("compiled", case, run, inputs, way.dynamic)
        others = [make_input(s, OTHER_SIZES) for s in case.inputs]
        if way.dynamic:
            wrong += _compare("other sizes", case, run, others, True)
        seen.using = way.interpret
        if way.interpret:
            wrong += _compare("interpreter", case, run, others if way.dynamic else inputs, way.dynamic)
    if way.triton:
        torch._dynamo.reset()
        run = triton_run.compiled(fn, cfg=resolve(None, {"numerics": case.numerics}), capabilities=(), host=True)
        wrong += _compare("triton", replace(case, grads=False), run, inputs)
    return "\n".join(wrong)


def _leaves(case: Case, inputs: Sequence[Tensor]) -> list[Any]:
    return [x.requires_grad_() if case.grads and x.is_floating_point() else x for x in twin(inputs)]


def _compare(name: str, case: Case, run: Run, inputs: Sequence[Tensor], dynamic: bool = False) -> list[str]:
    """Return how a way of running a program differs from eager on some inputs. `dynamic`: their sizes are symbols."""
    mine, theirs = twin(inputs), twin(inputs)
    try:
        want = results(function(case), theirs, case.grads)
    except REFUSALS:  # eager itself refuses these sizes
        return []
    for x in mine if dynamic else ():
        torch._dynamo.maybe_mark_dynamic(x, [d for d, n in enumerate(x.shape) if n > 1])
    try:
        got = results(run, mine, case.grads)
    except Exception as cause:  # whatever is raised is what eager does differently
        if dynamic and is_untraced(cause):
            return []
        return [f"{name}: {type(cause).__name__}: {str(cause)[:800]}"]
    if len(got) != len(want):  # Dynamo has a step take another operand; then it does for aot_eager too
        plain = _by_aot_eager(case, inputs, dynamic, twin(inputs))
        if len(plain) == len(got) and not any(map(_differs, got, plain)):
            return []
        return [f"{name}: {len(got)} results and gradients for {len(want)} of eager and {len(plain)} of aot_eager"]
    labels = [f"result of step {k} ({s.op})" for k, s in enumerate(case.steps)]
    labels += [f"gradient {k}" for k in range(len(want) - len(labels))]
    far = {k: text for k, (g, w) in enumerate(zip(got, want, strict=True)) if (text := _differs(g, w))}
    if far:
        moved = [results(function(case, jitter), twin(inputs), case.grads) for jitter in range(NEIGHBOURS)]
        exact = _in_float64(case, inputs)
        moved += [exact] if len(exact) == len(want) else []
        far = {k: text for k, text in far.items() if not _unsteady(got[k], want[k], [other[k] for other in moved])}
    apart = sorted(_sharing(want, theirs, case) ^ _sharing(got, mine, case)) if name in SHARING else []
    if far or apart:
        held = twin(inputs)
        plain = _by_aot_eager(case, inputs, dynamic, held)
        far = {k: text for k, text in far.items() if len(plain) != len(want) or _differs(got[k], plain[k])}
        apart = [
            pair for pair in apart if (pair in _sharing(plain, held, case)) is (pair in _sharing(want, theirs, case))
        ]
    wrong = [f"{name}: {labels[k]}: {text}" for k, text in far.items()]
    wrong += [f"{name}: one only of eager and this shares memory between {a} and {b}" for a, b in apart]
    written = enumerate(zip(mine, theirs, strict=True))
    return wrong + [f"{name}: input {k} afterwards: {text}" for k, (g, w) in written if (text := _differs(g, w))]


def _sharing(found: Sequence[Any], inputs: Sequence[Tensor], case: Case) -> set[tuple[str, str]]:
    """Return which results of steps share memory with one another and with inputs."""
    named = [(f"input {k}", x) for k, x in enumerate(inputs)]
    named += [(f"step {k}", x) for k, x in enumerate(found[: len(case.steps)]) if isinstance(x, Tensor)]
    held = [(label, x.untyped_storage().data_ptr()) for label, x in named if x.numel()]
    return {(a, b) for k, (b, y) in enumerate(held) for a, x in held[:k] if x == y and b.startswith("step")}


def _by_aot_eager(case: Case, inputs: Sequence[Tensor], dynamic: bool, last: Sequence[Tensor]) -> list[Any]:
    """Results without a backend's compiler: what differs from eager here, Dynamo or AOTAutograd does differently.

    `last`: copies of the inputs, which the program takes.
    """
    torch._dynamo.reset()
    run = torch.compile(function(case), backend="aot_eager", dynamic=None if dynamic else False)
    first = [[make_input(s) for s in case.inputs]] if dynamic else []  # traced with these sizes, as ours was
    for held in (*map(twin, first), list(last)):
        for x in held if dynamic else ():
            torch._dynamo.maybe_mark_dynamic(x, [d for d, n in enumerate(x.shape) if n > 1])
        try:
            out = results(run, held, case.grads)
        except REFUSALS:
            return []
    return out


def _differs(got: Any, want: Any) -> str:
    got, want = (x.detach() if isinstance(x, Tensor) else x for x in (got, want))
    if got is None or want is None:
        return "" if got is want else f"{_kind(got)} instead of {_kind(want)}"
    return difference(got, want, None, _tolerance(want), strides=False)


def _kind(x: Any) -> str:
    return "nothing" if x is None else f"a tensor of {tuple(x.shape)}"


def _unsteady(got: Any, want: Any, moved: Sequence[Any]) -> bool:
    """Return whether a result is as far from eager's as roundings move eager's own.

    Such are sums of terms that cancel, and close comparisons.

    `moved`: eager's results where every step was moved by some roundings, and where there were next to none.
    """
    if not (isinstance(want, Tensor) and isinstance(got, Tensor)) or (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    distances = [_apart(m, want) for m in moved if m.shape == want.shape]
    return _apart(got, want) <= 4 * max(distances)


def _in_float64(case: Case, inputs: Sequence[Tensor]) -> list[Any]:
    """Eager's results from the same inputs in float64; empty where it refuses them."""
    with patch.object(fuzz_operators, "_floating", lambda x: x.double()):
        try:
            return results(function(case), wide(inputs), case.grads)
        except REFUSALS:
            return []


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference of two elements; infinite where only one of them is finite."""
    x, y = a.detach().double(), b.detach().double()
    same = (x == y) | (x.isnan() & y.isnan())
    return float((x - y).abs().masked_fill(same, 0).nan_to_num(nan=float("inf")).max()) if x.numel() else 0.0


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Fewer steps and inputs that still fail, by leaving one out at a time."""
    changed = True
    while changed:
        changed = False
        smaller = [replace(case, steps=case.steps[:k] + case.steps[k + 1 :]) for k in range(len(case.steps))]
        smaller += [
            replace(case, inputs=case.inputs[:k] + case.inputs[k + 1 :], mutate=0) for k in range(len(case.inputs))
        ]
        smaller += [replace(case, grads=False)] if case.grads else []
        for c in smaller:
            if c.steps and c.inputs and fails(c):
                case, changed = c, True
                break
    return case


def way_of(k: int, triton: int = 0) -> Way:
    dynamic = k % DYNAMIC == DYNAMIC - 1
    return Way(flat=not dynamic, dynamic=dynamic, triton=bool(triton) and k % triton == 0)


def refused(case: Case) -> bool:
    """Return whether eager itself does not take the program."""
    try:
        results(function(case), [make_input(s) for s in case.inputs], case.grads)
    except REFUSALS:
        return True
    return False


def trial(seed: int, k: int, triton: int, shrinking: bool, folder: str, cached: bool = False) -> str | None:
    """The report on program `k`: itself, shrunk, and how it differs; "" if all ways agree, None if eager refuses it.

    `cached`: graphs come from the cache in `folder` where it holds them; the interpreter then has no part.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case, way = program(seed, k), way_of(k, triton)
    options: dict[str, Any] = {"cache_dir": folder, "verify_ir": not cached, "cache_graphs": cached}
    if cached:
        way = replace(way, interpret=False)
    if refused(case):
        return None
    text = disagreement(case, options, way)
    if text and shrinking:
        case = shrink(case, lambda c: bool(disagreement(c, options, way)))
        text = disagreement(case, options, way) or text
    return f"program {k} of seed {seed}, {way}: {case}\n{text}\n" if text else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="number of the first program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--triton", type=int, default=0, metavar="N", help="every N-th program on the GPU's path too")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--warm", action="store_true", help="again in other processes, from the cache of graphs")
    args = parser.parse_args()
    failures, refusals, start = 0, 0, time.monotonic()
    numbers = range(args.first, args.first + args.programs)
    rounds = 2 if args.warm else 1
    with tempfile.TemporaryDirectory(prefix="altbackend-fuzz-") as folder:
        same = [args.seed, args.triton, not (args.no_shrink or args.warm), folder, args.warm]
        for _ in range(rounds):
            with ProcessPoolExecutor(args.jobs) as pool:
                reports = pool.map(_trial, [(same[0], k, *same[1:]) for k in numbers])
                for k, report in zip(numbers, reports, strict=True):
                    failures += bool(report)
                    refusals += report is None
                    if report or (k + 1) % 100 == 0:
                        print(report or f"{k + 1 - args.first} programs, {time.monotonic() - start:.0f} s", flush=True)
    taken = rounds * args.programs - refusals
    print(f"{taken} programs of seed {args.seed} from {args.first}, {failures} disagree; {refusals} that eager refuses")
    return 1 if failures else 0


def _trial(job: tuple[Any, ...]) -> str | None:
    return trial(*job)


if __name__ == "__main__":
    raise SystemExit(main())
