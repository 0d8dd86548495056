"""Views and writes of inputs that begin anywhere in their storage: cold, after a reset, and from the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from test import ways
from test.ways import Program

T = torch.Tensor
HERE = "test.graph_cache.test_warm_views"


def piece(at: int, step: int = 1) -> T:
    """Twelve elements of a larger storage."""
    return torch.arange(80.0)[at : at + 12 * step : step]


def rows(at: int) -> T:
    """Four rows with gaps between them."""
    return torch.arange(80.0).view(8, 10)[2:6, at : at + 3]


def complexes(at: int) -> T:
    return (torch.arange(40.0) * (1 + 2j))[at : at + 4]


def negative(at: int) -> T:
    return complexes(at).conj().imag


def at_places(make: Callable[[int], T]) -> tuple[ways.Inputs, ...]:
    """Calls whose inputs begin elsewhere each time."""
    return tuple(lambda at=at: [make(at)] for at in (5, 2, 0, 5))


def written(write: Callable[[T], Any], *views: Callable[[T], T]) -> Callable[[T], Any]:
    def fn(x: T) -> Any:
        write(x)
        return tuple(view(x) for view in views)

    return fn


def into_a_part(x: T) -> T:
    v = x[1:]
    v.mul_(2)
    return v


def into_a_cache(x: T) -> T:
    x[2] = 7
    return x[:3]


def add(x: T) -> T:
    return x.add_(1)


WRITES: dict[str, tuple[Callable[[T], Any], Callable[[int], T]]] = {
    "view": (written(add, lambda x: x.view(3, 4)), piece),
    "slice": (written(add, lambda x: x[2:7:2]), piece),
    "narrow": (written(lambda x: x.neg_(), lambda x: x.narrow(0, 3, 4)), piece),
    "index_copy": (
        written(lambda x: x.index_copy_(0, torch.tensor([1, 3]), torch.ones(2)), lambda x: x[1:4]),
        piece,
    ),
    "a part that is written": (into_a_part, piece),
    "a part with steps": (into_a_part, lambda at: piece(at, 3)),
    "cache": (into_a_cache, rows),
    "transposed": (written(add, lambda x: x.t(), lambda x: x.t()[1:], lambda x: x), rows),
    "several of a split": (written(add, lambda x: x.split(5)[1], lambda x: x.view(3, 4).unbind(1)[2]), piece),
    "windows, diagonal, expanded": (
        written(
            add,
            lambda x: x.unfold(0, 3, 2),
            lambda x: x.view(3, 4).diagonal(1),
            lambda x: x[None, :, None].expand(3, 12, 2).squeeze(),
        ),
        piece,
    ),
    "another dtype": (written(add, lambda x: x.view(torch.int32), lambda x: x.view(torch.int16)[3:]), piece),
    "detached": (written(add, lambda x: x.detach(), lambda x: x[3:].detach()), piece),
    "real and imaginary": (written(add, torch.view_as_real, lambda x: x.imag, lambda x: x.conj()), complexes),
    "conjugate of a conjugate": (written(add, lambda x: x.conj()), lambda at: complexes(at).conj()),
    "conjugate that is not written": (lambda x: (x.conj(), x[1:].conj()), lambda at: complexes(at).conj()),
}


def read_before_written(view: Callable[[T], T]) -> Callable[[T], Any]:
    """A view by a library call, turned around, whose memory is then overwritten."""

    def fn(x: T) -> Any:
        y = view(x).flip(0) + 1
        x.mul_(3)
        return y, x[1:]

    return fn


WINDOWS: dict[str, tuple[Callable[[T], Any], Callable[[int], T]]] = {
    "window": (lambda x: (x.as_strided((2, 2), (3, 1), 6), x.as_strided((2, 2), (3, 1), 6) * 2), piece),
    "window where the input begins": (
        lambda x: (x.as_strided((2, 2), (3, 1)), x[1:].as_strided((2, 2), (3, 1)) * 2),
        piece,
    ),
    "window on a part": (lambda x: x[2:].t().as_strided((3,), (2,), 5) + 1, rows),
    "window that is read before a write": (read_before_written(lambda x: x.as_strided((12,), (1,), 6)), piece),
    "window that is written": (lambda x: (x.as_strided((2, 2), (3, 1), 6).add_(1), x * 2)[1], piece),
    "window on a part of a result": (lambda x: (x * 2)[3:5].as_strided((4,), (2,), 1), piece),
    "integers that are read before a write": (read_before_written(lambda x: x.view(torch.int32)), piece),
    "real parts that are read before a write": (read_before_written(torch.view_as_real), complexes),
}


def results(make: Callable[[T], T], *views: Callable[[T], T]) -> Callable[[T], Any]:
    """Views of one computed value."""

    def fn(x: T) -> Any:
        y = make(x)
        return tuple(view(y) for view in views)

    return fn


def itself(y: T) -> T:
    return y


def double(x: T) -> T:
    return x * 2


RESULTS: dict[str, tuple[Callable[[T], Any], Callable[[int], T]]] = {
    "result as integers and bytes": (
        results(double, itself, lambda y: y.view(torch.int32), lambda y: y.view(torch.uint8)),
        piece,
    ),
    "parts of it as wider and narrower numbers": (
        results(
            double,
            lambda y: y[1:],
            lambda y: y.view(torch.int16)[3:],
            lambda y: y.view(torch.int64)[2:],
            lambda y: y.view(3, 4).t(),
        ),
        piece,
    ),
    "transposed result as integers": (
        results(lambda x: x.t() * 2, itself, lambda y: y.view(torch.int32), lambda y: y.t().view(torch.int32)),
        rows,
    ),
    "integers as floats and back": (
        results(lambda x: (x * 2).view(torch.int32) + 1, itself, lambda y: y.view(torch.float32)),
        piece,
    ),
    "only other dtypes of it": (
        results(lambda x: x.double() * 2, lambda y: y.view(torch.uint8), lambda y: y.view(torch.int16)),
        piece,
    ),
    "16 bits as others": (
        results(
            lambda x: (x * 2).bfloat16(), itself, lambda y: y.view(torch.float16), lambda y: y[2:6].view(torch.int32)
        ),
        piece,
    ),
    "complex result as real numbers": (
        results(double, itself, torch.view_as_real, lambda y: y.imag, lambda y: y.conj()),
        complexes,
    ),
}


def half(x: T) -> T:
    return x[: x.shape[0] // 2]


# Views whose sizes are symbols, of inputs of other sizes and places each time.
SIZED: dict[str, tuple[Callable[[T], Any], Callable[[int], T]]] = {
    "half of a written input": (
        written(add, half, lambda x: x.view(-1, 2)[1:]),
        lambda at: piece(at)[: 10 + 2 * (at % 3)],
    ),
    "half of an input": (
        lambda x: (half(x), x.view(x.shape[0] // 2, 2).t()),
        lambda at: piece(at)[: 10 + 2 * (at % 3)],
    ),
    "inner part of a written input with gaps": (
        written(add, half, lambda x: x[1 : x.shape[0] - 1, 1:].t()),
        lambda at: rows(at).t(),
    ),
}
ANY_SIZE = (
    "slice",
    "a part with steps",
    "cache",
    "transposed",
    "another dtype",
    "window on a part of a result",
    *SIZED,
)
EVERY = WRITES | WINDOWS | RESULTS | SIZED
PROGRAMS = [Program(name, fn, at_places(make)) for name, (fn, make) in EVERY.items()]
PROGRAMS += [Program(f"{name}, any size", EVERY[name][0], at_places(EVERY[name][1]), dynamic=True) for name in ANY_SIZE]


@pytest.fixture(scope="module")
def noted(request: pytest.FixtureRequest) -> ways.Everywhere:
    return ways.once(f"{HERE}:PROGRAMS", request)


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_views_of_inputs_wherever_they_begin(program: Program, noted: ways.Everywhere) -> None:
    assert noted.wrong(program) == ""
    assert {verdict for verdict, _ in noted.verdicts[program.name]} == {"hit"}
