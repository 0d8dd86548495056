"""Inputs, results and gradients with torch's negative and conjugate bits: cold, after a reset, from the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from test import ways
from test.ways import Program

T = torch.Tensor
HERE = "test.graph_cache.test_warm_bits"
PLACES = (3, 0, 5)


def numbers(at: int) -> T:
    return torch.randn(20, generator=torch.Generator().manual_seed(at))


def complexes(at: int) -> T:
    return torch.complex(numbers(at), numbers(at + 50))[at : at + 4]


def imaginary(at: int) -> T:
    """With gaps, from the conjugate of a complex tensor."""
    return complexes(at).conj().imag


def negated(at: int) -> T:
    return torch._neg_view(numbers(at)[at : at + 4])


def set_part(x: T) -> T:
    x[1:3] = 5
    return x * 1


REAL: dict[str, Callable[[T], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1, x.sum(), x.clone(), x.abs(), -x, x.bfloat16(), x.double()),
    "in place": lambda x: (x.add_(2), x[1:])[1],
    "part in place": lambda x: (x[1:].mul_(2), x * 3)[1],
    "set": set_part,
    "views": lambda x: (
        x.view(2, 2).t().neg(),
        x.reshape(4, 1).expand(4, 3) * 2,
        x[::2] + 1,
        x.view(2, 2).flatten() * 3,
    ),
    "library": lambda x: (x.cumsum(0), torch.mm(x.view(2, 2), x.view(2, 2)), x.sort()[0], torch.fft.fft(x)),
    "moved": lambda x: (x.flip(0), x.roll(1), torch.cat([x, x * 2]), x[torch.tensor([1, 2])], torch.stack([x, -x])),
    "returned": lambda x: (x, x[1:], x.view(2, 2), torch._neg_view(x), x.resolve_neg()),
    "read, then written": lambda x: (x * 2, x.fill_(3))[0],
}
COMPLEX: dict[str, Callable[[T], Any]] = {
    "imaginary part of a conjugate": lambda z: (z * 2).conj().imag * 3,
    "the same as a result": lambda z: ((z * 2).conj().imag, z * 2),
    "the same beside its whole": lambda z: (lambda y: (y, y.conj().imag, y.conj().imag + 1))(z * 2),
    "of an input": lambda z: (z.conj().imag + 1, z.conj().imag),
    "conjugates": lambda z: (z.conj() * 2, z.conj(), z.imag + z.real, z.conj() + z),
    "written through it": lambda z: (z.conj().imag.add_(1), z * 2)[1],
}
GRADIENTS: dict[str, Callable[[T], Any]] = {
    "pointwise": lambda x: x.sin() * x,
    "matmul": lambda x: torch.mm(x.view(2, 2), x.view(2, 2).exp()),
    "views and reductions": lambda x: (x.view(2, 2).t() * 2, (x * x)[1:].sum()),
}


def leaf_of(make: Callable[[T], T]) -> Callable[[int], list[T]]:
    """An input with a gradient that has a bit; the gradient is asked for by the tensor that it is a view of."""

    def inputs(at: int) -> list[T]:
        leaf = torch.complex(numbers(at), numbers(at + 50))[:4].requires_grad_()
        x = make(leaf)
        x.leaf = leaf  # type: ignore[attr-defined]
        return [x]

    return inputs


def calls(make: Callable[[int], list[T]]) -> tuple[ways.Inputs, ...]:
    return tuple(lambda at=at: make(at) for at in PLACES)


def _listed(make: Callable[[int], T], at: int) -> list[T]:
    return [make(at)]


PROGRAMS = [
    Program(f"{name}, {kind}", fn, calls(functools.partial(_listed, make)))
    for kind, make, table in (
        ("imaginary", imaginary, REAL),
        ("negated", negated, REAL),
        ("complex", complexes, COMPLEX),
        ("conjugate", lambda at: complexes(at).conj(), COMPLEX),
    )
    for name, fn in table.items()
]
PROGRAMS += [
    Program(f"gradient, {name}, {kind}", fn, calls(leaf_of(make)), grad=True)
    for name, fn in GRADIENTS.items()
    for kind, make in (
        ("imaginary", lambda z: z.conj().imag),
        ("negated", lambda z: torch._neg_view(z.real * 2)),
    )
]


@pytest.fixture(scope="module")
def noted(request: pytest.FixtureRequest) -> ways.Everywhere:
    return ways.once(f"{HERE}:PROGRAMS", request)


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_values_behind_negative_and_conjugate_bits(program: Program, noted: ways.Everywhere) -> None:
    assert noted.wrong(program) == ""


@pytest.mark.parametrize(
    "bits",
    [torch._neg_view, lambda g: torch.complex(torch.zeros_like(g), -g).conj().imag],
    ids=["negated", "imaginary"],
)
def test_a_gradient_with_a_bit(bits: Callable[[T], T]) -> None:
    """No guard is asked for what a backward is given."""
    torch._dynamo.reset()
    fn = torch.compile(lambda x: x.sin() * x, backend="alt", options={"strict": True})
    x, g = numbers(1).requires_grad_(), numbers(2)
    want = torch.autograd.grad(x.sin() * x, x, bits(g))
    torch.testing.assert_close(torch.autograd.grad(fn(x), x, bits(g)), want)
