"""Attention as programs of users spell it: each is fused once, with eager's results and gradients; others stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test.compare import difference
from test.fx_passes.test_attention import SCALE, B, D, Fuse, H, L, S, T, heads

Inputs = Callable[[], Sequence[T]]


def grouped_heads() -> list[T]:
    return [torch.randn(B, H, L, D), torch.randn(B, 2, S, D), torch.randn(B, 2, S, D)]


def images() -> list[T]:
    return heads(B, D, 30)


def with_padding() -> list[T]:
    keep = torch.ones(B, 1, 1, S, dtype=torch.bool)
    keep[0, ..., -2:], keep[1] = False, False
    return [*heads(), keep]


def values_first(q: T, k: T, v: T) -> T:
    """The attention block of image decoders: values (batch, channels, positions) times transposed weights."""
    weights = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * D**-0.5, dim=2).permute(0, 2, 1)
    return torch.bmm(v, weights)


def values_first_transposed(q: T, k: T, v: T) -> T:
    return v.mT @ F.dropout((q @ k.mT).softmax(-1), 0.1, training=False).transpose(-1, -2)


def channels_first(q: T, k: T, v: T) -> T:
    scale = D**-0.25
    weights = torch.einsum("bct,bcs->bts", q * scale, k * scale)
    return torch.einsum("bts,bcs->bct", torch.softmax(weights.float(), dim=-1).type(weights.dtype), v)


def grouped_equation(q: T, k: T, v: T) -> T:
    scores = torch.einsum("bkgld,bksd->bkgls", q.view(B, 2, 2, L, D), k) * SCALE
    return torch.einsum("bkgls,bksd->bkgld", scores.softmax(-1), v).reshape(B, H, L, D)


def temperature(q: T, k: T, v: T, t: T) -> T:
    return (q @ k.mT * t).softmax(-1) @ v


def divided_by_temperature(q: T, k: T, v: T, t: T) -> T:
    return (q @ k.mT / t).softmax(-1) @ v


def written_in_place(q: T, k: T, v: T) -> T:
    scores = torch.matmul(q, k.transpose(2, 3))
    scores.mul_(SCALE)
    scores.masked_fill_(torch.ones(L, L).triu(1).bool(), -math.inf)
    return torch.matmul(F.softmax(scores, -1), v)


def chosen_from_alike(q: T, k: T, v: T) -> T:
    scores = q @ k.mT * SCALE
    seen = torch.arange(L)[:, None] >= torch.arange(S)[None]
    return torch.where(seen, scores, torch.full_like(scores, -math.inf)).softmax(-1) @ v


def zeroed(q: T, k: T, v: T, keep: T) -> T:
    """Attention of speech models: hidden weights are zero, in rows that are hidden in full too."""
    hidden = ~keep
    scores = (q @ k.mT * SCALE).masked_fill(hidden, torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(hidden, 0.0) @ v


def infinite_zeroed(q: T, k: T, v: T, keep: T) -> T:
    hidden = ~keep
    return (q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0) @ v


def chosen_zeros(q: T, k: T, v: T, keep: T) -> T:
    weights = torch.where(keep, q @ k.mT, -1e30).softmax(-1)
    return torch.where(keep, weights, 0.0) @ v


def clamped_to_numbers(q: T, k: T, v: T) -> T:
    numbers = torch.finfo(q.dtype)
    return torch.clamp(q @ k.mT * SCALE, min=numbers.min, max=numbers.max).softmax(-1) @ v


def special(q: T, k: T, v: T) -> T:
    return torch.special.softmax(q @ k.mT, -1) @ v


def mapped_mask(q: T, k: T, v: T) -> T:
    at = torch.arange(L)
    keep = torch.vmap(lambda row: row >= at)(at)
    return torch.where(keep, q @ k.mT, -math.inf).softmax(-1) @ v


def unread_view(q: T, k: T, v: T) -> T:
    weights = (q @ k.mT).softmax(-1)
    weights.view(B * H, L, S).unsqueeze(0)
    return weights @ v


def wide_scores(q: T, k: T, v: T) -> T:
    """GPT-J's: queries and keys of 16 bits are multiplied in float32."""
    seen = torch.tril(torch.ones(L, L, dtype=torch.bool))
    scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2)) / math.sqrt(D)
    scores = torch.where(seen, scores, torch.full([], torch.finfo(scores.dtype).min))
    return torch.matmul(F.softmax(scores, dim=-1).to(v.dtype), v)


SPELLINGS: list[tuple[Callable[..., T], Inputs]] = [
    *((fn, images) for fn in (values_first, channels_first)),
    (values_first_transposed, heads),
    (grouped_equation, grouped_heads),
    (temperature, lambda: [*heads(), torch.randn(())]),
    (divided_by_temperature, lambda: [*heads(), torch.rand(1) + 1]),
    *((fn, heads) for fn in (written_in_place, chosen_from_alike, clamped_to_numbers, special)),
    *((fn, heads) for fn in (mapped_mask, unread_view)),
    *((fn, with_padding) for fn in (zeroed, infinite_zeroed, chosen_zeros)),
    (wide_scores, lambda: [x.bfloat16() for x in heads()]),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("fn", "inputs"), SPELLINGS, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("on", ["cpu", "cuda"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_spelling(fn: Callable[..., T], inputs: Inputs, on: str, training: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend, given, results = Fuse(on=on), inputs(), []
    functions: list[Callable[..., T]] = [torch.compile(fn, backend=backend, fullgraph=True), fn]
    for f in functions:
        own = [x.clone().requires_grad_(training and x.is_floating_point()) for x in given]
        result = f(*own)
        if training:
            result.backward(torch.linspace(-1, 1, result.numel()).to(result.dtype).view(result.shape))
        results.append([result.detach(), *(x.grad for x in own if x.requires_grad)])
    assert backend.fused == 1, backend.kept()
    for got, want in zip(*results, strict=True):
        assert got is not None
        assert want is not None
        assert difference(got, want, None, 2e-2 if want.dtype == torch.bfloat16 else 2e-5) == ""


# --- near misses


def zeroed_elsewhere(q: T, k: T, v: T, keep: T) -> T:
    scores = (q @ k.mT).masked_fill(~keep, -math.inf)
    return scores.softmax(-1).masked_fill(~keep.mT, 0.0) @ v


def zeroed_beside_a_bias(q: T, k: T, v: T, keep: T) -> T:
    """The bias may hide what the mask does not: such rows are no numbers."""
    scores = (q @ k.mT + q[..., :1]).masked_fill(keep, -math.inf)
    return scores.softmax(-1).masked_fill(keep, 0.0) @ v


def masked_after(q: T, k: T, v: T, keep: T) -> T:
    return (q @ k.mT).softmax(-1).masked_fill(keep, 0.0) @ v


def over_other_dims(q: T, k: T, v: T, keep: T) -> T:
    return (q @ k.mT).softmax(1) @ v


def rows_contracted(q: T, k: T, v: T, keep: T) -> T:
    return v.mT @ (q @ k.mT).softmax(-1)


def normalised_again(q: T, k: T, v: T, keep: T) -> T:
    weights = (q @ k.mT).softmax(-1)
    return (weights / weights.sum(-1, keepdim=True)) @ v


def clamped_at_zero(q: T, k: T, v: T, keep: T) -> T:
    return (q @ k.mT).clamp(min=0.0).softmax(-1) @ v


def written_through_a_view(q: T, k: T, v: T, keep: T) -> T:
    scores = q @ k.mT
    scores.view(B * H, L, S).mul_(0.5)
    return scores.softmax(-1) @ v


def read_before_the_write(q: T, k: T, v: T, keep: T) -> T:
    scores = q @ k.mT
    before = scores.sum()
    scores.mul_(0.5)
    return scores.softmax(-1) @ v + before


def written_after(q: T, k: T, v: T, keep: T) -> tuple[T, T]:
    scores = q @ k.mT
    result = scores.softmax(-1) @ v
    scores.mul_(0.5)
    return result, scores


def mapped(q: T, k: T, v: T, keep: T) -> T:
    return torch.vmap(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(q, k, v)


NEAR = [
    *(zeroed_elsewhere, zeroed_beside_a_bias, masked_after, over_other_dims, rows_contracted, normalised_again),
    *(clamped_at_zero, written_through_a_view, read_before_the_write, written_after, mapped),
]


@pytest.mark.parametrize("fn", NEAR, ids=lambda fn: fn.__name__)
def test_near_misses_stay(fn: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    backend, inputs = Fuse(), with_padding()
    got, want = torch.compile(fn, backend=backend, fullgraph=True)(*inputs), fn(*inputs)
    assert backend.fused == 0
    torch.testing.assert_close(got, want, equal_nan=True)


def long_program(q: T, k: T, v: T) -> T:
    x = (q @ k.mT).softmax(-1) @ v
    for _ in range(40):
        x = x.relu() + x.sin()
    return x


def test_what_follows_an_attention_is_not_searched() -> None:
    """A search over all paths of this program would not end."""
    torch._dynamo.reset()
    backend = Fuse()
    torch.compile(long_program, backend=backend, fullgraph=True)(*heads())
    assert backend.fused == 1
