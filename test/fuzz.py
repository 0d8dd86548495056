"""Random small programs: eager = interpreter of the loop IR = compiled C++.

    python -m test.fuzz --programs 500 --seed 0

A program is a list of steps, each an operator name with integer arguments that pick its operands and parameters,
so that it prints, replays and shrinks. Every step appends one tensor; operands are picked among those that fit.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from altbackend.config import resolve
from altbackend.ir import interp
from altbackend.ir.verify import verify
from altbackend.lowering.graph import lower_graph
from test.compare import as_list, compiled, difference, twin
from test.graphs import backend

Tensor = torch.Tensor
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
SIZES = (1, 2, 3, 4, 6)
SMALL = 4096  # elements that a step's result may have


@dataclass(frozen=True)
class Step:
    """`op` of the table below, with as many free integers as any operator needs."""

    op: str
    n: tuple[int, int, int, int]


@dataclass(frozen=True)
class Case:
    """Seeds of the inputs (shape, dtype and layout follow from each), steps, how many inputs are mutated at the end."""

    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    mutate: int = 0

    def __str__(self) -> str:
        lines = [f"Case(inputs={self.inputs}, mutate={self.mutate}, steps=("]
        return "\n".join([*lines, *(f"    {s}," for s in self.steps), "))"])


def make_input(seed: int) -> Tensor:
    """A tensor whose shape, dtype, layout and contents follow from the seed; values stay small."""
    r = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    shape = [r.choice(SIZES) for _ in range(r.choice((0, 1, 2, 2, 3, 3)))]
    dtype = r.choice(DTYPES)
    order = list(range(len(shape)))
    if r.random() < 0.3:
        r.shuffle(order)
    stored = [shape[k] for k in order]
    step = 2 if shape and r.random() < 0.2 else 1
    if step == 2:
        stored[-1] *= 2
    x = torch.randint(-4, 5, stored, generator=g) if not dtype.is_floating_point else torch.randn(stored, generator=g)
    x = (x.abs() if dtype == torch.uint8 else x).to(dtype)
    if step == 2:
        x = x[..., ::2]
    return x.permute([order.index(k) for k in range(len(shape))])


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


def _pair(ts: Sequence[Tensor], n: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A tensor and another that broadcasts with it (at worst its own flip)."""
    a = _pick(ts, n[0])
    fits = [t for t in ts if _broadcasts(a, t)]
    return a, _pick(fits, n[1])


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], b.shape[::-1], strict=False))


def _pick(ts: Sequence[Tensor], n: int) -> Tensor:
    return ts[n % len(ts)]


def _ranked(ts: Sequence[Tensor], n: int) -> Tensor:
    return _pick([t for t in ts if t.dim() and t.numel()] or [torch.arange(6.0).view(2, 3)], n)


def _signed(x: Tensor) -> Tensor:
    return x.int() if x.dtype in (torch.bool, torch.uint8) else x


def _binary(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda ts, n: fn(*_pair(ts, n))


def _unary(fn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda ts, n: fn(_pick(ts, n[0]))


def _along(fn: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def apply(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
        x = _ranked(ts, n[0])
        return fn(x, n[1] % x.dim())

    return apply


def _slice(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    d = n[1] % x.dim()
    at = n[2] % x.shape[d]
    return x[(slice(None),) * d + (slice(at, at + 1 + n[3] % 4, 1 + n[3] % 2),)]


def _reshape(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    divisors = [k for k in range(1, x.numel() + 1) if x.numel() % k == 0]
    k = divisors[n[1] % len(divisors)]
    return x.reshape(k, -1) if n[2] % 2 else x.reshape(-1, 1, k)


def _permute(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _pick(ts, n[0])
    left, order = list(range(x.dim())), []
    while left:
        order.append(left.pop(n[1] % len(left)))
    return x.permute(order)


def _cat(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    d = n[1] % x.dim()
    fits = [t for t in ts if t.dim() == x.dim() and all(t.shape[k] == x.shape[k] for k in range(x.dim()) if k != d)]
    return torch.cat([x, _pick(fits or [x], n[2]), x][: 2 + n[3] % 2], d)


def _index(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    fits = [t for t in ts if t.dtype == torch.int64 and t.numel() and t.dim()]
    at = _pick(fits, n[2]) if fits else torch.arange(4)
    return x[at % x.shape[0]] if n[3] % 2 else x[..., at % x.shape[-1]]


def _gather(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    d = n[1] % x.dim()
    return x.gather(
        d, (torch.arange(x.shape[d]).flip(0)).view([-1 if k == d else 1 for k in range(x.dim())]).expand_as(x)
    )


def _put(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0])
    at = torch.arange(1 + n[1] % x.shape[0])
    return x.index_put((at,), x[:1] + x[:1], accumulate=bool(n[2] % 2) and x.dtype != torch.bool)


def _set_slice(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _ranked(ts, n[0]).clone()
    at = n[1] % x.shape[-1]
    x[..., at:] = x[..., : x.shape[-1] - at] if n[2] % 2 else 2
    return x


def _add_to_slice(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _signed(_ranked(ts, n[0])).clone()
    x[n[1] % x.shape[0]] += 1
    x.t().mul_(2) if x.dim() == 2 else x.neg_()
    return x


def _cast(ts: Sequence[Tensor], n: tuple[int, ...]) -> Tensor:
    x = _pick(ts, n[0])
    x = x.clamp(0, 100) if x.dtype != torch.bool else x
    return x.nan_to_num(nan=1.0).to(_pick(DTYPES, n[1])) if x.is_floating_point() else x.to(_pick(DTYPES, n[1]))  # type: ignore[type-var]


OPERATORS: dict[str, Callable[[Sequence[Tensor], tuple[int, ...]], Tensor]] = {
    "add": _binary(lambda a, b: a + b),
    "sub": _binary(lambda a, b: _signed(a) - _signed(b)),
    "mul": _binary(torch.mul),
    "div": _binary(lambda a, b: a / (b.abs() + 1 if b.dtype != torch.bool else b + 1)),
    "floor": _binary(lambda a, b: _signed(a) // (_signed(b).abs() + 1)),
    "mod": _binary(lambda a, b: _signed(a) % (_signed(b).abs() + 2)),
    "maximum": _binary(torch.maximum),
    "less": _binary(torch.lt),
    "where": _binary(lambda a, b: torch.where(a > 0, a, b)),
    "fill": _binary(lambda a, b: torch.where(a > b, 1, a)),
    "and": _binary(lambda a, b: (a > 0) & (b < 1)),
    "scale": lambda ts, n: _pick(ts, n[0]) * ((n[1] % 7) - 3),
    "shift": lambda ts, n: _pick(ts, n[0]) + (n[1] % 7) / 2,
    "neg": _unary(lambda x: -_signed(x)),
    "tanh": _unary(lambda x: torch.tanh(_floating(x))),
    "exp": _unary(lambda x: torch.exp(-_floating(x).abs())),
    "sqrt": _unary(lambda x: torch.sqrt(_floating(x).abs() + 1)),
    "gelu": _unary(lambda x: F.gelu(_floating(x))),
    "clamp": _unary(lambda x: _signed(x).clamp(-1, 2)),
    "cast": _cast,
    "sum": _along(lambda x, d: x.sum(d)),
    "sum kept": _along(lambda x, d: x.sum(d, keepdim=True)),
    "mean": _along(lambda x, d: _floating(x).mean(d, keepdim=True)),
    "sum all": _unary(lambda x: x.sum()),
    "amax": _along(lambda x, d: x.amax(d)),
    "amin all": _unary(lambda x: x.amin()),
    "argmax": _along(lambda x, d: _signed(x).round().argmax(d) if x.is_floating_point() else _signed(x).argmax(d)),
    "any": _along(lambda x, d: (x > 1).any(d, keepdim=True)),
    "softmax": _along(lambda x, d: _floating(x).softmax(d)),
    "log_softmax": _along(lambda x, d: _floating(x).log_softmax(d)),
    "norm": _along(lambda x, d: F.layer_norm(_floating(x), x.shape[d:])),
    "var": _along(lambda x, d: _floating(x).var(d, correction=0, keepdim=True)),
    "cumsum": _along(lambda x, d: x.cumsum(d)),
    "slice": _slice,
    "select": _along(lambda x, d: x.select(d, -1)),
    "reshape": _reshape,
    "permute": _permute,
    "expand": lambda ts, n: _pick(ts, n[0]).unsqueeze(0).expand(1 + n[1] % 3, *_pick(ts, n[0]).shape),
    "flip": _along(lambda x, d: x.flip(d)),
    "roll": _along(lambda x, d: x.roll(1, d)),
    "pad": lambda ts, n: F.pad(_ranked(ts, n[0]), (n[1] % 2, n[2] % 3)),
    "repeat": _along(lambda x, d: x.repeat(*[2 if k == d else 1 for k in range(x.dim())])),
    "cat": _cat,
    "copy": _unary(lambda x: x.contiguous()),
    "tril": lambda ts, n: torch.tril(x) if (x := _ranked(ts, n[0])).dim() > 1 else x + 0,
    "index": _index,
    "gather": _gather,
    "put": _put,
    "set slice": _set_slice,
    "add to slice": _add_to_slice,
    "matmul": _unary(lambda x: x.float() @ x.float().t() if x.dim() == 2 else x + 0),
}


def function(case: Case) -> Callable[..., list[Tensor]]:
    """The program as a torch function; its results are those of every step."""

    def run(*inputs: Tensor) -> list[Tensor]:
        made = list(inputs)
        for s in case.steps:
            out = OPERATORS[s.op](made, s.n)
            made.append(out if out.numel() <= SMALL else out.flatten()[:8])
        results = made[len(inputs) :]
        for k in range(min(case.mutate, len(inputs))):
            if inputs[k].dim():
                inputs[k].copy_(inputs[k].flip(0))
        return results

    return run


def random_case(r: random.Random) -> Case:
    names = list(OPERATORS)
    steps = [Step(r.choice(names), tuple(r.randrange(64) for _ in range(4))) for _ in range(r.randint(2, 9))]  # type: ignore[misc]
    return Case(tuple(r.randrange(10_000) for _ in range(r.randint(1, 3))), tuple(steps), r.choice((0, 0, 0, 1, 2)))


def by_interpreter(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` traced and lowered as for compilation, each graph then run node by node on torch tensors."""

    def lower(gm: torch.fx.GraphModule) -> Callable[..., Any]:
        gm.graph.eliminate_dead_code()
        program, constants = lower_graph(gm, resolve(None, {"numerics": "eager"}))
        verify(program)

        def call(args: list[Any]) -> list[Any]:
            xs = list(args)
            args.clear()
            return interp.run(program, xs, constants)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return torch.compile(fn, backend=backend(lower), dynamic=False, fullgraph=True)


def _tolerance(x: Any) -> float | None:
    # a chain of several low-precision steps: eager rounds after each, kernels keep float32
    low = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return 0.05 if low else 2e-5 if isinstance(x, Tensor) and x.dtype == torch.float32 else None


def disagreement(case: Case, options: dict[str, Any] | None = None, interpret: bool = True) -> str:
    """What the interpreter or the compiled program does differently from eager, or ""."""
    fn, inputs = function(case), [make_input(s) for s in case.inputs]
    theirs = twin(inputs)
    try:
        want = as_list(fn(*theirs))
    except (RuntimeError, IndexError):  # eager itself refuses this combination
        return ""
    ways: dict[str, Callable[..., Any]] = {"compiled": compiled(fn, numerics="eager", **(options or {}))}
    if interpret:
        ways["interpreter"] = by_interpreter(fn)
    wrong = []
    for name, run in ways.items():
        torch._dynamo.reset()
        mine = twin(inputs)
        try:
            got = as_list(run(*mine))
        except Exception as cause:  # whatever is raised is what eager does differently
            wrong.append(f"{name}: {type(cause).__name__}: {str(cause)[:800]}")
            continue
        named = [
            (f"result of step {k} ({s.op})", g, w)
            for k, (s, g, w) in enumerate(zip(case.steps, got, want, strict=True))
        ]
        named += [(f"input {k} afterwards", g, w) for k, (g, w) in enumerate(zip(mine, theirs, strict=True))]
        for label, g, w in named:
            if text := difference(g, w, None, _tolerance(w), strides=False):
                wrong.append(f"{name}: {label}: {text}")
    return "\n".join(wrong)


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Fewer steps and inputs that still fail, by leaving one out at a time."""
    changed = True
    while changed:
        changed = False
        smaller = [Case(case.inputs, case.steps[:k] + case.steps[k + 1 :], case.mutate) for k in range(len(case.steps))]
        smaller += [Case(case.inputs[:k] + case.inputs[k + 1 :], case.steps, 0) for k in range(len(case.inputs))]
        for c in smaller:
            if c.steps and c.inputs and fails(c):
                case, changed = c, True
                break
    return case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    r, failures, start = random.Random(args.seed), 0, time.monotonic()
    for k in range(args.programs):
        case = random_case(r)
        text = disagreement(case)
        if not text:
            continue
        failures += 1
        if not args.no_shrink:
            case = shrink(case, lambda c: bool(disagreement(c)))
        print(f"program {k}: {case}\n{disagreement(case) or text}\n", flush=True)
    print(f"{args.programs} programs, {failures} disagree, {time.monotonic() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
