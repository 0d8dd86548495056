"""Functions that the text of a host program's numbers may call, by their names."""

from __future__ import annotations

import struct

_DOUBLE, _INTEGER = struct.Struct("=d"), struct.Struct("=q")


def position(at: int, size: int, dim: int) -> int:
    """Element number `at` of a dimension of `size`, counted from the end below zero. Raises IndexError."""
    if -size <= at < size:
        return at + size if at < 0 else at
    raise IndexError(f"index {at} is out of bounds for dimension {dim} with size {size}")


def slice_begin(at: int, size: int) -> int:
    """Where a slice that starts at `at` begins in a dimension of `size`, by Python's rules."""
    return max(at + size, 0) if at < 0 else min(at, size)


def indexed_size(size: int, count: int) -> int:
    """The size of a dimension that `count` positions are looked up in. Raises IndexError where it has no elements."""
    if size == 0 and count:
        raise IndexError("index is out of bounds for dimension with size 0")
    return max(size, 1)


def bits_of(x: float) -> int:
    """The bits of a float64 as a signed integer, in which form kernels take it."""
    bits: int = _INTEGER.unpack(_DOUBLE.pack(x))[0]
    return bits


FUNCTIONS = {f.__name__: f for f in (position, slice_begin, indexed_size, bits_of)}
