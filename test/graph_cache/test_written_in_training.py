"""Inputs that training writes: the backward has what they were. Cold, after a reset, from the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from test import ways
from test.ways import Program

T = torch.Tensor
HERE = "test.graph_cache.test_written_in_training"


def of_a_leaf(make: Callable[[T], T]) -> ways.Inputs:
    """A result of other operators, whose leaf is asked for its gradient."""

    def inputs() -> list[Any]:
        leaf = torch.arange(12.0).sin().requires_grad_()
        x = make(leaf)
        x.leaf = leaf  # type: ignore[attr-defined]
        return [x, torch.arange(12.0).cos().requires_grad_()]

    return inputs


def with_a_buffer() -> list[Any]:
    return [torch.arange(12.0).sin().requires_grad_(), torch.arange(12.0).cos()]


def clamped(x: T, w: T) -> T:
    x.clamp_(min=0)
    return x * 2


def activated(x: T, w: T) -> T:
    return torch.nn.functional.relu_(x) * w.view(x.shape)


def squared(x: T, w: T) -> T:
    x.mul_(2)
    return x * x


def by_another(x: T, w: T) -> T:
    x.mul_(w.view(x.shape))
    return x * w.view(x.shape)


def twice(x: T, w: T) -> T:
    w = w.view(x.shape)
    x.add_(w * w)
    y = x.exp()
    x.mul_(y)
    return y * w


def part(x: T, w: T) -> tuple[T, T]:
    x[1:].mul_(3)
    return (x * x).sum(), x[1:]


def element(x: T, w: T) -> T:
    x[1] = 3.0
    return x * x


def returned(x: T, w: T) -> tuple[T, T]:
    x.tanh_()
    return x.view(-1)[1:], x * 2


def without_gradient(x: T, w: T) -> T:
    with torch.no_grad():
        x.mul_(2)
    return x * x


def whole(leaf: T) -> T:
    return leaf * 2


def matrix(leaf: T) -> T:
    return (leaf * 2).view(3, 4)


def buffer_first(w: T, b: T) -> T:
    b.mul_(2)
    return (w * b).sin()


def buffer_last(w: T, b: T) -> T:
    y = (w * b.clone()).sin()
    b.mul_(2)
    return y * b


def buffer_product(w: T, b: T) -> T:
    b.exp_()
    b.mul_(b)
    return torch.mm((w * b).view(3, 4), b.view(4, 3))


WRITTEN = (clamped, activated, squared, by_another, twice, part, element, returned, without_gradient)
PROGRAMS = [
    Program(f"{fn.__name__}, {make.__name__}", fn, (of_a_leaf(make), of_a_leaf(make)), grad=True)
    for fn in WRITTEN
    for make in (whole, matrix)
]
PROGRAMS += [
    Program(fn.__name__, fn, (with_a_buffer, with_a_buffer), grad=True)
    for fn in (buffer_first, buffer_last, buffer_product)
]


@pytest.fixture(scope="module")
def noted(request: pytest.FixtureRequest) -> ways.Everywhere:
    return ways.once(f"{HERE}:PROGRAMS", request)


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_written_inputs(program: Program, noted: ways.Everywhere) -> None:
    assert noted.wrong(program) == ""
    assert all("error" not in call for call in noted.noted["cold"][program.name])
