"""Attention of float32 as tiles of products in TF32, where the graph's own products may be in TF32.

The fused kernels of the device multiply three times for each product of float32. FlexAttention's operator, which has a
generated kernel of tensor cores here, multiplies once, as the products do that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask

T = torch.Tensor
_WHOLE = 1 << 30  # positions of the one block that no mask cuts


def attention_in_tf32(query: T, key: T, value: T, mask: T | None, causal: bool, scale: float) -> T:
    """Return softmax(query key^T * scale + mask) value; no gradient reaches the mask.

    The operands are float32 of four dimensions: (batch, heads, positions, features). `mask`, added to the scores
    (batch, heads, positions of queries, positions of keys), has up to four, which are broadcast.
    `causal`: hide the keys behind each query's position, in place of a mask.
    """
    captured: tuple[T, ...] = ()
    score: Callable[..., T] = _unmasked
    if mask is not None:
        varying = tuple(k - mask.dim() for k, n in enumerate(mask.shape) if n != 1)
        captured = (mask.squeeze(tuple(k for k, n in enumerate(mask.shape) if n == 1)),)
        score = _masked(varying)
    elif causal:
        score = _causal
    counts = torch.ones(1, 1, 1, dtype=torch.int32, device=query.device)
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=query.device)
    # one block of all positions: there is none to leave out
    block = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=_WHOLE, seq_lengths=(1, 1), compute_q_blocks=False)
    block.q_num_blocks, block.q_indices = counts, indices  # of the gradient; torch would transpose the lists in kernels
    attend = torch.ops.higher_order.flex_attention
    results: tuple[T, ...] = attend(query, key, value, score, block.as_tuple(), scale, {}, captured, ())
    return results[0]


def _unmasked(score: T, *positions: T) -> T:
    return score


def _causal(score: T, batch: T, head: T, row: T, column: T) -> T:
    return torch.where(row >= column, score, float("-inf"))


def _masked(varying: tuple[int, ...]) -> Callable[..., T]:
    """Return a score function that adds the element of a mask which has the dimensions `varying` of the scores."""

    def score(score: T, *positions: T) -> T:
        *places, mask = positions
        return score + mask[tuple(places[k] for k in varying)]

    return score
