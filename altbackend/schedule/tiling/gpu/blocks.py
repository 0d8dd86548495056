"""The blocks of a GPU kernel: how programs and tiles divide its points. Sizes only, no code."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Program, reads, writes
from ...kernel import Kernel
from ...loop_mapping import Kind, MappedNode

WARP = 32  # threads
VECTOR = 16  # bytes of the widest load
LEAST_FILLED = 3 / 4  # part of its blocks that a loop fills, at least
MOST_WARPS = 32
PER_THREAD = 64  # elements of a tile that a thread may hold
POSITION_LIMIT = 2**31 - 2**24  # positions below it need 32 bits, even those of masked elements beyond the end


class Form(enum.Enum):
    """The way in which programs divide a kernel."""

    FLAT = "flat"  # one axis over all elements; a program computes one block of it
    ROWS = "rows"  # XBLOCK rows a program; a row is one tile, or blocks that every pass reads one after the other
    TRANSPOSE = "transpose"  # tiles over two loops, so that loads and stores of different orders are contiguous
    PERSISTENT = "persistent"  # programs loop over rows or elements and leave one total each in a workspace
    MATMUL = "matmul"  # XBLOCK rows and RBLOCK columns of a matrix product a program, epilogue included


@dataclass(frozen=True)
class Blocks:
    """The blocks of one kernel.

    `points`: extent of the axis `x`, of which a program takes `xblock`. `rblocks`: the block of every row length;
    `long`: lengths that are read in several blocks. `flat`: `x` runs over elements and there is no row axis.
    `programs`: launched programs. `wide`: positions need 64 bits. `streams`: the data read does not fit in the cache.
    `axis_loops`: of TRANSPOSE, the loops of the axis `x` from slow to fast, then the `row_loops` loops of the row axis.
    `depth`: terms of a matrix product's sums at a time, loaded `stages` turns ahead.
    `run`: neighbouring rows of the tile that a thread holds; 0 where Triton decides, by the widest load.
    `backwards`: a scan runs from the end of the row axis, so that neighbours in memory are neighbours on the axis.
    """

    form: Form
    flat: bool
    points: Index
    xblock: int
    rblocks: dict[Index, int]
    long: frozenset[Index]
    programs: Index
    warps: int
    wide: bool
    streams: bool = False
    axis_loops: tuple[Atom, ...] = ()
    row_loops: int = 1
    depth: int = 0
    stages: int = 1
    run: int = 0
    backwards: bool = False

    def __post_init__(self) -> None:
        sizes = (self.warps, self.xblock, *self.rblocks.values())
        assert all(n > 0 and n & (n - 1) == 0 for n in sizes), f"Triton takes powers of two, not {sizes}"
        assert self.warps <= MOST_WARPS, f"a program has at most {MOST_WARPS} warps, not {self.warps}"

    @property
    def columns(self) -> tuple[Atom, ...]:
        """Return the loops of the row axis of TRANSPOSE from slow to fast."""
        return self.axis_loops[-self.row_loops :]

    @property
    def tiled_x(self) -> bool:
        """Return whether a program takes several elements of the axis `x`."""
        return self.xblock > 1

    @property
    def has_rows(self) -> bool:
        """Return whether tiles have a row axis."""
        return bool(self.rblocks)

    @property
    def rank(self) -> int:
        """Return the number of dimensions of a tile."""
        return max(self.tiled_x + self.has_rows, 1)

    def looped(self, n: Index) -> bool:
        """Return whether a row of `n` points is read in several blocks."""
        return n in self.long

    def name_of(self, n: Index) -> str:
        """Return the name of the block constant of rows of `n` points."""
        return f"RBLOCK{list(self.rblocks).index(n) or ''}"

    @property
    def constexprs(self) -> dict[str, int]:
        """Return the kernel's compile-time constants by name."""
        x = {"XBLOCK": self.xblock} if self.tiled_x else {}
        k = {"KBLOCK": self.depth} if self.depth else {}
        return x | {self.name_of(n): b for n, b in self.rblocks.items()} | k


# --- variants to measure ---------------------------------------------------------------------------------------------


def variants(b: Blocks) -> list[Blocks]:
    """Return blocks with other warps, rows or elements a program, and programs, for measuring. Static sizes only."""
    if b.form is Form.MATMUL or not isinstance(b.points, int) or not isinstance(b.programs, int):
        return []
    sizes = [b]
    if b.form in (Form.FLAT, Form.ROWS):
        others = (b.xblock // 2, b.xblock * 2, *((b.xblock * 4,) if b.form is Form.FLAT else ()))
        sizes += [replace(b, xblock=x, programs=-(-b.points // x)) for x in others if 1 <= x <= power_of_two(b.points)]
    if b.form is Form.PERSISTENT:
        turns = -(-b.points // b.xblock)
        sizes += [replace(b, programs=n) for n in (b.programs // 2, b.programs * 2) if 1 <= n <= turns]
        if b.has_rows:
            sizes += [_with_tile_rows(b, b.points, x) for x in (b.xblock // 2, b.xblock * 2) if x >= 1]
    return [replace(s, warps=w) for s in sizes for w in _warps_around(s) if s is not b or w != b.warps]


def _with_tile_rows(b: Blocks, rows: int, tile_rows: int) -> Blocks:
    """Return blocks of persistent programs over `rows` rows with tiles of `tile_rows` rows."""
    return replace(b, xblock=tile_rows, programs=at_most(b.programs, -(-rows // tile_rows)))


def _warps_around(b: Blocks) -> list[int]:
    tile = b.xblock * max(b.rblocks.values(), default=1)
    around = (b.warps // 2, b.warps, b.warps * 2, b.warps * 4)
    return [w for w in around if 1 <= w <= MOST_WARPS and w * WARP <= tile <= w * WARP * PER_THREAD]


# --- numbers that several forms need ---------------------------------------------------------------------------------


def ceil_div(n: Index, d: int) -> Index:
    """Return n / d, rounded up."""
    return ex.floordiv(ex.add(n, d - 1), d)


def power_of_two(n: int) -> int:
    """Return the least power of two that is not less than `n`."""
    return 1 << max(n - 1, 0).bit_length()


def fills(length: int, block: int) -> bool:
    """Return whether a loop of `length` points fills its blocks of `block`; one of unknown length, 0, does."""
    return length >= LEAST_FILLED * -(-length // block) * block


def at_most(n: Index, limit: int) -> Index:
    """Return how many programs share `n` turns: a number, since the tile of the second kernel depends on it."""
    return min(n, limit) if isinstance(n, int) else limit


def longest(lengths: Sequence[Index]) -> Index:
    """Return the maximum of `lengths`."""
    result = lengths[0]
    for n in lengths[1:]:
        result = ex.maximum(result, n)
    return result


def warps_of(tile: int) -> int:
    """Return the warps of a program with a tile of so many elements."""
    for limit, warps in ((256, 1), (512, 2), (2048, 4), (8192, 8)):
        if tile <= limit:
            return warps
    return 16


def is_wide(p: Program, k: Kernel, extent: Index) -> bool:
    """Return whether a position in a buffer, or on the axis `x` of `extent` points, may exceed 31 bits."""
    names = {b for m in k.members for b in (*reads(p.nodes[m]), *writes(p.nodes[m]))} if k.members else set()
    extents = [extent, *(p.buffers[b].extent for b in names)]
    return any(ex.bounds(n)[1] >= POSITION_LIMIT for n in extents)


def loaded_buffers(members: Iterable[MappedNode]) -> set[str]:
    """Return the buffers that nodes read and none of them writes."""
    nodes = list(members)
    return {b for q in nodes for b, _ in va.loads(q.value)} - {q.node.out for q in nodes}


def reads_total(members: Sequence[MappedNode]) -> bool:
    """Return whether a node reads the result of a reduction, scan or scatter among the nodes."""
    totals = {q.node.out for q in members if q.kind is not Kind.POINT}
    return any(b in totals for q in members for b, _ in va.loads(q.value))
