"""Regions of buffers: where a value lies inside of a larger buffer that a loop copies it into.

A value of blocks of `inner` elements becomes every block of a larger stride:

    position inner * o + r  ->  outer * o + r + offset,   0 <= r < inner
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Buffer, Loop, Pointwise
from ..ir.value import Value

ALIGNED = 16  # bytes of the widest load: regions begin at multiples of it where the values did


@dataclass(frozen=True)
class Region:
    """The region of a buffer `whole` in which the value of buffer `part` lives; see the head of this file."""

    part: str
    whole: str
    inner: int
    outer: int
    offset: int

    @property
    def is_one_block(self) -> bool:
        """Return whether the value lies without gaps."""
        return self.inner == self.outer

    def moved(self, index: Index) -> Index | None:
        """Return the position in `whole` of a position in `part`; None where it has no such form."""
        o, r = ex.floordiv(index, self.inner), ex.mod(index, self.inner)
        if not (_divisions(o) | _divisions(r)) <= _divisions(index):
            return None
        return ex.add(ex.mul(self.outer, o), r, self.offset)


def region_of(buffers: Mapping[str, Buffer], copy: Pointwise) -> Region | None:
    """Return the region of a temporary that a node copies a whole buffer into, one block after the other."""
    if copy.value.op != "load" or ex.lookups(copy.index):
        return None
    name, index = copy.value.attr
    part, whole = buffers[name], buffers[copy.out]
    if whole.kind != "temp" or name == copy.out or part.dtype != whole.dtype:
        return None
    points = ex.prod(ex.size_of(v) for v in copy.dims)
    if part.numel != part.extent or points != part.numel:
        return None
    blocks = (ex.mul(n, s) for n, s in zip(part.sizes, part.strides, strict=True))
    for inner in sorted({n for n in blocks if isinstance(n, int) and n > 1}, reverse=True):
        if (region := _with_inner(copy, name, index, inner)) is not None:
            return region if is_aligned(region, whole) else None
    return None


def _with_inner(copy: Pointwise, name: str, index: Index, inner: int) -> Region | None:
    o, r = ex.floordiv(index, inner), ex.mod(index, inner)
    if _divisions(o) | _divisions(r):
        return None
    outer = next((_ratio(copy.index, o, v) for v in copy.dims if v in ex.vars_of(o)), inner)
    if not isinstance(outer, int) or outer < inner:
        return None
    offset = ex.sub(copy.index, ex.add(ex.mul(outer, o), r))
    return Region(name, copy.out, inner, outer, offset) if isinstance(offset, int) else None


def _ratio(a: Index, b: Index, v: Atom) -> Index | None:
    numerator, denominator = ex.coefficient(a, v), ex.coefficient(b, v)
    if numerator is None or denominator is None or denominator == 0:
        return None
    return ex.exact_div(numerator, denominator)


def is_aligned(region: Region, whole: Buffer) -> bool:
    """Return whether wide loads take the blocks of a region as they took those of the value."""
    size = whole.dtype.itemsize
    widest = next(n for n in (ALIGNED, 8, 4, 2, 1) if region.inner * size % n == 0)
    return all(n * size % widest == 0 for n in (region.outer, region.offset))


def moved_loop(node: Loop, region: Region) -> Loop | None:
    """Return a loop that reads and stores the value in its region; None where a position has no such form."""
    if any(v.attr[0] == region.part for e in ex.lookups(node.index) for v in va.walk(e) if v.op == "load"):
        return None
    index = region.moved(node.index) if node.out == region.part else node.index
    failed = False

    def on_load(x: Value) -> Value | None:
        nonlocal failed
        name, position = x.attr
        if name != region.part:
            return None
        place = region.moved(position)
        failed = failed or place is None
        return None if place is None else va.load(region.whole, place, x.dtype)

    value = va.rewrite(node.value, on_load=on_load)
    if failed or index is None:
        return None
    return replace(node, out=region.whole if node.out == region.part else node.out, index=index, value=value)


def _divisions(index: Index) -> frozenset[Atom]:
    return frozenset(_division_atoms(index))


def _division_atoms(index: Index) -> Iterator[Atom]:
    if isinstance(index, int):
        return
    for monomial, _ in index.terms:
        for atom in monomial:
            if isinstance(atom, (ex.FloorDiv, ex.Mod)):
                yield atom
                yield from _division_atoms(atom.dividend)
