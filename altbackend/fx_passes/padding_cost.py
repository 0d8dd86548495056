"""Predict what padding a matrix product on a GPU saves, in microseconds.

The library's fast kernels need rows in memory that are multiples of 16 bytes. For other rows it takes slower kernels.
The factor depends on the dtype and on the largest power of two that divides the rows' bytes:

    time = START_US + max(slowdown * operations / rate, bytes / bandwidth)

A product of 16 bits with few columns is computed in tiles, and each tile of unaligned rows takes about as long, however
few of its columns exist. A multiprocessor starts a block for each small matrix of a batch, whatever its alignment:

    time >= blocks * (block_us + depth / TILE_TERMS * terms_us)

Results of unaligned rows are stored in pieces of their alignment:

    time >= bytes / alignment / STORES_PER_US

`python -m benchmarks.padding` measures the factors and prints this table.
"""

from __future__ import annotations

import math
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
# Rows of which a batched product computes no fewer at once, and the least part of a tile's columns. With bfloat16 on an
# H200, 28,409 products of 33x64x33 took 313 us (padded 122), 14,201 of 65x64x65 1,125 (112), and 46,875 of 10x128x10
# 118 (173).
LEAST_ROWS, LEAST_WIDTH = 16, 0.5
# Rows, columns and terms of a tile of rows of 16 bits that are not aligned, and its microseconds, by the bytes of the
# alignment, divided by the multiprocessors that compute tiles at once. On an H200, 2,651,456 rows of 16 terms and 9
# columns took 286 us (padded 108), 100,000 rows of 65 terms and 64 columns 30. 524,288 rows of 62 terms and 64 columns
# took 69 us (47), of 36 terms 63 (43); 2,307,320 rows of 30 terms and 8 columns with a bias 379 (67).
TILE_SIDE, TILE_TERMS, TILE_US = 64, 32, MappingProxyType({2: 0.0069, 4: 0.004, 8: 0.004})
NONE: Mapping[int, float] = MappingProxyType({})
BATCHED_US = MappingProxyType({2: 0.0069, 4: 0.0065, 8: 0.0065})  # the same for batched products
BATCHED_FLOATS_US = MappingProxyType({4: 0.0095, 8: 0.009})  # and for those of float32 with TF32
# Pieces of a result that are stored in a microsecond. On an H200, 1,546 products of 197x64x197 took 230 us in bfloat16
# and 215 in float32 (60 million pieces), 960 of 250x32x250 101 (30 million), and rows of 389 elements of a product of
# 305,877x128x389 about 470 (119 million).
STORES_PER_US = 253e3
ALIGNED = 16  # bytes that the rows of fast products are multiples of
# Bytes that padded rows are multiples of: a sector. Over 13 products of bfloat16 on an H100, rows of whole sectors took
# 0.73 to 1.02 of the time of rows padded to 16 bytes.
SECTOR = 32


Sizes = tuple[int, int, int]  # rows, depth and width of a product


@dataclass(frozen=True)
class Rate:
    """Operations in a microsecond; by the alignment of rows in bytes, their slowdown and the time of a narrow tile.

    `batched_tile_us`: the time of a tile of a batched product. `block_us`, `terms_us`: the time of a block of such a
    product, and of `TILE_TERMS` of its terms, which aligned rows take, too.
    """

    per_us: float
    slowdown: Mapping[int, float]
    tile_us: Mapping[int, float]
    batched_tile_us: Mapping[int, float]
    block_us: float
    terms_us: float

    def us(self, work: Work, alignment: int) -> float:
        """Return the time of a product whose rows are multiples of `alignment` bytes."""
        computing = self.slowdown.get(alignment, 1.0) * work.operations / self.per_us
        tiles = work.narrow_tiles * self.tile_us.get(alignment, 0.0)
        batched = work.batched_tiles * self.batched_tile_us.get(alignment, 0.0)
        started = work.wide_blocks if alignment == ALIGNED else work.blocks
        blocks = started * (self.block_us + work.terms * self.terms_us)
        stores = work.result / alignment / STORES_PER_US
        return START_US + max(computing, work.bytes / BYTES_PER_US, tiles, batched, blocks, stores)


@dataclass(frozen=True)
class Work:
    """Multiplications and additions of a product, and the bytes of its operands and its result.

    `narrow_tiles`: the tiles, each of `TILE_TERMS` terms, of one product of at most `TILE_SIDE` columns; 0 for others.
    `batched_tiles`, `blocks`: the tiles of batched products, and their results in blocks of `TILE_SIDE`; 0 for others.
    `wide_blocks`: such blocks of aligned rows, which are wider where they have few rows. `terms`: the tiles that a
    block adds. `result`: the bytes of a result with rows that are not aligned; 0 for others.
    """

    operations: float
    bytes: float
    narrow_tiles: float = 0.0
    batched_tiles: float = 0.0
    blocks: int = 0
    wide_blocks: int = 0
    terms: int = 0
    result: float = 0.0


def work_of(batch: int, sizes: Sizes, itemsize: int) -> Work:
    """Return the work of `batch` products."""
    rows, depth, width = sizes
    operations = 2.0 * batch * rows * depth * width
    size = 1.0 * batch * (rows * depth + depth * width + rows * width) * itemsize
    terms, is_narrow = math.ceil(depth / TILE_TERMS), width <= TILE_SIDE
    down, across = math.ceil(rows / TILE_SIDE), math.ceil(width / TILE_SIDE)
    result = 1.0 * batch * rows * width * itemsize if missing(width, itemsize) else 0.0
    if batch == 1:
        return Work(operations, size, narrow_tiles=down * terms if is_narrow else 0, result=result)
    tiles = batch * _parts(rows) * max(_parts(width), LEAST_WIDTH) * terms
    blocks = batch * down * across
    wide_blocks = batch * down * math.ceil(width / _columns_of_block(rows))
    return Work(operations, size, 0.0, tiles, blocks, wide_blocks, terms, result)


def _columns_of_block(rows: int) -> int:
    """Return the columns of a block of TILE_SIDE^2 results.

    On an H200, 19,264 products of 10x16x384 took 179 us, unpadded ones of 10x10x384 560.
    """
    height = LEAST_ROWS
    while height < min(rows, TILE_SIDE):
        height *= 2
    return TILE_SIDE**2 // height


def _parts(elements: int) -> float:
    """Return the sides of tiles that elements take, in parts of `LEAST_ROWS`."""
    return math.ceil(elements / LEAST_ROWS) * LEAST_ROWS / TILE_SIDE


RATES: Mapping[str, Rate] = MappingProxyType(
    {
        "16-bit": Rate(670e6, MappingProxyType({2: 5.0, 4: 2.9, 8: 2.9}), TILE_US, BATCHED_US, 0.0036, 0.0001),
        "tf32": Rate(290e6, MappingProxyType({4: 1.95, 8: 2.0}), NONE, BATCHED_FLOATS_US, 0.0011, 0.0023),
        "float32": Rate(49e6, NONE, NONE, NONE, 0.0, 0.0),
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
