"""Every row of the scalar table, through the aten operator that uses it, in every dtype that eager takes it in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from altbackend.ir import value as va
from altbackend.ir.loops import Extern
from altbackend.ir.ops import FLOAT8, OPS
from altbackend.lowering.registry import SUPPORTED_DTYPES
from test.compare import check, compiled, difference, twin, wide
from test.graphs import schedule, trace

pytestmark = pytest.mark.sample(4)

# Rows whose operator has another name or form than torch.<row>.
SPELLED: dict[str, Callable[..., Any]] = {
    "truediv": torch.true_divide,
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "left_shift": torch.bitwise_left_shift,
    "right_shift": torch.bitwise_right_shift,
    "where": lambda a, b: torch.where(a > b, a, b * b),
    "one_plus_erf": lambda a: torch.erf(a) + 1,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "i1e": torch.special.i1e,
}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES = [*FLOATS, *INTS, torch.bool]
# Roundings allowed beside eager's error x2; more where the function's own conditioning costs them.
ROUNDINGS = {"digamma": 64, "one_plus_erf": 2}  # cancellation near digamma's roots
# A rounding is at least this times the dtype's epsilon: 1 + erf(x) rounds a sum of terms of size 1.
SCALE = {"one_plus_erf": 1.0}


def test_dtypes_are_all_tested() -> None:
    assert set(DTYPES) == SUPPORTED_DTYPES - FLOAT8  # which are converted only: test/lowering/test_float8.py


def operator(name: str) -> Callable[..., Any]:
    return SPELLED.get(name) or getattr(torch, name)


def floats(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of every special value, then ordinary ones of several magnitudes."""
    special = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -3.0, math.inf, -math.inf, math.nan, 1e-4, 100.0, -7.25]
    grid = torch.tensor(special, dtype=torch.float64)
    a, b = grid.repeat_interleave(len(special)), grid.repeat(len(special))
    g = torch.Generator().manual_seed(1)
    spread = [torch.randn(64, generator=g, dtype=torch.float64) * s for s in (0.1, 1.0, 8.0)]
    other = [torch.randn(64, generator=g, dtype=torch.float64) * s for s in (3.0, 1.0, 2.0)]
    return torch.cat([a, *spread]).to(dtype), torch.cat([b, *other]).to(dtype)


def ints(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    info = torch.iinfo(dtype)
    edge = torch.tensor([info.min, info.max, 0, 1, 2, 3, 7, 100, max(info.min, -1), max(info.min, -5)], dtype=dtype)
    return edge.repeat_interleave(len(edge)), edge.repeat(len(edge))


def operands(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Arguments on which eager defines the operator."""
    if dtype == torch.bool:
        a, b = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    else:
        a, b = floats(dtype) if dtype.is_floating_point else ints(dtype)
    if not dtype.is_floating_point and dtype != torch.bool:
        if "divide" in name or name in ("remainder", "fmod"):
            keep = (b != 0) & ~((a == torch.iinfo(dtype).min) & (b == -1))  # eager raises, or C++ has no answer
            a, b = a[keep], b[keep]
        if name == "pow":
            a, b = a[b >= 0], b[b >= 0]  # a negative exponent of integers is an error
            a, b = a[b < 100], b[b < 100]
        if name == "gcd":
            keep = (a != torch.iinfo(dtype).min) & (b != torch.iinfo(dtype).min)
            a, b = a[keep], b[keep]
        if "shift" in name:
            keep = (b >= 0) & (b < 8 * dtype.itemsize) & (a >= 0)
            a, b = a[keep], b[keep]
    return [a, b][: 2 if name == "where" else OPS[name].arity]


# functions that torch does not have, of a seed (test/ir/test_philox.py) or of a number's bits (test_numbers.py)
DRAWN = frozenset(n for n in OPS if n.startswith("philox_")) | {"float64_of_bits", "to_tf32"}


def takes(name: str, dtype: torch.dtype) -> bool:
    try:
        operator(name)(*operands(name, dtype))
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operator(dtype: torch.dtype) -> None:
    names = [n for n in OPS if n not in DRAWN and takes(n, dtype)]
    assert len(names) > 10
    wrong = []
    for part in chunks(names, 24):
        inputs = [x for n in part for x in operands(n, dtype)]
        counts = [len(operands(n, dtype)) for n in part]
        wrong += run_part(part, counts, inputs)
    assert not wrong, "\n".join(wrong)


def chunks(names: list[str], size: int) -> list[list[str]]:
    return [names[k : k + size] for k in range(0, len(names), size)]


def run_part(names: list[str], counts: list[int], inputs: list[torch.Tensor]) -> list[str]:
    """One graph of several operators, each on its own arguments; what differs from eager."""

    def fn(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, out = list(xs), []
        for n, k in zip(names, counts, strict=True):
            out.append(operator(n)(*left[:k]))
            left = left[k:]
        return tuple(out)

    got, want, exact = compiled(fn)(*twin(inputs)), fn(*twin(inputs)), fn(*wide(inputs))
    wrong = []
    for n, g, w, e in zip(names, got, want, exact, strict=True):
        if (text := difference(g, w, e)) or (
            w.is_floating_point() and (text := pointwise_difference(g, w, e, ROUNDINGS.get(n, 8), SCALE.get(n, 0.0)))
        ):
            wrong.append(f"{n}: {text}")
    return wrong


def pointwise_difference(
    got: torch.Tensor, want: torch.Tensor, exact: torch.Tensor, roundings: int, scale: float
) -> str:
    """Each point alone: no further from the float64 answer than eager x2 plus some roundings."""
    ok = exact.isfinite() & want.isfinite()
    eps, tiny = torch.finfo(want.dtype).eps, torch.finfo(want.dtype).tiny
    mine, eager = (got.double() - exact).abs(), (want.double() - exact).abs()
    bad = ok & (mine > 2 * eager + roundings * (eps * exact.abs().clamp_min(scale) + tiny + eps * eps))
    return f"{int(bad.sum())} points, worst {float((mine / exact.abs())[bad].max()):.3g}" if bad.any() else ""


def test_every_row_is_reached() -> None:
    """The operators above are lowered to the rows that they are named after."""
    used: set[str] = set()
    for dtype in (torch.float32, torch.int64):
        names = [n for n in OPS if n not in DRAWN and takes(n, dtype)]

        def fn(x: torch.Tensor, y: torch.Tensor, names: list[str] = names) -> list[torch.Tensor]:
            return [operator(n)(*[x, y][: 2 if n == "where" else OPS[n].arity]) for n in names]

        x, y = torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype)
        for gm in trace(fn, x, y):
            nodes = schedule(gm).program.nodes
            used |= {v.op for n in nodes if not isinstance(n, Extern) for v in va.walk(n.value)}
    assert set(OPS) - used == DRAWN


SCALARS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add int": lambda x: x + 2,
    "add float": lambda x: x + 1.5,
    "add alpha": lambda x: torch.add(x, x, alpha=3),
    "sub alpha": lambda x: torch.sub(x, x, alpha=2),
    "rsub": lambda x: 3 - x,
    "mul": lambda x: x * 2.5,
    "div int": lambda x: x / 3,
    "floor int": lambda x: x // 3,
    "floor negative": lambda x: x // -3,
    "floor float": lambda x: x // 0.7,
    "mod": lambda x: x % 5,
    "mod negative": lambda x: x % -5,
    "fmod": lambda x: torch.fmod(x, 3),
    "square": lambda x: x.square(),
    "pow 2": lambda x: x**2,
    "pow 3": lambda x: x**3,
    "pow 0": lambda x: x**0,
    "scalar pow": lambda x: 2 ** (x % 5),
    "compare": lambda x: (x > 1) & (x <= 3),
    "eq": lambda x: x == 1,
    "clamp": lambda x: x.clamp(1, 3),
    "clamp min": lambda x: x.clamp(min=2),
    "clamp max": lambda x: x.clamp(max=2),
    "where scalar": lambda x: torch.where(x > 1, x, 0),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "double": lambda x: x.double(),
    "long": lambda x: x.long(),
    "int": lambda x: x.int(),
    "bool": lambda x: x.bool(),
    "int8": lambda x: (x % 50).to(torch.int8),
    "logical": lambda x: torch.logical_xor(x > 1, x.bool()),
    "not": lambda x: torch.logical_not(x),
    "round": lambda x: x.round(),
}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_python_scalars_promote_as_in_eager(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 2, 3, 5, 7, 11, 13, 60], dtype=dtype)
    x = torch.cat([x, -x[:6]]) if dtype.is_signed else x
    names = list(SCALARS)
    check(lambda x: [SCALARS[n](x) for n in names], x, names=names)


@pytest.mark.parametrize("left", DTYPES, ids=str)
def test_mixed_dtypes_promote_as_in_eager(left: torch.dtype) -> None:
    a = torch.tensor([0, 1, 2, 3, 7]).to(left)
    others = [torch.tensor([1, 3, 2, 2, 5]).to(d) for d in DTYPES]
    names = [f"{op} {d}" for d in DTYPES for op in ("add", "mul", "eq", "where", "maximum")]

    def fn(a: torch.Tensor, *bs: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for b in bs:
            out += [a + b, a * b, a == b, torch.where(a > 1, a, b), torch.maximum(a, b)]
        return out

    check(fn, a, *others, names=names)


def test_zero_dimensional_tensors_do_not_promote() -> None:
    xs = [torch.arange(6, dtype=d) for d in (torch.int32, torch.float16, torch.bfloat16, torch.float32)]
    ones = [torch.tensor(3, dtype=torch.int64), torch.tensor(2.5, dtype=torch.float64), torch.tensor(True)]
    check(lambda *t: [x * s for x in t[: len(xs)] for s in t[len(xs) :]], *xs, *ones)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_integers_wrap(dtype: torch.dtype) -> None:
    top, low = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    x = torch.tensor([top, top - 1, low, low + 1, 3], dtype=dtype)
    check(lambda x: [x + x, x * x, x - 5, -x, x * 3 + x, x.abs(), x.sum(), x.prod(), x.cumsum(0)], x)


CASTS = [(a, b) for a in FLOATS for b in (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, *FLOATS)]


def test_casts_between_all_dtypes() -> None:
    values = torch.tensor([0.0, -0.0, 0.5, 1.5, 2.5, 100.25, 120.0, 65504.0 / 1024, 1e-6])
    negative = torch.tensor([-0.5, -1.0, -1.5, -100.7])
    inputs = [values.to(a) if b == torch.uint8 else torch.cat([values, negative]).to(a) for a, b in CASTS]
    check(lambda *xs: [x.to(b) for x, (_, b) in zip(xs, CASTS, strict=True)], *inputs, names=[str(c) for c in CASTS])


def test_low_precision_rounds_when_asked() -> None:
    """numerics="eager": a chain equals eager's, which rounds after every operator, bit for bit."""
    for dtype in (torch.bfloat16, torch.float16):
        x, y = torch.randn(500, dtype=dtype), torch.randn(500, dtype=dtype)
        check(lambda x, y: (x * y + x) * 0.3 - y / 3, x, y, tolerance=0, numerics="eager")
