"""Tell the float32 calls that are too small for oneDNN, which takes 30 to 40 us to start inside a compiled call.

ATen starts a product in 5 us and its own convolutions in 20. Measured on two cores (AVX-512) as whole compiled calls: a
linear of 32 rows, 128 to 160 columns, takes 37 us in ATen and 73 in oneDNN with packed weights; of 128 rows and 256
columns, 124 and 136; of 32 rows and 512 columns, 149 and 139. Products of 16 bits start equally slowly both ways.
"""

from __future__ import annotations

import math

import torch

# Multiplications up to which ATen is faster: a product of few rows reads its weights once, which oneDNN does better.
SMALL_LINEAR, SMALL_LINEAR_BY_ROW, MANY_ROWS = 600_000, 170_000, 32
# With so many rows, an early start gains less: 4,800 rows, 64 to 8 columns, take 81 us in ATen and 59 in oneDNN.
SMALL_TALL_LINEAR, TALL = 2_200_000, 512
SMALL_CONVOLUTION = 2_000_000
SMALL_CONVOLUTION_3D = 200_000  # ATen's own kernel over volumes is slower
_NATIVE_ELEMENTS = 20_480  # of an image that ATen itself leaves to its own kernels


def is_small_linear(x: torch.Tensor, wt: torch.Tensor) -> bool:
    """Return whether ATen is faster for `x` (rows, depth) times `wt` (depth, width)."""
    rows, depth, width = (size_hint(s) for s in (*x.shape, wt.shape[1]))
    if x.dtype != torch.float32 or rows is None or depth is None or width is None:
        return False
    most = SMALL_LINEAR + SMALL_LINEAR_BY_ROW * min(rows, MANY_ROWS)
    return rows * depth * width <= (SMALL_TALL_LINEAR if rows >= TALL else most)


def is_small_convolution(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, transposed: bool) -> bool:
    """Return whether ATen has a kernel of its own for a convolution of one group, and is faster."""
    sizes = [size_hint(s) for s in (*x.shape, *result.shape)]
    static_sizes = [s for s in sizes if s is not None]
    if x.dtype != torch.float32 or len(static_sizes) < len(sizes) or static_sizes[0] != 1:
        return False
    if min(weight.shape[-2:]) > 3 or math.prod(static_sizes[:4]) > _NATIVE_ELEMENTS:
        return False
    points = math.prod(static_sizes[: x.dim()] if transposed else static_sizes[x.dim() :])
    most = SMALL_CONVOLUTION_3D if x.dim() == 5 else SMALL_CONVOLUTION
    return points * math.prod(weight.shape[1:]) <= most


def size_hint(size: int | torch.SymInt) -> int | None:
    """Return a size, or for a symbol that of the first call; None if data decides it."""
    return size if isinstance(size, int) else size.node.hint
