"""Predict what padding a matrix product on a GPU saves, in microseconds.

The library's fast kernels need rows in memory that are multiples of 16 bytes. For other rows it takes slower kernels.
The factor depends on the dtype and on the largest power of two that divides the rows' bytes:

    time = START_US + max(slowdown * operations / rate, bytes / bandwidth)

Products of many small matrices wait for memory, whatever the alignment. A product of 16 bits with few columns is
computed in tiles, and each tile of unaligned rows takes about as long, however few of its columns exist.

`python -m benchmarks.padding` measures the factors and prints this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api

BYTES_PER_US = 2.8e6  # speed of a copy on an H100; an H200, with the same products, copies 1.4 times as fast
START_US = 2.0  # time of a product without terms
COPY_START_US = 1.0
COPY_LAUNCH_US = 12.0  # time of the processor for a copy: a call whose GPU waits for the processor takes so much longer
LEAST_GAIN = 0.05  # part of the unpadded time that padding has to save
# Rows, columns and terms of a tile of rows of 16 bits that are not aligned, and its microseconds, by the bytes of the
# alignment, divided by the multiprocessors that compute tiles at once. On an H200, 2,651,456 rows of 16 terms and 9
# columns took 286 us (padded 108), 100,000 rows of 65 terms and 64 columns 30. 524,288 rows of 62 terms and 64 columns
# took 69 us (47), of 36 terms 63 (43); 2,307,320 rows of 30 terms and 8 columns with a bias 379 (67).
TILE_SIDE, TILE_TERMS, TILE_US = 64, 32, MappingProxyType({2: 0.0069, 4: 0.004, 8: 0.004})
ALIGNED = 16  # bytes that the rows of fast products are multiples of
# Bytes that padded rows are multiples of: a sector. Over 13 products of bfloat16 on an H100, rows of whole sectors took
# 0.73 to 1.02 of the time of rows padded to 16 bytes.
SECTOR = 32


@dataclass(frozen=True)
class Rate:
    """Operations in a microsecond; by the alignment of rows in bytes, their slowdown and the time of a narrow tile."""

    per_us: float
    slowdown: Mapping[int, float]
    tile_us: Mapping[int, float]

    def us(self, work: Work, alignment: int) -> float:
        """Return the time of a product whose rows are multiples of `alignment` bytes."""
        computing = self.slowdown.get(alignment, 1.0) * work.operations / self.per_us
        tiles = work.narrow_tiles * self.tile_us.get(alignment, 0.0)
        return START_US + max(computing, work.bytes / BYTES_PER_US, tiles)


@dataclass(frozen=True)
class Work:
    """Multiplications and additions of a product, and the bytes of its operands and its result.

    `narrow_tiles`: the tiles, each of `TILE_TERMS` terms, of a product of at most `TILE_SIDE` columns; 0 for others.
    """

    operations: float
    bytes: float
    narrow_tiles: float = 0.0


RATES: Mapping[str, Rate] = MappingProxyType(
    {
        "16-bit": Rate(670e6, MappingProxyType({2: 5.0, 4: 2.9, 8: 2.9}), TILE_US),
        "tf32": Rate(290e6, MappingProxyType({4: 1.95, 8: 2.0}), MappingProxyType({})),
        "float32": Rate(49e6, MappingProxyType({}), MappingProxyType({})),
    }
)


def rate_of(dtype: torch.dtype) -> Rate | None:
    """Return the rate of products of a dtype, or None for a dtype that gains nothing from padding."""
    if dtype in (torch.bfloat16, torch.float16):
        return RATES["16-bit"]
    if dtype == torch.float32:
        return RATES["tf32" if torch_api.allows_tf32() else "float32"]
    return None


def alignment(elements: int, itemsize: int) -> int:
    """Return the largest power of two, at most 16, that divides the bytes of a row."""
    size = elements * itemsize
    return min(size & -size, ALIGNED) if size else ALIGNED


def missing(elements: int, itemsize: int) -> int:
    """Return the elements that padding adds to a row: none to a row of whole multiples of 16 bytes."""
    return -elements % (SECTOR // itemsize) if alignment(elements, itemsize) < ALIGNED else 0


@dataclass(frozen=True)
class Padding:
    """A padding of one product. `work`, `padded_work`: the product without and with it.

    `copied`: bytes of the operands and results that are copied for it. `copies`: the number of such copies.
    """

    rate: Rate
    alignment: int
    work: Work
    padded_work: Work
    copied: int
    copies: int

    def pays(self) -> bool:
        """Return whether the padded product and its copies are clearly faster."""
        before = self.rate.us(self.work, self.alignment)
        copying = 2 * self.copied / BYTES_PER_US + self.copies * (COPY_START_US + COPY_LAUNCH_US)
        after = self.rate.us(self.padded_work, ALIGNED) + copying
        return after < (1 - LEAST_GAIN) * before
