"""Random programs of views and writes of inputs: eager = compiled cold = after a reset = from the cache elsewhere.

    python -m test.fuzz_views --programs 300 --seed 0

Programs are those of `test.fuzz`, a list of steps that name an operator and carry free integers, of other operators:
views, writes through them, little arithmetic. Inputs are views into larger storages, which begin elsewhere at each
call, may overlap at some calls and not at others, and may have negative or conjugate bits. What a program shows is
compared as `test.ways` notes it: values, geometry, who shares memory with whom, all memory behind inputs, gradients.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from test import ways
from test.fuzz import Step
from test.ways import Program

T = torch.Tensor
HERE = "test.fuzz_views"
ROOM = 160  # elements of the storage behind an input
CALLS = 4
SHAPES = ((12,), (6,), (3, 4), (2, 6), (4, 4), (2, 3, 2), (1, 5), (4,))
FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.float32, torch.int32, torch.int64, torch.complex64, torch.complex64)


@dataclass(frozen=True)
class Given:
    """An input. `layout`: dense, transposed, with gaps, or with steps. `places`: per call where it begins.

    `bits`: per call whether it is negated (conjugated, if complex). `with_`: the input whose storage it shares in the
    calls in which its place there is not -1. `grad`: a view of what is computed from a leaf.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    places: tuple[int, ...]
    bits: tuple[bool, ...]
    with_: int = -1
    shared: tuple[int, ...] = (-1,) * CALLS
    grad: bool = False


@dataclass(frozen=True)
class Case:
    """`results`: numbers of values, inputs first, that the program returns."""

    inputs: tuple[Given, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    grad: bool = False
    dynamic: bool = False

    def __str__(self) -> str:
        lines = [f"Case(grad={self.grad}, dynamic={self.dynamic}, results={self.results}, inputs=("]
        lines += [f"    {g}," for g in self.inputs] + ["), steps=("]
        return "\n".join([*lines, *(f"    {s}," for s in self.steps), "))"])


# --- operators -------------------------------------------------------------------------------------------------------


def _dim(x: T, n: int) -> int:
    return n % max(x.dim(), 1)


def _size(x: T, n: int) -> int:
    return x.shape[_dim(x, n)]


def _slice(x: T, n: Sequence[int]) -> T:
    begin = n[1] % max(_size(x, n[0]), 1)
    return x[(slice(None),) * _dim(x, n[0]) + (slice(begin, None, 1 + n[2] % 2),)]


def _narrow(x: T, n: Sequence[int]) -> T:
    size = _size(x, n[0])
    begin = n[1] % size
    return x.narrow(_dim(x, n[0]), begin, 1 + n[2] % (size - begin))


def _reinterpreted(x: T, n: Sequence[int]) -> T:
    wanted = {1: (torch.uint8,), 2: (torch.int16, torch.float16), 4: (torch.int32, torch.float32), 8: (torch.int64,)}
    choices = [torch.uint8, *wanted.get(x.dtype.itemsize, ())]
    return x.view(choices[n[0] % len(choices)])


def _real(x: T, n: Sequence[int]) -> T:
    return (torch.view_as_real(x), x.real, x.imag)[n[0] % 3] if x.is_complex() else x[..., :1]


def _window(x: T, n: Sequence[int]) -> T:
    """Of elements that the tensor itself has, where it is dense."""
    return x.as_strided((2, 2), (1, 1)) if x.numel() >= 3 and x.is_contiguous() else x.unsqueeze(0)


def _unfold(x: T, n: Sequence[int]) -> T:
    return x.unfold(_dim(x, n[0]), 1 + n[1] % min(_size(x, n[0]), 3), 1 + n[2] % 2)


VIEWS: dict[str, Callable[[T, Sequence[int]], T]] = {
    "flat": lambda x, n: x.view(-1),
    "two rows": lambda x, n: x.view(2, -1),
    "slice": _slice,
    "narrow": _narrow,
    "transpose": lambda x, n: x.transpose(_dim(x, n[0]), _dim(x, n[1])),
    "select": lambda x, n: x.select(_dim(x, n[0]), n[1] % _size(x, n[0])),
    "unsqueeze": lambda x, n: x.unsqueeze(n[0] % (x.dim() + 1)),
    "squeeze": lambda x, n: x.squeeze(),
    "expand": lambda x, n: x.unsqueeze(0).expand(2, *x.shape),
    "diagonal": lambda x, n: x.diagonal(),
    "unfold": _unfold,
    "window": _window,
    "dtype": _reinterpreted,
    "conj": lambda x, n: x.conj(),
    "negated": lambda x, n: torch._neg_view(x),
    "real": _real,
    "detach": lambda x, n: x.detach(),
    "chunk": lambda x, n: x.chunk(2, _dim(x, n[0]))[0],
    "split": lambda x, n: x.split(2, _dim(x, n[0]))[-1],
    "unbind": lambda x, n: x.unbind(_dim(x, n[0]))[0],
    "permute": lambda x, n: x.permute(*reversed(range(x.dim()))),
}


def _set(x: T, n: Sequence[int]) -> T:
    x[n[0] % x.shape[0]] = n[1] % 5
    return x


def _set_slice(x: T, n: Sequence[int]) -> T:
    x[n[0] % x.shape[0] :] = n[1] % 5
    return x


def _index_copy(x: T, n: Sequence[int]) -> T:
    return x.index_copy_(0, torch.tensor([n[0] % x.shape[0]]), x[-1:].clone())


def _without_gradient(x: T, n: Sequence[int]) -> T:
    with torch.no_grad():
        x.mul_(2)
    return x


WRITES: dict[str, Callable[[T, Sequence[int]], T]] = {
    "add_": lambda x, n: x.add_(1 + n[0] % 3),
    "mul_": lambda x, n: x.mul_(2),
    "fill_": lambda x, n: x.fill_(n[0] % 7),
    "zero_": lambda x, n: x.zero_(),
    "neg_": lambda x, n: x.neg_(),
    "clamp_": lambda x, n: x.clamp_(min=0),
    "set": _set,
    "set slice": _set_slice,
    "index_copy_": _index_copy,
    "masked_fill_": lambda x, n: x.masked_fill_(x.real < 1, 3),
    "without gradient": _without_gradient,
}
VALUES: dict[str, Callable[[T, Sequence[int]], T]] = {
    "times": lambda x, n: x * 2,
    "plus": lambda x, n: x + 1,
    "clone": lambda x, n: x.clone(),
    "square": lambda x, n: x * x,
    "flip": lambda x, n: x.flip(0),
    "sum": lambda x, n: x.sum(),
    "contiguous": lambda x, n: x.contiguous(),
    "reshape": lambda x, n: x.reshape(-1),
}
ONE = VIEWS | WRITES | VALUES
TWO: dict[str, Callable[[T, T], T]] = {
    "add": lambda x, y: x + y,
    "add_ other": lambda x, y: x.add_(y),
    "copy_": lambda x, y: x.copy_(y),
    "mul_ other": lambda x, y: x.mul_(y),
}
NAMES = [*VIEWS] * 3 + [*WRITES] * 3 + [*VALUES] + [*TWO] * 2


def function(case: Case) -> Callable[..., list[T]]:
    def run(*inputs: T) -> list[T]:
        values = list(inputs)
        for s in case.steps:
            x = values[s.n[3] % len(values)]
            if s.op in TWO:
                values.append(TWO[s.op](x, _like(values, x, s.n[0])))
            else:
                values.append(ONE[s.op](x, s.n))
        return [values[k % len(values)] for k in case.results]

    return run


def _like(values: Sequence[T], x: T, n: int) -> T:
    """One of the values of the shape and dtype of `x`; itself if there is no other."""
    found = [y for y in values if y.shape == x.shape and y.dtype == x.dtype]
    return found[n % len(found)]


# --- inputs ----------------------------------------------------------------------------------------------------------


def _numbers(seed: int, dtype: torch.dtype) -> T:
    made = torch.randint(-6, 7, (ROOM,), generator=torch.Generator().manual_seed(seed))
    return torch.complex(made.float(), made.flip(0).float()) if dtype.is_complex else made.to(dtype)


def _laid(storage: T, g: Given, place: int) -> T:
    if g.layout == "gaps":
        strides: list[int] = []
        step = 1
        for n in reversed(g.shape):
            strides.insert(0, step)
            step *= n + 1
        return storage.as_strided(g.shape, strides, place)
    if g.layout == "steps":
        dense = torch.empty(g.shape).stride()
        return storage.as_strided(g.shape, [2 * s for s in dense], place)
    if g.layout == "transposed":
        return (
            storage[place : place + torch.Size(g.shape).numel()]
            .view(*reversed(g.shape))
            .permute(*reversed(range(len(g.shape))))
        )
    return storage[place : place + torch.Size(g.shape).numel()].view(g.shape)


def inputs_of(case: Case, call: int) -> list[T]:
    storages: list[T] = []
    out: list[T] = []
    for k, g in enumerate(case.inputs):
        shares = g.with_ >= 0 and g.shared[call] >= 0 and case.inputs[g.with_].dtype == g.dtype
        leaf = _numbers(10 * k + call, g.dtype).requires_grad_(case.grad and g.grad)
        storage = storages[g.with_] if shares else leaf * 1 if leaf.requires_grad else leaf
        place = case.inputs[g.with_].places[call] + g.shared[call] if shares else g.places[call]
        x = _laid(storage, g, place)
        if g.bits[call] and not shares:
            x = x.conj() if g.dtype.is_complex else torch._neg_view(x) if g.dtype.is_floating_point else x
        if x.requires_grad:
            x.leaf = out[g.with_].leaf if shares else leaf  # type: ignore[attr-defined]
        storages.append(storage)
        out.append(x)
    return out


# --- programs --------------------------------------------------------------------------------------------------------


def random_case(r: random.Random) -> Case:
    grad = r.random() < 0.4
    inputs: list[Given] = []
    for k in range(r.randint(1, 3)):
        dtype = r.choice(FLOATS[:3]) if grad else r.choice(DTYPES)
        varies = r.random() < 0.15
        bit = not varies and r.random() < 0.15
        g = Given(
            r.choice(SHAPES),
            dtype,
            r.choice(("dense", "dense", "transposed", "gaps", "steps")),
            tuple(r.choice((0, 1, 4, 7, 30)) for _ in range(CALLS)),
            tuple(r.random() < 0.5 if varies else bit for _ in range(CALLS)),
            grad=grad and r.random() < 0.7,
        )
        if k and r.random() < 0.4:
            other = r.randrange(k)
            if inputs[other].with_ < 0:
                shared = tuple(r.choice((-1, 0, 1, 3, 40)) for _ in range(CALLS))
                g = replace(g, dtype=inputs[other].dtype, with_=other, shared=shared, bits=(False,) * CALLS)
        inputs.append(g)
    steps = tuple(Step(r.choice(NAMES), tuple(r.randrange(64) for _ in range(4))) for _ in range(r.randint(2, 7)))  # type: ignore[arg-type]
    results = tuple(r.randrange(12) for _ in range(r.randint(1, 4)))
    return Case(tuple(inputs), steps, results, grad, r.random() < 0.15)


def case_of(seed: int, k: int) -> Case:
    return random_case(random.Random(f"views-{seed}-{k}"))


def program_of(name: str, case: Case) -> Program:
    calls = tuple((lambda c=c: inputs_of(case, c)) for c in range(CALLS))
    options = {"strict": False, "numerics": "eager"}
    return Program(name, function(case), calls, case.grad, None if case.dynamic else False, options)


def programs(seed: int, first: int, count: int) -> list[Program]:
    """Those of a seed that eager takes, at the first call at least."""
    found = [program_of(str(k), case_of(seed, k)) for k in range(first, first + count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [p for p in found if "error" not in ways.notes(replace(p, calls=p.calls[:1]), p.fn)[0]]


def by_aot_eager(program: Program) -> str:
    """Return how AOTAutograd alone differs from eager: what it does wrong is not looked for here."""
    torch._dynamo.reset()
    run = torch.compile(program.fn, backend="aot_eager", dynamic=program.dynamic)
    return ways.disagreement(ways.notes(program, run), ways.notes(program, program.fn))


def wrong_here(case: Case) -> str:
    """Return what is wrong with a program in this process, compiled with an empty cache and then from it."""
    program, folder = program_of("", case), Path(tempfile.mkdtemp())
    try:
        want = ways.notes(program, program.fn)
        if "error" in want[0]:
            return ""
        for way in ways.WAYS[:2]:
            if text := ways.disagreement(ways.notes(program, ways.compiled(program, folder)), want):
                return f"{way}: {text}"
        return ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shrunk(case: Case) -> Case:
    """Fewer steps, results and inputs that are still wrong and that AOTAutograd has right."""

    def fails(c: Case) -> bool:
        return bool(wrong_here(c)) and not by_aot_eager(program_of("", c))

    changed = fails(case)
    while changed:
        changed = False
        smaller = [replace(case, steps=case.steps[:k] + case.steps[k + 1 :]) for k in range(len(case.steps))]
        smaller += [replace(case, results=case.results[:k] + case.results[k + 1 :]) for k in range(len(case.results))]
        for c in smaller:
            if c.results and fails(c):
                case, changed = c, True
                break
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="number of the first program")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=25, help="programs of one child process")
    parser.add_argument("--shrink", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    failures = taken = theirs = 0
    start = time.monotonic()
    for first in range(args.first, args.first + args.programs, args.batch):
        where = f"programs({args.seed},{first},{min(args.batch, args.first + args.programs - first)})"
        with tempfile.TemporaryDirectory(prefix="altbackend-views-") as folder:
            noted = ways.everywhere(f"{HERE}:{where}", Path(folder))
        for p in ways.programs_of(f"{HERE}:{where}"):
            taken += 1
            text = noted.wrong(p)
            if text and by_aot_eager(p):
                theirs += 1
            elif text:
                failures += 1
                case = case_of(args.seed, int(p.name))
                print(
                    f"program {p.name} of seed {args.seed}: {shrunk(case) if args.shrink else case}\n{text}\n",
                    flush=True,
                )
        print(f"{first + args.batch - args.first} programs, {time.monotonic() - start:.0f} s", flush=True)
    print(
        f"{taken} programs of seed {args.seed}: {failures} differ; {theirs} more that AOTAutograd does differently too"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
