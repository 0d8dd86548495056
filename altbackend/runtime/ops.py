"""Library calls that ATen has no single operator for, or whose form would be wrong on windows of a shared arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """torch.as_strided; `offset` counts from the first element of `x`. Raises RuntimeError for one beyond its last."""
    shapes: list[tuple[Sequence[int], Sequence[int]]] = [(x.shape, x.stride()), (size, stride)]
    mine, window = (0 if 0 in n else 1 + sum((k - 1) * s for k, s in zip(n, t, strict=True)) for n, t in shapes)
    if window and not 0 <= offset <= mine - window:
        raise RuntimeError(
            f"as_strided of {tuple(size)} by {tuple(stride)} from {offset} on is out of bounds of {mine}"
        )
    return x.as_strided(size, stride, x.storage_offset() + offset)


def as_strided_scatter(
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int | None = None,
    in_storage: bool = False,
) -> torch.Tensor:
    """torch.as_strided_scatter; `offset` counts from the first element of `x`, or `in_storage` from its storage's."""
    shapes: list[tuple[Sequence[int], Sequence[int]]] = [(x.shape, x.stride()), (size, stride)]
    mine, window = (0 if 0 in n else 1 + sum((k - 1) * s for k, s in zip(n, t, strict=True)) for n, t in shapes)
    away = 0 if offset is None else offset - x.storage_offset() if in_storage else offset
    first, begin = max(0, -away), max(0, away)  # the window may begin before `x`
    held = x.new_empty(max(first + mine, begin + window))
    out = held.as_strided(x.shape, x.stride(), first)
    out.copy_(x)
    held.as_strided(size, stride, begin).copy_(src)
    return out


def strided_copy(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The elements of `x` in new storage with other strides."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
