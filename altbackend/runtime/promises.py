"""Checks of the results that fake kernels of custom operators promise."""

from __future__ import annotations

import torch


def promised(
    t: torch.Tensor, op: str, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Return `t`, a result of `op`, if its geometry is the traced one. Raise AssertionError otherwise.

    Kernels read it by the traced geometry, so another one would be read out of bounds or in another order.
    """
    equal_strides = all(n <= 1 or a == b for n, a, b in zip(sizes, t.stride(), strides, strict=False))
    if t.dtype == dtype and t.shape == sizes and (equal_strides or 0 in sizes):
        return t
    raise AssertionError(
        f"{op} returned {t.dtype} {tuple(t.shape)} with strides {t.stride()}, but its fake kernel returned "
        f"{dtype} {sizes} with strides {strides}. Make the fake kernel return what the operator returns "
        "(torch.library.opcheck compares them), or change the operator"
    )
