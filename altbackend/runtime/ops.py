"""Library calls without a single ATen operator, or whose ATen form is wrong for views of a shared arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Return torch.as_strided; `offset` counts from the first element of `x`. Raise RuntimeError if out of bounds."""
    shapes: list[tuple[Sequence[int], Sequence[int]]] = [(x.shape, x.stride()), (size, stride)]
    extent, window = (0 if 0 in n else 1 + sum((k - 1) * s for k, s in zip(n, t, strict=True)) for n, t in shapes)
    if window and not 0 <= offset <= extent - window:
        raise RuntimeError(
            f"as_strided of {tuple(size)} by {tuple(stride)} from {offset} on is out of bounds of {extent}"
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
    """Return torch.as_strided_scatter.

    `offset` counts from the first element of `x`, or with `in_storage` of its storage.
    """
    shapes: list[tuple[Sequence[int], Sequence[int]]] = [(x.shape, x.stride()), (size, stride)]
    extent, window = (0 if 0 in n else 1 + sum((k - 1) * s for k, s in zip(n, t, strict=True)) for n, t in shapes)
    shift = 0 if offset is None else offset - x.storage_offset() if in_storage else offset
    first, begin = max(0, -shift), max(0, shift)  # the window may begin before `x`
    storage = x.new_empty(max(first + extent, begin + window))
    out = storage.as_strided(x.shape, x.stride(), first)
    out.copy_(x)
    storage.as_strided(size, stride, begin).copy_(src)
    return out


def strided_copy(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return the elements of `x` in new storage with other strides."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
