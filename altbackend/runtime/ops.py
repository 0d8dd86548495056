"""Library calls that ATen's own form would get wrong on windows of a shared arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def as_strided_scatter(
    x: torch.Tensor, src: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """torch.as_strided_scatter with `offset` counted from the first element of `x`, not of its storage."""
    out = x.clone()
    out.as_strided(size, stride, out.storage_offset() + (offset or 0)).copy_(src)
    return out
