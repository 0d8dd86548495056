"""After an error of the data, inputs that the program writes later are as they were, as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

T = torch.Tensor
GOOD, BAD = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, -3, 77])


def gather_then_add(x: T, i: T, e: T) -> T:
    y = e[i]
    x.add_(1)
    return y


def written_value(x: T, i: T, e: T) -> T:
    """The kernel of the write would compute the positions itself."""
    x.add_(e[i].sum(0))
    return x * 2


def written_elements(x: T, i: T, e: T) -> T:
    x.copy_(e[i, 0][1:])
    return x.sum()


def along_a_dimension(x: T, i: T, e: T) -> T:
    y = torch.gather(e, 0, i.view(4, 1))
    x.add_(1)
    return y


def scatter_then_add(x: T, i: T, e: T) -> T:
    y = torch.zeros(10, 3).scatter(0, i.view(4, 1), 1.0)
    x.add_(1)
    return y


def division(x: T, i: T, e: T) -> T:
    y = 5 // (i + 3)
    x.add_(1)
    return y


def count(x: T, i: T, e: T) -> T:
    y = torch.bincount(i)
    x.add_(1)
    return y


def bag(x: T, i: T, e: T) -> T:
    y = torch.nn.functional.embedding_bag(i, e, torch.tensor([0, 2]), mode="max")
    x.add_(1)
    return y


def loss(x: T, i: T, e: T) -> T:
    y = torch.nn.functional.cross_entropy(e, i)
    x.add_(1)
    return y


def factor(x: T, i: T, e: T) -> T:
    y = torch.linalg.cholesky(torch.diag(i.float() + 1))
    x.add_(1)
    return y


PROGRAMS = [
    *(gather_then_add, written_value, written_elements, along_a_dimension, scatter_then_add, division),
    *(count, bag, loss, factor),
]


def _after_error(run: Callable[[T, T, T], T], e: T) -> T:
    x = torch.ones(3)
    with pytest.raises((RuntimeError, IndexError)):
        run(x, BAD, e)
    return x


@pytest.mark.sample(4)
@pytest.mark.parametrize("host", ["python", "cpp"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_inputs_after_an_error(fn: Callable[[T, T, T], T], host: str) -> None:
    run = torch.compile(fn, backend="alt", fullgraph=True, options={"strict": True, "host": host})
    e = torch.randn(4, 3)
    ours, eager = torch.ones(3), torch.ones(3)
    torch.testing.assert_close(run(ours, GOOD, e), fn(eager, GOOD, e))
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(_after_error(run, e), _after_error(fn, e))
