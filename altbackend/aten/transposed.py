"""Transposed convolutions of images, for which the library's channels-last kernels are not always the faster ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_FEWEST_CHANNELS = 32  # channels from which disjoint windows have a kernel of tensor cores


def runs_fast(weight: Sequence[int], stride: tuple[int, ...], padding: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether the library computes a transposed convolution of channels-last images faster than of plain ones.

    `weight`: [channels read, channels written, height, width] of a window.
    Measured on an H100 for 168 convolutions (docs/decisions/transposed-layouts.md). In 16 bits, channels-last images
    took 0.7 of the time in the median, as they did in float32 with windows that overlap. Windows that do not took 0.5
    to 0.85 of the time with many channels, and else up to 63 times as long.
    """
    steps = stride * 2 if len(stride) == 1 else stride
    if dtype.itemsize < 4 or any(window > step for window, step in zip(weight[2:], steps, strict=True)):
        return True
    return not any(padding) and min(weight[:2]) >= _FEWEST_CHANNELS
