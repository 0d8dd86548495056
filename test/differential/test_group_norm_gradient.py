"""Gradients of group and instance normalisations where the mean of the input is large."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.fx_passes import instance_norm

T = torch.Tensor
CHANNELS = 8
# ratio of the input's mean to its deviation; 16-bit floats hold no deviation beside a larger mean
RATIOS = {torch.float32: (0.0, 1e2, 1e4, 1e6), torch.bfloat16: (0.0, 1e2), torch.float16: (0.0, 1e2)}


def gradients(fn: Callable[..., T], inputs: tuple[T, T, T], dy: T) -> list[T]:
    x, w, b = (t.detach().requires_grad_() for t in inputs)
    return list(torch.autograd.grad(fn(x, w, b), (x, w, b), dy))


def in_float64(x: T, w: T, dy: T, groups: int) -> list[T]:
    """The gradients by their definition: no difference of large terms but `x - mean`, which float64 holds."""
    n, c = x.shape[:2]
    rows, g = x.double().reshape(n, groups, -1), dy.double().reshape(n, c, -1)
    centred = rows - rows.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    y, gw = centred * rstd, (g * w.double().view(1, c, 1)).reshape(n, groups, -1)
    dx = (gw - gw.mean(-1, keepdim=True) - y * (gw * y).mean(-1, keepdim=True)) * rstd
    return [dx.reshape(x.shape), (g * y.reshape(n, c, -1)).sum((0, 2)), g.sum((0, 2))]


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("groups", [2, CHANNELS])
def test_error_is_that_of_eager(groups: int, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_norm, "DEVICES", ("cpu", "cuda"))

    def by_groups(x: T, w: T, b: T) -> T:
        return F.instance_norm(x, None, None, w, b) if groups == CHANNELS else F.group_norm(x, groups, w, b)

    compiled = torch.compile(by_groups, backend="alt", options={"strict": True})
    for dtype, ratios in RATIOS.items():
        for ratio in ratios:
            torch.manual_seed(0)
            x = (torch.randn(3, CHANNELS, 9, 9) + ratio).to(dtype)
            x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
            w, b, dy = torch.randn(CHANNELS).to(dtype), torch.zeros(CHANNELS).to(dtype), torch.randn(x.shape).to(dtype)
            exact = in_float64(x, w, dy, groups)
            eager, ours = (gradients(fn, (x, w, b), dy) for fn in (by_groups, compiled))
            for got, plain, want in zip(ours, eager, exact, strict=True):
                unit = torch.finfo(dtype).eps * want.norm().item()  # one rounding of each element
                assert (got - want).norm() <= 1.5 * (plain - want).norm() + unit, (dtype, ratio)


def test_without_weights_and_with_sizes_that_vary() -> None:
    compiled = torch.compile(lambda x: F.group_norm(x, 2), backend="alt", dynamic=True, options={"strict": True})
    for size in (4, 7):
        x = torch.randn(size, 4, size, requires_grad=True)
        expected, actual = (
            torch.autograd.grad(fn(x).pow(3).sum(), x) for fn in (lambda x: F.group_norm(x, 2), compiled)
        )
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(2, 4, 3, 0), (0, 4, 3, 3)], ids=["no points", "no images"])
def test_empty_inputs(sizes: tuple[int, ...]) -> None:
    """Eager's gradient of the weight is NaN where a group has no elements."""

    def fn(x: T, w: T, b: T) -> T:
        return F.group_norm(x, 2, w, b)

    inputs = torch.randn(sizes), torch.randn(4), torch.randn(4)
    compiled = torch.compile(fn, backend="alt", options={"strict": True})
    expected, actual = (gradients(f, inputs, torch.randn(sizes)) for f in (fn, compiled))
    torch.testing.assert_close(actual, expected, equal_nan=True)
