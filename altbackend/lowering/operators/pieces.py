"""Cut long rows of a GPU's reductions into pieces that registers hold.

A program that cannot hold a row reads it three times for a normalisation: for the mean, for the deviations, and for
the result. Pieces are read once for both moments, and the moments of a row are combined from those of its pieces. The
points of a piece lie together in memory: a stretch of a row, or some rows of a block of neighbouring columns, as the
channels of a channels-last image are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Atom, Index
from ...ir.value import Value
from ..tensor import Tensor, axes, points
from .reduction import slowest_first

MOST_ROWS, FEWEST_ROWS = 256, 64  # rows of a piece of columns
LONGEST, SHORTEST = 8192, 1024  # elements of a piece of a row
PROGRAMS = 1024  # pieces, times blocks of 32 columns, that fill a GPU
SHORT = 16  # neighbours in memory that are reduced after the pieces, so that a program reads whole cache lines
NEIGHBOURS = 8  # columns next to each other: with fewer, programs would read parts of the smallest memory access
LONG_ROW = 1 << 16  # elements of a row that has left the cache when the next pass reads it
LONG_COLUMN = 1 << 10  # elements of a column, likewise
LARGE = 1 << 22  # elements of a tensor from which a pass saved outweighs two more launches


@dataclass(frozen=True)
class Ends:
    """Pieces of which the last is shorter. `inside`: whether a point of a piece exists; `count`: points of a piece."""

    inside: Value
    count: Index


@dataclass(frozen=True)
class Cut:
    """A tensor cut into pieces of `length` points, its last dimension.

    `tensor`: the pieces, 0 outside of the tensor; `inner` are the other dimensions over which their results are
    reduced. `outer`: dimensions of the tensor that is cut, one for each dimension that remains, in the order of the
    pieces' remaining dimensions. `rows`: points of all pieces of a result.
    """

    tensor: Tensor
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    length: int
    rows: int
    ends: Ends | None


@dataclass(frozen=True)
class Split:
    """A tensor whose dimensions are split where an operand's position divides them.

    `chains`: for each dimension of the original tensor the sizes of its parts, from slow to fast. A view that joins
    dimensions which are not neighbours in memory gives such positions.
    """

    tensor: Tensor
    chains: tuple[tuple[Index, ...], ...]

    def dims(self, original: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions of the split tensor that are parts of these dimensions of the original one."""
        starts = [sum(map(len, self.chains[:k])) for k in range(len(self.chains))]
        return tuple(starts[k] + j for k in original for j in range(len(self.chains[k])))

    def joined(self, t: Tensor, sizes: tuple[Index, ...]) -> Tensor:
        """Return a tensor over the parts as one of `sizes` over the dimensions, each split alike or of size 1."""
        place: list[Index] = []
        for p, n, chain in zip(points(sizes), sizes, self.chains, strict=True):
            place += [0] * len(chain) if n == 1 else ex.unflatten(p, chain)
        return Tensor(sizes, t.dtype, t.at(place))


def split_of(x: Tensor) -> Split:
    """Return `x` with the dimensions of static sizes split where its main operand's position divides them."""
    main = max((i for _, i in va.loads(x.value)), key=lambda i: len(ex.vars_of(i)), default=0)
    chains = tuple(_chain(main, a, n) for a, n in zip(axes(x.sizes), x.sizes, strict=True))
    sizes = tuple(n for chain in chains for n in chain)
    p, place, start = points(sizes), [], 0
    for chain in chains:
        place.append(ex.flatten(chain, p[start : start + len(chain)]))
        start += len(chain)
    return Split(Tensor(sizes, x.dtype, x.at(place)), chains)


def _chain(index: Index, a: Atom, n: Index) -> tuple[Index, ...]:
    """Return the parts of a dimension of size `n`: two where the index divides its variable by a divisor of `n`."""
    divisors = {d for d in ex.divisors(index, a) if isinstance(n, int) and 1 < d < n and n % d == 0}
    return (n // min(divisors), min(divisors)) if isinstance(n, int) and divisors else (n,)


def cut_of(x: Tensor, dims: tuple[int, ...]) -> Cut | None:
    """Return `x` cut for a reduction over `dims`; None where one kernel is as good."""
    if not all(isinstance(n, int) for n in x.sizes) or math.prod(_static(x.sizes)) < LARGE:
        return None
    order = [k for k in slowest_first(x, x.value) if x.sizes[k] != 1]
    if not order or not any(ex.coefficient(i, axes(x.sizes)[order[-1]]) == 1 for _, i in va.loads(x.value)):
        return None
    remaining = tuple(k for k in order if k not in dims)
    narrow = order[-1:] if _is_narrow(x, order, dims) else []
    reduced = [k for k in order if k in dims and k not in narrow]
    rows, columns = _product(x, reduced), _product(x, (*remaining, *narrow))
    if order[-1] in remaining or narrow:
        near = _product(x, order[-2:] if narrow else order[-1:])
        if rows < LONG_COLUMN or near < NEIGHBOURS:
            return None
        length = piece_length(rows, -(-columns // 32), FEWEST_ROWS, MOST_ROWS)
        return _columns(x, remaining, narrow, reduced, length)
    return _rows(x, remaining, reduced, piece_length(rows, columns, SHORTEST, LONGEST)) if rows >= LONG_ROW else None


def piece_length(rows: int, programs: int, least: int, most: int) -> int:
    """Return the points of pieces of `rows` points, from `least` to `most`: a power of two, or a divisor of `rows`.

    `programs`: the programs that compute one piece of every row. The pieces are the longest that fill a GPU, else the
    shortest. Powers of two that divide `rows` come first, then other divisors. Without any, the last piece is shorter.
    """
    powers = [1 << k for k in range((least - 1).bit_length(), most.bit_length()) if 1 << k <= most]
    divisors = [n for n in range(least, most + 1) if rows % n == 0]
    fits = [n for n in powers if rows % n == 0] or divisors or powers
    return max((n for n in fits if rows // n * programs >= PROGRAMS), default=min(fits))


def ends_of(part: Index, point: Index, length: int, rows: int) -> Ends | None:
    """Return the ends of pieces of `length` of `rows` points: number `point` of piece `part`; None for equal pieces."""
    if rows % length == 0:
        return None
    first = ex.mul(part, length)
    inside = va.apply("lt", va.index(ex.add(first, point)), va.const(rows, torch.int64))
    return Ends(inside, ex.minimum(length, ex.sub(rows, first)))


def inside(x: Value, ends: Ends | None) -> Value:
    """Return a value at the points of pieces, 0 where there is none."""
    return x if ends is None else va.masked(ends.inside, x, va.const(0, x.dtype))


def _static(sizes: Sequence[Index], dims: Sequence[int] | None = None) -> list[int]:
    chosen = sizes if dims is None else [sizes[k] for k in dims]
    return [n for n in chosen if isinstance(n, int)]


def _product(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(_static(x.sizes, dims))


def _is_narrow(x: Tensor, order: Sequence[int], dims: tuple[int, ...]) -> bool:
    """Return whether few neighbours in memory are reduced, next to dimensions that are not."""
    n = x.sizes[order[-1]]
    return len(order) > 1 and order[-1] in dims and order[-2] not in dims and isinstance(n, int) and n <= SHORT


def _columns(x: Tensor, remaining: tuple[int, ...], narrow: Sequence[int], reduced: Sequence[int], length: int) -> Cut:
    """Return pieces [parts, remaining, narrow, points]: the results of neighbouring columns are neighbours."""
    rows = _product(x, reduced)
    sizes = (-(-rows // length), *(x.sizes[k] for k in (*remaining, *narrow)), length)
    p = points(sizes)
    point = _split_row(x, reduced, ex.add(ex.mul(p[0], length), p[-1]))
    point |= dict(zip((*remaining, *narrow), p[1:-1], strict=True))
    ends = ends_of(p[0], p[-1], length, rows)
    tensor = Tensor(sizes, x.dtype, inside(x.at([point.get(k, 0) for k in range(len(x.sizes))]), ends))
    return Cut(
        tensor, (0, *range(1 + len(remaining), len(sizes) - 1)), remaining, length, rows * _product(x, narrow), ends
    )


def _rows(x: Tensor, remaining: tuple[int, ...], reduced: Sequence[int], length: int) -> Cut:
    """Return pieces [remaining, parts, points]."""
    rows = _product(x, reduced)
    sizes = (*(x.sizes[k] for k in remaining), -(-rows // length), length)
    p = points(sizes)
    point = _split_row(x, reduced, ex.add(ex.mul(p[-2], length), p[-1]))
    point |= dict(zip(remaining, p[:-2], strict=True))
    ends = ends_of(p[-2], p[-1], length, rows)
    tensor = Tensor(sizes, x.dtype, inside(x.at([point.get(k, 0) for k in range(len(x.sizes))]), ends))
    return Cut(tensor, (len(remaining),), remaining, length, rows, ends)


def _split_row(x: Tensor, reduced: Sequence[int], row: Index) -> dict[int, Index]:
    """Return the point in each reduced dimension, from slow to fast, of a position in their common order."""
    point: dict[int, Index] = {}
    for k in reversed(reduced[1:]):
        point[k] = ex.mod(row, x.sizes[k])
        row = ex.floordiv(row, x.sizes[k])
    return {**point, reduced[0]: row}
