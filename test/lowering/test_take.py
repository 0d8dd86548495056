"""take and ldexp: generated kernels replace a library call."""

from __future__ import annotations

import pytest
import torch

from altbackend.report import stats
from test.compare import check, check_gradients


@pytest.mark.parametrize("where", [torch.tensor([[0, -1], [5, 3]]), torch.tensor(4)], ids=["many", "one"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_take(where: torch.Tensor, dynamic: bool) -> None:
    before = stats.snapshot()
    check(lambda x, i: torch.take(x.t(), i) * 2, torch.randn(3, 4), where, dynamic=dynamic)
    assert (stats.snapshot() - before).library_calls == 0


def test_take_out_of_range() -> None:
    run = torch.compile(lambda x, i: torch.take(x, i), backend="alt", options={"strict": True})
    with pytest.raises(IndexError):
        run(torch.randn(3, 4), torch.tensor([12]))


def test_ldexp() -> None:
    check_gradients(lambda x: torch.ldexp(x, torch.arange(-3, 4)), torch.randn(2, 7))
