"""What the fake kernel of an operator that is not torch's own has promised of its results."""

from __future__ import annotations

import torch


def promised(
    t: torch.Tensor, op: str, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """`t`, a result of `op`, if it is what was traced. Raises AssertionError if not.

    Kernels read it by the geometry that was traced, so another one would be read beyond its end or in another order.
    """
    same = all(n <= 1 or a == b for n, a, b in zip(sizes, t.stride(), strides, strict=False))
    if t.dtype == dtype and t.shape == sizes and (same or 0 in sizes):
        return t
    raise AssertionError(
        f"{op} returned {t.dtype} {tuple(t.shape)} with strides {t.stride()}, and its fake kernel had said "
        f"{dtype} {sizes} with strides {strides}. Make the fake kernel return what the operator does "
        "(torch.library.opcheck compares them), or have the operator return what it says"
    )
