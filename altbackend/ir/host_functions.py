"""Functions that the text of a host program's numbers may call, by name."""

from __future__ import annotations

import struct

_DOUBLE, _INTEGER = struct.Struct("=d"), struct.Struct("=q")


def position(at: int, size: int, dim: int) -> int:
    """Return the position `at` of dimension number `dim`, whose extent is `size`; a negative `at` counts from the end.

    Raises IndexError if `at` is out of range.
    """
    if -size <= at < size:
        return at + size if at < 0 else at
    raise IndexError(f"index {at} is out of bounds for dimension {dim} with size {size}")


def slice_begin(at: int, size: int) -> int:
    """Return the first position of a slice that starts at `at` in a dimension of `size`, by Python's rules."""
    return max(at + size, 0) if at < 0 else min(at, size)


def indexed_size(size: int, count: int) -> int:
    """Return the extent, at least 1, of a dimension in which `count` positions are looked up.

    Raises IndexError if the dimension has no elements and `count` is not 0.
    """
    if size == 0 and count:
        raise IndexError("index is out of bounds for dimension with size 0")
    return max(size, 1)


def bits_of(x: float) -> int:
    """Return the bits of a float64 as a signed 64-bit integer, the form in which kernels take it."""
    bits: int = _INTEGER.unpack(_DOUBLE.pack(x))[0]
    return bits


FUNCTIONS = {f.__name__: f for f in (position, slice_begin, indexed_size, bits_of)}
