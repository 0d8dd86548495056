"""Random numbers come from eager's own generator: same values, same state afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from test.compare import compiled


def draws(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.rand(3, 5),
        torch.rand_like(x) * 2,
        torch.randn(7) + x[0, 0],
        torch.randn_like(x),
        torch.randint(0, 10, (6,)),
        torch.bernoulli(x.sigmoid()),
        torch.randperm(9),
        F.dropout(x, 0.3),
        F.dropout(x * 2, 0.5).sum(),
        torch.normal(x, 1.0),
        x.new_empty(4).uniform_(-1, 1),
        x.new_empty(4).exponential_(),
        torch.rand(3).argmax(),
    ]


def after_seed(fn: Callable[..., list[torch.Tensor]], x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(5)
    return fn(x), torch.get_rng_state()


def test_values_and_generator_state_equal_eager() -> None:
    x = torch.randn(4, 6)
    want, state = after_seed(draws, x)
    run = compiled(draws)
    for _ in range(2):
        got, mine = after_seed(run, x)
        torch.testing.assert_close(got, want)
        assert torch.equal(mine, state)


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_gradient_uses_the_mask_of_the_forward(p: float) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = F.dropout(x.sin(), p)
        return [F.dropout(y * y, p).sum(), y.sum()]

    def gradients(f: Callable[..., list[torch.Tensor]]) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(11)
        x = torch.linspace(-1, 1, 60).reshape(6, 10).requires_grad_()
        outs = f(x)
        return [*outs, *torch.autograd.grad(outs, [x])], torch.get_rng_state()

    (want, state), (got, mine) = gradients(fn), gradients(compiled(fn))
    torch.testing.assert_close(got, want)
    assert torch.equal(mine, state)
