"""Windows of depthwise convolutions of images that generated kernels of a GPU compute, forward and both gradients.

Measured on an H200 with seven images, windows of 3x3 to 7x7 and two strides (docs/decisions/warps-of-columns.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Elements of the largest window for which a generated kernel of channels-last images is about as fast as the library's.
# With 49 the forward takes 1.4 to 1.8 times as long.
WIDEST = 36
WIDEST_GRADIENT = 49  # the same for gradients: those of images take 0.15 to 1.7 of the library's time
_FEW_CHANNELS, _SMALL_IMAGE = 32, 1024  # of 16 bits, for which the library has slow kernels for gradients of weights
_SMALL_WINDOW = 9  # elements of a window up to which the gradient of the weight reads images as they lie


def sums_weight(image: Sequence[int], window: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a generated kernel computes the gradient of the weight.

    `image`: [n, channels, height, width]. `window`: its height and width. Channels-last, with windows of 7x7, it takes
    0.04 to 0.24 of the library's time in float32. In 16 bits it takes 0.1 to 0.6 for few channels of small images, and
    else 0.5 to 3.7.
    """
    taps = math.prod(window)
    if dtype.itemsize < 4 and taps > WIDEST:
        return image[1] < _FEW_CHANNELS and math.prod(image[2:]) < _SMALL_IMAGE
    return taps <= WIDEST_GRADIENT


def reads_channels_last(window: Sequence[int]) -> bool:
    """Return whether the gradient of the weight is worth channels-last copies of plain images.

    Windows of 5x5 and 7x7 take 0.2 to 1.1 of the time of the kernel over plain images, windows of 3x3 0.3 to 1.3.
    """
    return _SMALL_WINDOW < math.prod(window) <= WIDEST_GRADIENT
