"""Arithmetic on symbolic numbers, of sizes, of Python integers and of floats: as factors, as sizes, as results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from altbackend.compat import torch_api
from test import triton_run
from test.compare import as_list, compiled, difference

pytestmark = pytest.mark.sample(2)

T = torch.Tensor


@pytest.fixture(autouse=True)
def floats_are_symbols() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=False, capture_scalar_outputs=True):
        yield


# of a size or an integer n >= 1, and a second one m >= 1
INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "n + m": lambda n, m: n + m,
    "n - 2 * m": lambda n, m: n - 2 * m,
    "n * m": lambda n, m: n * m,
    "-n": lambda n, m: -n,
    "+n": lambda n, m: +n,
    "abs(m - n)": lambda n, m: abs(m - n),
    "n // m": lambda n, m: n // m,
    "n // -m": lambda n, m: n // -m,
    "(m - n) // 3": lambda n, m: (m - n) // 3,
    "-7 // n": lambda n, m: -7 // n,
    "n % m": lambda n, m: n % m,
    "n % -m": lambda n, m: n % -m,
    "(m - n) % 4": lambda n, m: (m - n) % 4,
    "-7 % n": lambda n, m: -7 % n,
    "n ** 2": lambda n, m: n**2,
    "n ** m": lambda n, m: n**m,
    "2 ** n": lambda n, m: 2**n,
    "(m - n) ** 3": lambda n, m: (m - n) ** 3,
    "pow(n, 3)": lambda n, m: pow(n, 3),
    "n ^ m": lambda n, m: n ^ m,
    "n & m": lambda n, m: n & m,
    "n | m": lambda n, m: n | m,
    "n << 2": lambda n, m: n << 2,
    "1 << n": lambda n, m: 1 << n,
    "n >> 1": lambda n, m: n >> 1,
    "n << m": lambda n, m: n << m,
    "min(n, m)": lambda n, m: min(n, m),
    "max(n, m)": lambda n, m: max(n, m),
    "max(n, m, 4)": lambda n, m: max(n, m, 4),
    "sym_max(n, m)": lambda n, m: torch.sym_max(n, m),
    "sym_min(n, m - 1)": lambda n, m: torch.sym_min(n, m - 1),
    "int(1.37 * n)": lambda n, m: int(1.37 * n),
    "int(n / m)": lambda n, m: int(n / m),
    "int((m - n) / 3)": lambda n, m: int((m - n) / 3),
    "int(n * 0.5)": lambda n, m: int(n * 0.5),
    "round(n / 3)": lambda n, m: round(n / 3),
    "round(2.5 * n)": lambda n, m: round(2.5 * n),
    "math.floor(n / 3)": lambda n, m: math.floor(n / 3),
    "math.ceil(n / 3)": lambda n, m: math.ceil(n / 3),
    "math.trunc((m - n) / 3)": lambda n, m: math.trunc((m - n) / 3),
    "math.floor((m - n) / 3)": lambda n, m: math.floor((m - n) / 3),
    "math.ceil((m - n) / 3)": lambda n, m: math.ceil((m - n) / 3),
    "int(n ** 0.5)": lambda n, m: int(n**0.5),
    "int(math.sqrt(n))": lambda n, m: int(math.sqrt(n)),
    "int(math.log2(n))": lambda n, m: int(math.log2(n)),
    "1 if n > m else 2": lambda n, m: 1 if n > m else 2,
    "sym_ite": lambda n, m: torch.sym_ite(n > m, n, m),
    "sum": lambda n, m: torch.sym_sum([n, m, n]),
    "-(-n // 4)": lambda n, m: -(-n // 4),
    "(n + 7) // 8 * 8": lambda n, m: (n + 7) // 8 * 8,
}

# of a size or an integer n >= 1 and a float f; Dynamo or aot_eager does not take %, and changes the type of max(f, n)
FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "n / 3": lambda n, f: n / 3,
    "3 / n": lambda n, f: 3 / n,
    "n / f": lambda n, f: n / f,
    "n * 0.1 * 3.0": lambda n, f: n * 0.1 * 3.0,
    "n + 0.25": lambda n, f: n + 0.25,
    "0.25 - n": lambda n, f: 0.25 - n,
    "n * f": lambda n, f: n * f,
    "f - n": lambda n, f: f - n,
    "f * f": lambda n, f: f * f,
    "-f": lambda n, f: -f,
    "f + 1": lambda n, f: f + 1,
    "f / 3": lambda n, f: f / 3,
    "1 / f": lambda n, f: 1 / f,
    "f // 0.3": lambda n, f: f // 0.3,
    "n // 0.7": lambda n, f: n // 0.7,
    "abs(f - n)": lambda n, f: abs(f - n),
    "min(f, 1.5)": lambda n, f: min(f, 1.5),
    "sym_max(f, n)": lambda n, f: torch.sym_max(f, n),
    "sym_min(f, n)": lambda n, f: torch.sym_min(f, n),
    "n ** 0.5": lambda n, f: n**0.5,
    "n ** -0.5": lambda n, f: n**-0.5,
    "n ** -1": lambda n, f: n**-1,
    "f ** 2": lambda n, f: f**2,
    "f ** n": lambda n, f: f**n,
    "2.0 ** n": lambda n, f: 2.0**n,
    "n ** f": lambda n, f: n**f,
    "math.sqrt(n)": lambda n, f: math.sqrt(n),
    "1 / math.sqrt(n)": lambda n, f: 1 / math.sqrt(n),
    "math.sqrt(f)": lambda n, f: math.sqrt(f),
    "math.sin(n)": lambda n, f: math.sin(n),
    "math.cos(n)": lambda n, f: math.cos(n),
    "math.tan(n)": lambda n, f: math.tan(n),
    "math.sinh(f)": lambda n, f: math.sinh(f),
    "math.cosh(f)": lambda n, f: math.cosh(f),
    "math.tanh(n)": lambda n, f: math.tanh(n),
    "math.asin(1 / n)": lambda n, f: math.asin(1 / n),
    "math.acos(1 / n)": lambda n, f: math.acos(1 / n),
    "math.atan(n)": lambda n, f: math.atan(n),
    "math.log2(n)": lambda n, f: math.log2(n),
    "math.log2(f)": lambda n, f: math.log2(f),
    "math.pow(f, 2)": lambda n, f: math.pow(f, 2),
    "float(n)": lambda n, f: float(n),
    "float(int(f * n))": lambda n, f: float(int(f * n)),
    "int(f * n)": lambda n, f: int(f * n),
    "round(f * n)": lambda n, f: round(f * n),
    "round(f, 1)": lambda n, f: round(f, 1),
    "math.floor(f * n)": lambda n, f: math.floor(f * n),
    "math.ceil(f)": lambda n, f: math.ceil(f),
    "int(f) // 2": lambda n, f: int(f) // 2,
    "1.0 if f > 2 else n": lambda n, f: 1.0 if f > 2 else n,
    "n / 3 * n - f": lambda n, f: n / 3 * n - f,
}


def numbers(table: dict[str, Any], names: list[str]) -> Callable[..., list[Any]]:
    """A function of two vectors, two integers and a float: each form of sizes and of integers, in every use."""

    def fn(x: T, y: T, n: int, m: int, f: float) -> list[Any]:
        found: list[Any] = []
        for name in names:
            for a, b in ((x.shape[0], y.shape[0]), (n, m)):
                number = table[name](a, b if table is INTEGERS else f)
                found += [number, x * number]
            if table is INTEGERS and name not in NO_SIZE:
                found.append(y.new_ones(abs(number) % 64 + 1))
        return found

    return fn


NO_SIZE = {"n ** m"}  # tracing itself recurses without end
CALLS = ((7, 3, 8, 3, 2.3), (5, 9, 5, 9, 0.7), (12, 4, 13, 4, 3.0), (3, 3, 4, 4, 1.1))
GROUP = 13
if torch_api.version() < (2, 13):  # no backend can trace shifts by sizes
    INTEGERS = {name: form for name, form in INTEGERS.items() if "<<" not in name and ">>" not in name}
GROUPS = [(t, list(t)[k : k + GROUP]) for t in (INTEGERS, FLOATS) for k in range(0, len(t), GROUP)]


def arguments(n: int, m: int, i: int, j: int, f: float) -> tuple[Any, ...]:
    return torch.arange(n * 1.0), torch.arange(m * 1.0) / 3, i, j, f


def check_calls(run: Callable[..., Any], fn: Callable[..., Any], names: list[str]) -> None:
    for call in CALLS:
        got, want = run(*arguments(*call)), fn(*arguments(*call))
        assert len(got) == len(want)
        each = len(want) // len(names)
        wrong = {
            names[min(k // each, len(names) - 1)]: text
            for k in range(len(want))
            if (text := _difference(got[k], want[k]))
        }
        assert not wrong, f"{wrong} with {call}"


def _difference(got: Any, want: Any) -> str:
    return difference(got, want, tolerance=0 if isinstance(want, T) else None)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("table", "names"), GROUPS, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_forms(table: dict[str, Any], names: list[str]) -> None:
    fn = numbers(table, names)
    check_calls(compiled(fn, dynamic=True), fn, names)


@pytest.mark.parametrize("names", [["n / f", "math.sqrt(n)", "f * f"], ["int(f * n)", "max(f, n + 0.5)"]], ids=str)
def test_floats_in_a_gpus_kernels(names: list[str]) -> None:
    table = FLOATS | {"max(f, n + 0.5)": lambda n, f: max(f, n + 0.5)}
    fn = numbers(table, names)
    check_calls(triton_run.compiled(fn, dynamic=True, host=True), fn, names)


ARGUMENTS: dict[str, Callable[[T, Any], Any]] = {
    "alpha": lambda a, n: (torch.add(a, a, alpha=n), torch.sub(a, 1, alpha=n), n - a),
    "value": lambda a, n: (torch.addcmul(a, a, a, value=n), torch.addcdiv(a, a, a.abs() + 1, value=n)),
    "beta": lambda a, n: torch.addmm(a, a, a, beta=n, alpha=2),
    "roll": lambda a, n: (torch.roll(a, n, 0) + 1, torch.roll(a, (n, 1), (0, 1)), torch.roll(a, n) * 2),
    "diagonals": lambda a, n: (a.diagonal(n) + 1, torch.tril(a, n), a.triu(n) * 2),
    "pad": lambda a, n: torch.nn.functional.pad(a, (n, 2, 0, -1)) + 1,
    "arange": lambda a, n: torch.arange(n, n + 4) * 2,
    "full": lambda a, n: (torch.full((abs(n) + 1,), n) + 1, a.new_full((2,), n), torch.full_like(a, n)),
    "clamp": lambda a, n: (a.clamp(n), a.clamp(-abs(n), max=n)),
    "comparisons": lambda a, n: (a == n, a > n, torch.where(a > n, a, n), a.masked_fill(a > 0, n)),
    "of integers": lambda a, n: (a.int() & n, a.int() ^ n, n - a.int() * n),
    "slices": lambda a, n: (a[n:, :n] + 1, a[1 : -abs(n) - 1] * 2, a[:: abs(n) % 3 + 1] + 1),
    "positions": lambda a, n: (a[torch.tensor([0, 1]) + n], a[n][n] + 1, a[..., n, None]),
}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_arguments_of_both_signs(name: str) -> None:
    def fn(a: T, n: int) -> Any:
        return ARGUMENTS[name](a, n)

    run = compiled(fn, dynamic=True)
    for n in (2, 3, -1, 4, -5):
        a = torch.arange(-24.0, 25.0).view(7, 7) / 4
        for got, want in zip(as_list(run(a, n)), as_list(fn(a, n)), strict=True):
            assert not difference(got, want), n


def test_numbers_that_data_decides() -> None:
    """Of `item`: each call computes them again, before what counts on them runs."""

    def fn(x: T, i: T) -> tuple[Any, ...]:
        n, f = i.sum().item(), x.max().item()
        size: Any = abs(n) + 1
        return x * n, x * math.sqrt(f), n // 3, n % 3, f * 0.5, x.new_zeros(size) + f / 3, x * round(f / 3)

    run = compiled(fn, dynamic=True)
    for k in (3, 0, -4, 7):
        x, i = torch.arange(1.0, 6.0) + k * k, torch.tensor([k, k])
        for got, want in zip(run(x, i), fn(x, i), strict=True):
            assert not _difference(got, want)


def test_gradients_with_numbers_between_forward_and_backward() -> None:
    def fn(x: T, f: float) -> T:
        n = int(1.37 * x.shape[0])
        return (x * (f / n)).sin() * math.sqrt(n) + x.new_ones(n).sum() * x

    run = compiled(fn, dynamic=True)
    for n, f in ((5, 0.5), (9, 1.25), (16, 0.1)):
        xs = [torch.arange(1.0, n + 1).requires_grad_() for _ in range(2)]
        for x, call in zip(xs, (run, fn), strict=True):
            call(x, f).sum().backward()
        assert not difference(xs[0].grad, xs[1].grad)


def test_errors_of_arithmetic_are_those_of_python() -> None:
    def fn(x: T, n: int, m: int) -> Any:
        return x * (n // m)

    run = compiled(fn, dynamic=True)
    assert torch.equal(run(torch.ones(3), 7, 3), torch.full((3,), 2.0))
    assert torch.equal(run(torch.ones(3), -7, -3), torch.full((3,), 2.0))
    assert torch.equal(run(torch.ones(3), -7, 4), torch.full((3,), -2.0))
    with pytest.raises(ZeroDivisionError):
        fn(torch.ones(3), 7, 0)
    with pytest.raises((ZeroDivisionError, torch._dynamo.exc.Unsupported)):  # Dynamo may see it first
        run(torch.ones(3), 7, 0)


def _of_an_element(x: T, y: T) -> tuple[Any, ...]:
    k = x[0].item()
    x.add_(0.5)
    return y * k, k


def _of_a_sum(x: T, y: T) -> tuple[Any, ...]:
    t = x[-1:] + 1
    x.add_(0.5)
    return t, torch.masked_select(y, y < 1), t.sum().item()


def test_a_number_outlives_a_write_to_where_it_was_read() -> None:
    y = torch.arange(-3.0, 3.0)
    for fn in (_of_an_element, _of_a_sum):
        run = compiled(fn, dynamic=True)
        for k in range(3):
            mine, theirs = (torch.arange(1.0, 6.0 + k) for _ in range(2))
            for got, want in zip((*run(mine, y), mine), (*fn(theirs, y), theirs), strict=True):
                assert not _difference(got, want)
