"""Convolutions in narrow groups or of few filters, which generated kernels of a GPU compute faster than the library.

Measured on an H100 with 17 convolutions of images in float32 with TF32 and in bfloat16, plain and channels-last
(docs/decisions/narrow-groups.md). Groups of up to three channels took 0.2 to 0.9 of the faster library call; wider
groups did so where the library has no kernel of tensor cores for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Channels of a group for which the library has channels-last kernels, which it has for narrow groups of several.
_FAST_GROUPS, _NARROW_GROUP, _FEWEST_CHANNELS = (8, 16, 32, 64), 4, 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Products of a result: with 50 a kernel takes Triton about a second; a program with 150 took 86 s to its first result.
MOST_TERMS = 54  # two channels with windows of 3x3x3
_SMALL_WINDOW = 9  # taps of a depthwise window of 16 bits for which plain images are as fast
_WIDE_WINDOW, _WIDEST_GROUP = 49, 64  # taps from which the library's choice is poor, and channels for which it is
# Channels of a group that a loop adds, by spatial dimensions, and taps of volumes for which the library uses tensor
# cores. Loops add 3.5e12 products a second, the library adds 9e12 with tensor cores, and else 0.1e12 to 1e12.
_WIDEST_LOOP, _SMALL_VOLUME = {1: 0, 2: 8, 3: 16}, 27
# The same for float32: two drawn programs with groups of 16 and windows of 5x5x5 took 1.2 and 1.5 times as long.
_WIDEST_OF_FLOATS = 12
_FAST_GROUPS_OF_FLOATS = 8  # groups of four channels of float32 volumes from which the library has a fast kernel
# Products of an image's result that a loop adds, and channels of 16 bits up to which it is faster than the library.
_MOST_LOOPED, _FEW_CHANNELS = 400, 24
# Without groups: products of all filters at a point, by the bytes of an element, that a kernel writes out, and that it
# adds in a loop over up to so many channels. Then those of windows of one element, and of loops over more channels.
_MOST_OF_FILTERS, _LOOPED_OF_FILTERS, _LOOPED_CHANNELS = {4: 330, 2: 450}, {4: 450, 2: 650}, {4: 3, 2: 4}
_MOST_OF_POINTS, _LOOPED_OF_CHANNELS = 64, 150
# Rows of windows, for all pairs of a filter and a channel, and their products, by the bytes of an element, for which
# kernels sum gradients.
_MOST_SUMMED, _MOST_PRODUCTS = {4: 48, 2: 75}, {4: 450, 2: 250}
_MANY_GROUPS = 4  # groups from which running one after the other takes longer than converting the image
_DOUBLE_GROUP = 128  # channels of a group that the library runs as two of 64
_SMALL_SQUARE, _LARGE_SQUARE = [3, 3], [5, 5]  # windows of padded groups
_MOST_SAVED = 1.5  # times the channels of an image, for which a padded one is saved
# Groups from which padded ones are faster, by their channels: the library has slow kernels for fewer.
_LEAST_GROUPS_OF_FLOATS, _LEAST_GROUPS = {8: 4}, {8: 4, 16: 8}
# Groups from which padded ones are faster than a generated kernel, by the bytes of an element: with small windows, and
# with others.
_LEAST_SMALL, _LEAST_LARGE = {4: 4, 2: 8}, {4: 4, 2: 4}
# Groups that the library runs one after the other, and taps, for which a converted image was measured.
_LEAST_WIDTH, _MOST_GROUPS, _MOST_TAPS = 12, 16, 25


def has_library_kernel(channels: int, groups: int) -> bool:
    """Return whether the library has channels-last kernels of tensor cores for images in groups."""
    width = channels // groups
    return width in _FAST_GROUPS or (width == _NARROW_GROUP and channels >= _FEWEST_CHANNELS)


def runs_fast(channels: int, groups: int, taps: int, dtype: torch.dtype) -> bool:
    """Return whether the library convolves channels-last images in groups no slower than plain ones, without gradients.

    `taps`: the elements of a window. Measured for windows from 1x1 to 7x7 in 16 and 32 bits
    (docs/decisions/narrow-groups.md): channels-last images took 0.1 to 1.1 of the time of plain ones where this holds,
    and else up to 19 times as long.
    """
    width = channels // groups
    if width == _DOUBLE_GROUP and taps < _WIDE_WINDOW:
        return dtype.itemsize < 4 or taps > 1
    if not has_library_kernel(channels, groups) or (taps >= _WIDE_WINDOW and width == _WIDEST_GROUP):
        return False
    if dtype.itemsize < 4:
        return True
    if taps == 1:
        return width == 32
    if width == _NARROW_GROUP:
        return taps < _WIDE_WINDOW
    return not (width == 16 and taps == 25 and groups >= _MANY_GROUPS)


def trains_fast(channels: int, groups: int, dtype: torch.dtype) -> bool:
    """Return whether the library trains channels-last images in groups no slower than plain ones.

    Measured on an H200 for 2 to 32 groups of 4 to 128 channels (docs/decisions/narrow-groups.md). A convolution and
    its two gradients took 0.5 to 0.9 of the time of plain images with groups of 128. In float32, they took 0.1 to 1.1
    with 2 or 4 groups of 48, of which plain ones have slow kernels, and 0.4 to 0.8 with 2 or 4 groups of 24.
    """
    width = channels // groups
    few = groups <= _MANY_GROUPS and dtype == torch.float32 and width in (24, 48)
    return has_library_kernel(channels, groups) or width == _DOUBLE_GROUP or few


def trains_as_it_lies(channels: int, groups: int) -> bool:
    """Return whether an image of 16 bits in groups trains in the layout that it has.

    Two groups of 48 channels of 16x280x280 and windows of 5x5 took 11.7 ms channels-last where TorchInductor, which
    leaves plain images plain, took 7.8.
    """
    return groups <= _MANY_GROUPS and channels // groups == 48


def padded_width(image: Sequence[int], weight: Sequence[int], dtype: torch.dtype) -> int | None:
    """Return the channels of a wider group that the library convolves faster, with the zeros; None if there are none.

    `image`: [n, channels, height, width]; `weight` as in `in_generated_kernel`. Measured on an H200 for 2, 4 and 8
    groups of 5 to 96 channels, four sizes of images and windows of 3x3 and 5x5 (docs/decisions/padded-groups.md).
    Padded images took 0.17 to 1.0 of the time of the faster other layout in 237 cases, and 1.5 to 1.9 in three.
    Of 240 cases measured later, with groups of 5, 10, 18, 36 and 72 channels, it takes 178: 0.19 to 0.95.
    """
    filters, width, *window = weight
    wide = next((w for w in (*_FAST_GROUPS, _DOUBLE_GROUP) if w >= width), width)
    if wide == width or wide >= 2 * width or filters != image[1] or window not in (_SMALL_SQUARE, _LARGE_SQUARE):
        return None
    if window == _LARGE_SQUARE:
        is_smaller = min(image[2:]) < window[0]
        if wide > _WIDEST_GROUP or (wide == _WIDEST_GROUP and is_smaller):
            return None
    least = _LEAST_GROUPS_OF_FLOATS if dtype == torch.float32 else _LEAST_GROUPS
    return wide if filters // width >= least.get(wide, 2) else None


def pads_generated(groups: int, weight: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether the groups that `padded_width` pads are faster so than in a generated kernel.

    Measured on an H200 with groups of 5 to 7 channels over images of 56x56 (docs/decisions/few-channels.md). With the
    copies around them, padded ones took 0.5 to 1.05 of the time of the kernel where this holds.
    """
    least = _LEAST_SMALL if list(weight[2:]) == _SMALL_SQUARE else _LEAST_LARGE
    return groups >= least[dtype.itemsize]


def trains_padded(weight: Sequence[int], wide: int) -> bool:
    """Return whether a convolution that `padded_width` pads to `wide` channels is padded in training, too.

    With windows of 3x3, a convolution and its two gradients took 0.62 of the time of the faster layout in the median of
    90 cases, 0.17 to 1.0 in 85 of them and up to 1.5 in five. With windows of 5x5 they took 0.15 to 1.2. The backward
    reads the padded image, which is therefore saved.
    """
    return list(weight[2:]) == _SMALL_SQUARE and wide <= _MOST_SAVED * weight[1]


def takes_any_layout(channels: int, groups: int, taps: int, dtype: torch.dtype) -> bool:
    """Return whether the library converts a channels-last image in groups in about the time that our two copies take.

    It then runs groups of the converted image one after the other. Measured on an H100 for 2 to 8 groups of 12 to 96
    channels, windows of 1x1 to 5x5, in float32 with TF32 (docs/decisions/narrow-groups.md): channels-last images took
    0.4 to 1.5 of the time of plain ones with two copies. 22 of 144 plain ones took more than twice, and up to 40 times,
    as long as channels-last ones: the library has a slow kernel for them. In 16 bits, our copies are part of
    the kernels around them: RegNetY-16 took 16.6 ms without them, and 11.6 with them.
    """
    if dtype.itemsize < 4:
        return False
    width = channels // groups
    return width >= _LEAST_WIDTH and width % 4 == 0 and groups <= _MOST_GROUPS and taps <= _MOST_TAPS


def is_depthwise_image(channels: int, groups: int, weight: Sequence[int]) -> bool:
    """Return whether each channel of an image has one filter of its own; `weight` as in `in_generated_kernel`."""
    return groups == channels == weight[0] and len(weight) == 4 and groups > 1


def in_plain_kernel(weight: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a generated kernel computes a depthwise convolution of images that are not channels-last.

    Measured on an H200 with six sizes of images, windows from 3x3 to 7x7, strides of 1 and 2 (docs/decisions/
    plain-depthwise.md): it takes 0.4 to 1.0 of the time of the library's plain kernels.
    """
    return dtype in _DTYPES and math.prod(weight[1:]) <= MOST_TERMS


def gains_channels_last(weight: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a lone depthwise convolution of plain images is worth a channels-last copy of its image.

    With a mean behind it, the plain kernel takes 0.2 to 1.05 of the time of copy and channels-last kernel. In 16 bits,
    windows of 5x5 and 7x7 take 0.6 to 1.5.
    """
    return not in_plain_kernel(weight, dtype) or (dtype.itemsize < 4 and math.prod(weight[1:]) > _SMALL_WINDOW)


def _has_few_filters(weight: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a generated kernel computes a convolution without groups, of few channels and few filters.

    Measured on an H200 with 44 convolutions of sequences, images and volumes (docs/decisions/few-channels.md). Where
    this holds, it takes 0.07 to 1.0 of the library's time in the same layout, 0.31 in the median. The library's tiles
    have room for many more filters.
    """
    filters, channels, *window = weight
    taps = math.prod(window)
    products = filters * channels * taps
    if taps == 1:
        return products <= _MOST_OF_POINTS
    if channels * taps <= MOST_TERMS:
        return products <= _MOST_OF_FILTERS[dtype.itemsize]
    if not _WIDEST_LOOP[len(window)]:
        return False
    is_narrow = channels <= _LOOPED_CHANNELS[dtype.itemsize]
    most = _LOOPED_OF_FILTERS[dtype.itemsize] if is_narrow else _LOOPED_OF_CHANNELS
    return products <= most


def sums_weight_gradient(groups: int, weight: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a generated kernel sums the gradient of the weight of a convolution of images.

    `weight`: [filters, channels, height and width of a window]. Programs read the image for each pair of a filter and a
    channel, and each row of a window. Measured on an H200 with 16 convolutions (docs/decisions/few-channels.md). It
    takes 0.19 to 1.6 of the library's time in the same layout, 0.51 in the median.
    """
    few = groups == 1 and len(weight) == 4 and dtype in _DTYPES and _has_few_filters(weight, dtype)
    if not few or math.prod(weight[:3]) > _MOST_SUMMED[dtype.itemsize]:
        return False
    return math.prod(weight) <= _MOST_PRODUCTS[dtype.itemsize]


def in_generated_kernel(channels: int, groups: int, weight: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether a generated kernel computes a convolution in groups or of few filters, in its image's layout.

    `weight`: [channels that are written, channels of a group, taps of each dimension]. Depthwise convolutions of images
    are not meant: they have a lowering of their own for channels-last images, and `in_plain_kernel` for plain ones.
    """
    if dtype not in _DTYPES or is_depthwise_image(channels, groups, weight):
        return False
    if groups == 1:
        return _has_few_filters(weight, dtype)
    rank, width, taps = len(weight) - 2, weight[1], math.prod(weight[2:])
    if width * taps <= MOST_TERMS:
        return not runs_fast(channels, groups, taps, dtype)
    if rank == 3 and taps <= _SMALL_VOLUME:
        is_fast = dtype == torch.float32 and groups >= _FAST_GROUPS_OF_FLOATS
        return width < _NARROW_GROUP or (width == _NARROW_GROUP and not is_fast)
    if width > _WIDEST_LOOP[rank] or (dtype == torch.float32 and width > _WIDEST_OF_FLOATS):
        return False
    if rank == 3:
        return True
    loops = width * taps <= _MOST_LOOPED and (dtype == torch.float32 or channels <= _FEW_CHANNELS)
    return loops and not runs_fast(channels, groups, taps, dtype)
