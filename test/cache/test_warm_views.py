"""Views and writes of inputs that begin anywhere in their storage: cold, after a reset, and from the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from test import ways
from test.ways import Program

T = torch.Tensor
HERE = "test.cache.test_warm_views"


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
PROGRAMS = [
    Program(f"{name}{', any size' * bool(dynamic)}", fn, at_places(make), dynamic=dynamic)
    for name, (fn, make) in WRITES.items()
    for dynamic in (False, True)
]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> ways.Everywhere:
    return ways.everywhere(f"{HERE}:PROGRAMS", tmp_path_factory.mktemp("kept"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_views_of_inputs_wherever_they_begin(program: Program, noted: ways.Everywhere) -> None:
    assert noted.wrong(program) == ""
    assert {verdict for verdict, _ in noted.verdicts[program.name]} == {"hit"}
