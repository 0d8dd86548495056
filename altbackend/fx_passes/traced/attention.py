"""Attention in ATen graphs, which Dynamo did not capture as such: of `torch.func.grad`, and of traced programs.

The captured graph is the first place where attention is fused (`attention/`). A program that differentiates a function
itself has forward and backward in one graph; the joint forms find both. No joint form has a mask: where one hides a row
by finite numbers, the fused kernel's gradient is wrong (`attention/hidden_rows.py`).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..attention.gates import separate_is_faster
from ..graph import val
from ..pattern.match import Match
from ..pattern.trace import fwd_only, joint_fwd_bwd
from .family import Examples, Form

T = torch.Tensor
_SCALE = {"scale": 0.373}  # a number that no search function contains otherwise


def plain(query: T, key: T, value: T) -> T:
    """Compute attention with scores that are not scaled."""
    return torch.matmul(torch.softmax(torch.matmul(query, key.transpose(-2, -1)), -1), value)


def fused_plain(query: T, key: T, value: T) -> T:
    """Compute `plain` by the fused kernel."""
    return F.scaled_dot_product_attention(query, key, value, scale=1.0).contiguous()


def scaled(query: T, key: T, value: T, scale: float) -> T:
    """Compute attention with scores times a number."""
    return torch.matmul(torch.softmax(torch.matmul(query, key.transpose(-2, -1)) * scale, -1), value)


def fused_scaled(query: T, key: T, value: T, scale: float) -> T:
    """Compute `scaled` by the fused kernel."""
    return F.scaled_dot_product_attention(query, key, value, scale=scale).contiguous()


def divided(query: T, key: T, value: T, scale: float) -> T:
    """Compute attention with scores divided by a number."""
    return torch.matmul(torch.softmax(torch.matmul(query, key.transpose(-2, -1)) / scale, -1), value)


def fused_divided(query: T, key: T, value: T, scale: float) -> T:
    """Compute `divided` by the fused kernel."""
    return F.scaled_dot_product_attention(query, key, value, scale=1 / scale).contiguous()


def masked(query: T, key: T, value: T, mask: T, scale: float) -> T:
    """Compute attention with scores times a number plus a mask."""
    return torch.matmul(torch.softmax(torch.matmul(query, key.transpose(-2, -1)) * scale + mask, -1), value)


def fused_masked(query: T, key: T, value: T, mask: T, scale: float) -> T:
    """Compute `masked` by the fused kernel; a row that only holds -inf gives NaN, as the softmax does."""
    result = F.scaled_dot_product_attention(query, key, value, mask, scale=scale).contiguous()
    hidden = mask.amax(-1, keepdim=True) == -math.inf
    return result * torch.where(hidden, math.nan, 1.0).to(result.dtype)


def takes(match: Match) -> bool:
    """Return whether the fused kernel of a CPU takes the operands of a match, and is faster."""
    query, key, value = (val(match.kwargs[name]) for name in ("query", "key", "value"))
    mask = val(match.kwargs["mask"]) if "mask" in match.kwargs else None
    if query.dim() != 4 or query.dtype not in (torch.float32, torch.float64) or query.device.type != "cpu":
        return False
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] or any(x.stride(-1) != 1 for x in (query, key, value)):
        return False
    return mask is None or (mask.dim() in (2, 4) and mask.dtype == query.dtype)


def is_faster(match: Match) -> bool:
    """Return whether the fused kernel is faster than separate ones for the sizes of a match."""
    query, key = val(match.kwargs["query"]), val(match.kwargs["key"])
    return not separate_is_faster((*query.shape[:-1], key.shape[-2]), query.dtype)


def _heads(permuted: bool, masks: bool, gradients: bool) -> Examples:
    """Return a function that makes query, key and value; permuted ones are views of (batch, positions, heads, ...)."""

    def examples() -> list[T]:
        sizes = (2, 8, 4, 16) if permuted else (2, 4, 8, 16)
        out = [torch.empty(sizes, requires_grad=gradients) for _ in range(3)]
        out = [x.detach().transpose(1, 2).requires_grad_(gradients) for x in out] if permuted else out
        return [*out, torch.empty(2, 1, 8, 8)] if masks else out

    return examples


def _forms() -> tuple[Form, ...]:
    forms: list[Form] = []
    for joint in (False, True):
        for permuted in (False, True):
            suffix = "_of_views" * permuted + "_joint" * joint
            heads, with_mask = _heads(permuted, False, joint), _heads(permuted, True, joint)
            trace = joint_fwd_bwd if joint else fwd_only
            forms += [
                Form(f"plain{suffix}", plain, fused_plain, heads, trace, {}, takes),
                Form(f"scaled{suffix}", scaled, fused_scaled, heads, trace, _SCALE, takes),
                Form(f"divided{suffix}", divided, fused_divided, heads, trace, _SCALE, takes),
            ]
            if not joint:
                forms.append(Form(f"masked{suffix}", masked, fused_masked, with_mask, trace, _SCALE, takes))
    return tuple(forms)


FORMS = _forms()
