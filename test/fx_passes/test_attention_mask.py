"""Masks that depend on no input are dropped or become `is_causal`; others stay, and results equal eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.fx_passes import attention_mask
from test.compare import check, check_gradients

T = torch.Tensor
attend = F.scaled_dot_product_attention


def every_position(x: T) -> T:
    n = x.shape[-2]
    return (torch.arange(n, device=x.device) + 0 >= 0)[None, None, :, None].expand(2, 1, n, n)


def lower_triangle(x: T) -> T:
    at = torch.arange(x.shape[-2], device=x.device)
    packed = (torch.diff(at, prepend=at[:1] - 1) != 1).cumsum(-1)
    return ((at[None] <= at[:, None]) & (packed[None] == packed[:, None]))[None, None]


def additive_triangle(x: T) -> T:
    low = torch.finfo(x.dtype).min
    return torch.triu(torch.full((x.shape[-2], x.shape[-2]), low, dtype=x.dtype, device=x.device), diagonal=1)


def window(x: T) -> T:
    at = torch.arange(x.shape[-2], device=x.device)
    return (at[None] - at[:, None]).abs() < 3


def from_input(x: T) -> T:
    return (x.sum((0, 1, 3)) > -1e9).expand(x.shape[-2], -1)


def written(x: T) -> T:
    mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device)
    mask[0, 3:] = False
    return mask


def drawn(x: T) -> T:
    return torch.rand(x.shape[-2], x.shape[-2], device=x.device) >= 0


CASES = [
    (every_position, {"dropped": 1, "causal": 0}),
    (lower_triangle, {"dropped": 0, "causal": 1}),
    (additive_triangle, {"dropped": 0, "causal": 1}),
    (window, {"dropped": 0, "causal": 0}),
    (from_input, {"dropped": 0, "causal": 0}),
    (written, {"dropped": 0, "causal": 0}),
    (drawn, {"dropped": 0, "causal": 0}),
]


@pytest.mark.parametrize(("mask", "expected"), CASES, ids=[m.__name__ for m, _ in CASES])
@pytest.mark.parametrize("by_name", [True, False])
def test_masks(mask: Callable[[T], T], expected: dict[str, int], by_name: bool) -> None:
    counts = []

    def look(gm: torch.fx.GraphModule, inputs: list[T]) -> Callable[..., object]:
        counts.append(attention_mask.simplify_masks(gm))
        return gm.forward

    def fn(q: T, k: T, v: T) -> T:
        return attend(q, k, v, attn_mask=mask(q)) if by_name else attend(q, k, v, mask(q), 0.0, False)

    q, k, v = (torch.randn(2, 3, 8, 16) for _ in range(3))
    torch.testing.assert_close(torch.compile(fn, backend=look)(q, k, v), fn(q, k, v))
    assert counts == [expected]


def test_through_the_backend() -> None:
    check(lambda q, k, v: attend(q.sin(), k, v, lower_triangle(q)).cos(), *(torch.randn(2, 3, 8, 16) for _ in range(3)))


class WritesInPlace(torch.autograd.Function):
    """x -> 2x, with a backward that writes in place to a new tensor by a method."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: T) -> T:
        out = grad * 1.0
        out.add_(grad)
        return out


def test_writes_beside_a_dropped_mask_stay() -> None:
    def fn(x: T) -> T:
        total = torch.zeros_like(x)
        total.add_(x)
        return attend(x, x, WritesInPlace.apply(x), attn_mask=every_position(x)) + total

    check_gradients(fn, torch.randn(2, 1, 5, 4))


def test_a_mask_of_several_layers_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of a model share one mask; evaluating it per layer took half of the compile time of GPT-2 on a GPU."""
    read: list[torch.Size] = []
    counts = []
    meaning = attention_mask.meaning_of

    def counted(mask: T) -> str:
        read.append(mask.shape)
        return meaning(mask)

    def look(gm: torch.fx.GraphModule, inputs: list[T]) -> Callable[..., object]:
        counts.append(attention_mask.simplify_masks(gm))
        return gm.forward

    def fn(x: T) -> T:
        mask = lower_triangle(x)
        for _ in range(3):
            x = attend(x, x, x, attn_mask=mask)
        return x

    monkeypatch.setattr(attention_mask, "meaning_of", counted)
    x = torch.randn(2, 3, 8, 16)
    torch.testing.assert_close(torch.compile(fn, backend=look)(x), fn(x))
    assert counts == [{"dropped": 0, "causal": 3}]
    assert len(read) == 1
