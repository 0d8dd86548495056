"""Choose the tiles of short rows of which a thread takes few elements at once.

Triton gives a thread as many neighbouring points of a row as one load brings: one, where rows begin anywhere or their
points are apart. A warp then has 32 points, and the other warps of a program have the rest of the same rows. Totals of
a row meet in shared memory, and every thread computes the numbers of all rows of its warp. With one warp a program has
neither. On an H200 in float32, means over 49 points took 113 us for 1,118, and a softmax over 67 points 174 for 374. A
normalisation's gradient over 67 points took 349 for 3,102. Rows that begin at multiples of 16 bytes gained nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Program
from ...kernel import Kernel
from .blocks import VECTOR, WARP

NARROW_ROW = 256  # points of the longest such row: of 501 points, one warp took 173 us and four warps 178
MOST_AT_ONCE = 2  # of 200 points, four at once, one warp took 175 us and four 170; their gradient 248 and 246
# Elements of a tile of one warp: of rows that are stored, and of rows with totals alone, whose programs have less to
# do. Programs start at a rate of 1.4 a nanosecond, so that 236,242 of them took 167 us, whatever they did.
NARROW_TILE, NARROW_TILE_OF_TOTALS = 1024, 2048
# The same where points are apart: Triton 3.6 lays the threads across the rows of a tile, so that each reads a sector of
# its own. Five reads of every second point took 519 us with 32 rows of 64 points in four warps, 229 in one, 109 with
# four rows and 146 with two.
APART_TILE = 256
# Persistent programs of one warp: elements of their tile, and programs of a multiprocessor.
NARROW_PERSISTENT_TILE, NARROW_PERSISTENT_PROGRAMS = 512, 16


@dataclass(frozen=True)
class _Access:
    """An access to memory by the points of a row. `along`: the fastest loop of the row. `in_parts`: it has others.

    The `index` is that of the kernel, which may run along a row from its end.
    """

    index: Index
    itemsize: int
    along: Atom
    in_parts: bool
    is_store: bool

    @property
    def step(self) -> Index | None:
        """Return the elements from a point to the next; None where they differ."""
        return ex.coefficient(self.index, self.along)

    @property
    def at_once(self) -> int:
        """Return the neighbouring points that one load brings: a power of two, at most VECTOR bytes."""
        if isinstance(self.index, int) or self.step != 1:
            return 1
        starts = [self.index.const, *(c for m, c in self.index.terms if m != (self.along,))]
        if self.in_parts:
            length = ex.size_of(self.along)
            starts.append(length if isinstance(length, int) else 1)
        return math.gcd(VECTOR // self.itemsize, *starts)


def narrow_tile(p: Program, k: Kernel, widest: int, persistent: bool, backwards: bool) -> int:
    """Return the elements of a tile of rows of `widest` points for one warp; 0 where more warps are better.

    All accesses run along rows. `backwards`: the kernel does so from their ends.
    """
    accesses = list(_accesses(p, k, backwards))
    if not accesses or widest > NARROW_ROW:
        return 0
    apart, at_once = any(a.step not in (0, 1) for a in accesses), max(a.at_once for a in accesses)
    if not apart and (at_once > MOST_AT_ONCE or widest <= WARP * at_once):
        return 0
    if persistent:
        return NARROW_PERSISTENT_TILE
    if apart:
        return APART_TILE
    return NARROW_TILE if any(a.is_store for a in accesses) else NARROW_TILE_OF_TOTALS


def _accesses(p: Program, k: Kernel, backwards: bool) -> Iterator[_Access]:
    """Yield the accesses to memory whose places depend on the row and on the point."""
    written = {q.node.out for q in k.nodes}
    for q in k.nodes:
        if not q.inner or q.points == 1:
            continue
        accesses = [(b, i, False) for b, i in va.loads(q.value) if b not in written]
        accesses += [(q.node.out, q.index, True)] if q.node.out in k.stored else []
        for b, index, is_store in accesses:
            used, along = ex.vars_of(index), q.inner[-1]
            if q.row in used and used & {*q.inner}:
                if backwards:
                    last = ex.sub(ex.size_of(along), 1)
                    index = ex.substitute(index, {along: ex.sub(last, ex.ix(along))})
                yield _Access(index, p.buffers[b].dtype.itemsize, along, len(q.inner) > 1, is_store)
