"""Graphs with tensors of a GPU and of the host: copies between both run, kernels read neither from the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from test.gpu.test_cuda import build, check_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
T = torch.Tensor


def there_and_back(x: T, host: T) -> T:
    return (x * 2 + 1).cpu().exp().to(x.device) + x


def host_operand(x: T, host: T) -> T:
    return torch.softmax(x + host.to(x.device, non_blocking=True), -1)


def host_positions(x: T, host: T) -> T:
    return x[host.abs().long().sum(1).sort()[1]] * 2


def host_result(x: T, host: T) -> tuple[T, T]:
    y = (x.exp() + 1).to("cpu")
    return y * host, x.sum(-1)


def buffer_of_the_host(x: T, host: T) -> T:
    return (x.sigmoid() * host.exp().to(x) - 1).relu()


FORMS = [there_and_back, host_operand, host_positions, host_result, buffer_of_the_host]


@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: str(fn.__name__))
def test_inference(fn: Callable[[T, T], T | tuple[T, T]]) -> None:
    torch.manual_seed(0)
    x, host = torch.randn(64, 48, device="cuda"), torch.randn(64, 48)
    check_close(build(fn)(x, host), fn(x, host), fn(x.double(), host.double()))


class Through(nn.Module):
    """A linear layer around a function of one tensor of the GPU and one of the host."""

    def __init__(self, fn: Callable[[T, T], T | tuple[T, T]]) -> None:
        super().__init__()
        self.linear, self.fn = nn.Linear(48, 48), fn

    def forward(self, x: T, host: T) -> T:
        y = self.fn(self.linear(x), host)
        return y if isinstance(y, T) else y[0].to(x.device).mean(-1) + y[1]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: str(fn.__name__))
def test_around_parameters(fn: Callable[[T, T], T | tuple[T, T]], trains: bool) -> None:
    torch.manual_seed(0)
    model, x, host = Through(fn).cuda(), torch.randn(64, 48, device="cuda"), torch.randn(64, 48)

    def results(run: Callable[[T, T], T], dtype: torch.dtype) -> tuple[T, ...]:
        out = run(x.to(dtype), host.to(dtype))
        if not trains:
            return (out,)
        return out.detach(), *torch.autograd.grad(out.square().mean(), list(model.parameters()))

    with torch.set_grad_enabled(trains):
        got, want = results(build(model), torch.float32), results(model, torch.float32)
        exact = results(model.double(), torch.float64)
    check_close(got, want, exact)
