"""Transposed convolutions of images, for which the library's channels-last kernels are not always the faster ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# channels from which disjoint windows of 2x2 have a kernel of tensor cores
_FEWEST_CHANNELS = 32
_FEWEST_PADDED, _FEWEST_WRITTEN = 64, 128  # with padding: those read and written, and those written


def runs_fast(weight: Sequence[int], stride: tuple[int, ...], padding: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether the library computes a transposed convolution of channels-last images faster than of plain ones.

    `weight`: [channels read, channels written, height, width] of a window.
    Measured on an H100 for 168 convolutions (docs/decisions/transposed-layouts.md). In 16 bits, channels-last images
    took 0.7 of the time in the median, as they did in float32 with windows that overlap. Windows of 2x2 that do not
    took 0.5 to 0.85 of the time with many channels, and else up to 63 times as long. Larger ones took 0.4 to 0.95.
    """
    steps = stride * 2 if len(stride) == 1 else stride
    if dtype.itemsize < 4 or any(window > step for window, step in zip(weight[2:], steps, strict=True)):
        return True
    if max(weight[2:]) > 2:
        return True
    if any(padding):
        return min(weight[:2]) >= _FEWEST_PADDED and weight[1] >= _FEWEST_WRITTEN
    return min(weight[:2]) >= _FEWEST_CHANNELS
