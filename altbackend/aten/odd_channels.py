"""Numbers of channels and filters for which the library convolves channels-last images slowly, without groups.

Its kernels of tensor cores read vectors of 16 bytes. For other numbers of channels it pads images itself, or takes
kernels without tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from altbackend.lazy_dataclass import dataclass

LEAST_DATA = 1 << 20  # elements of an image and a result: smaller ones wait for the processor, which launches a copy
_VECTOR, _MOST_TAPS = 8, 25  # channels of fast kernels; taps of the largest window that was measured
# Channels of 16 bits from which fewer than eight are padded, the taps of windows up to which they are, and the filters
# from which a convolution takes longer than moving the padding.
_FEWEST, _FEW_TAPS, _FEWEST_FILTERS = 3, 9, 16
# Channels of float32 from which padding gains, and times those of an image that is padded: more if its vectors of four
# are not aligned.
_FEWEST_OF_FLOATS, _MOST_ALIGNED, _MOST_UNALIGNED = 10, 1.3, 1.6


@dataclass(frozen=True)
class ConvolutionSizes:
    """Sizes of a convolution: [n, channels, height, width], [filters, channels, height, width of a window], steps."""

    image: Sequence[int]
    weight: Sequence[int]
    stride: Sequence[int]


def padded_channels(sizes: ConvolutionSizes, dtype: torch.dtype) -> tuple[int, int] | None:
    """Return more channels and filters, with which the library convolves faster; None if there are none.

    Measured on an H200 with 19 convolutions, in inference (docs/decisions/padded-groups.md). Padded images took 0.16 to
    0.8 of the time of the faster layout in 16 bits, and 0.49 to 0.72 in float32 with TF32.
    """
    filters, channels, *window = sizes.weight
    wide, wide_filters, taps = _to_vectors(channels), _to_vectors(filters), math.prod(window)
    data = math.prod(sizes.image) // channels * (channels + filters)
    if (wide, wide_filters) == (channels, filters) or not 1 < taps <= _MOST_TAPS or data < LEAST_DATA:
        return None
    if dtype == torch.float32:
        most = _MOST_UNALIGNED if channels % 4 else _MOST_ALIGNED
        gains = channels >= _FEWEST_OF_FLOATS and wide <= most * channels
    elif channels < _VECTOR:
        is_long = filters >= _FEWEST_FILTERS * math.prod(sizes.stride)
        gains = channels >= _FEWEST and taps <= _FEW_TAPS and is_long
    else:
        gains = True
    return (wide, wide_filters) if gains else None


def trains_padded_channels(weight: Sequence[int], wide: int) -> bool:
    """Return whether a convolution that `padded_channels` pads to `wide` channels is padded in training, too.

    A convolution and its two gradients then took 0.5 to 0.97 of the time of the faster layout in nine cases of both
    dtypes. With 12 channels and 24 filters they took 1.1 and 1.2. The backward reads the padded image, which is saved.
    """
    return wide <= _MOST_ALIGNED * weight[1]


def _to_vectors(channels: int) -> int:
    return -(-channels // _VECTOR) * _VECTOR
