"""Number the rows of a GPU kernel so that neighbouring rows are neighbours in memory where points of a row are not.

The rows of a softmax over the width of a channels-last image are its channels, batches and heights. A tile holds
several rows. If they are rows of neighbouring channels, the tile reads whole sectors of memory; if they are rows of
neighbouring heights, each element is read from a sector of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Program
from ...device import Gpu
from ...loop_mapping import Kind, MappedNode
from ...rows import ROW_TILE, SECTOR, TILED_ROW, estimate, is_long, rows_are_neighbours
from .row_order import LEAST_GAIN, STORED

LEAST_ROWS = 8  # of a tile whose rows are neighbours for some access: a sector of float32


@dataclass(frozen=True)
class _Access:
    """One read or store of a row. `weight`: the cost of a sector, times the elements of a row that it touches."""

    index: Index
    itemsize: int
    inner: tuple[Atom, ...]
    weight: float

    def sectors(self, row: Atom, tile_rows: int, index: Index) -> float:
        """Return the sectors of a row in a tile of so many, with the access at `index`."""
        along = next((estimate(ex.size_of(v)) for v in self.inner if ex.coefficient(index, v) == 1), 1)
        across = _run_of_rows(index, row, along)
        run = along * min(across, tile_rows)
        return self.weight * self.itemsize / min(SECTOR, run * self.itemsize)


def number_rows(p: Program, mapped: Sequence[MappedNode], stored: frozenset[str], device: Gpu) -> list[MappedNode]:
    """Return the nodes with their rows numbered such that tiles of rows touch the fewest sectors.

    `stored`: the buffers that the kernel writes to memory. A numbering is a permutation of all rows, so that every
    kind of node takes it.
    """
    row = mapped[0].row
    widest = max((estimate(q.points) for q in mapped), default=1)
    if ex.size_of(row) == 1 or rows_are_neighbours(mapped, stored) or widest > TILED_ROW or is_long(widest, device):
        return list(mapped)
    accesses = list(_accesses(p, mapped, stored))
    tile_rows = max(ROW_TILE // widest, LEAST_ROWS)
    factors = _factors(ex.size_of(row), row, [a.index for a in accesses])

    def cost(number: Index | None) -> float:
        at = [a.index if number is None else ex.substitute(a.index, {row: number}) for a in accesses]
        return sum(a.sectors(row, tile_rows, i) for a, i in zip(accesses, at, strict=True))

    numbers = [_with_fastest(row, factors, k) for k in range(len(factors) - 1)]
    best = min(numbers, key=cost, default=None)
    if best is None or cost(best) * LEAST_GAIN > cost(None):
        return list(mapped)
    env = {row: best}
    return [replace(q, index=ex.substitute(q.index, env), value=q.value.substitute(env)) for q in mapped]


def _accesses(p: Program, mapped: Sequence[MappedNode], stored: frozenset[str]) -> Iterator[_Access]:
    """Yield the reads and stores of memory that have an element for each point of a row."""
    written = {q.node.out for q in mapped}
    seen: set[tuple[str, Index]] = set()
    for q in mapped:
        at = [(name, index, 1.0) for name, index in va.loads(q.value) if name not in written]
        if q.kind is Kind.POINT and q.node.out in stored:
            at.append((q.node.out, q.index, STORED))
        for name, index, weight in at:
            touched = ex.prod(ex.size_of(v) for v in q.inner if v in ex.vars_of(index))
            if touched != 1 and (name, index) not in seen:
                seen.add((name, index))
                yield _Access(index, p.buffers[name].dtype.itemsize, q.inner, weight * estimate(touched))


def _run_of_rows(index: Index, row: Atom, stride: int) -> int:
    """Return how many consecutive rows an access takes at elements `stride` apart."""
    if isinstance(index, int):
        return 1
    for monomial, coefficient in index.terms:
        if coefficient != stride or len(monomial) != 1:
            continue
        (atom,) = monomial
        if atom is row:
            return estimate(ex.size_of(row))
        if isinstance(atom, ex.Mod) and atom.dividend is ex.ix(row) and isinstance(atom.divisor, int):
            return atom.divisor
    return 1


def _factors(rows: Index, row: Atom, indices: Sequence[Index]) -> list[int]:
    """Return the extents of the loops of which the row is made, slowest first; [] where they are not known."""
    cuts = sorted({n for i in indices for n in ex.divisors(i, row) if n > 1})
    if not isinstance(rows, int):
        return []
    factors, left = list[int](), 1
    for cut in (*cuts, rows):
        if cut % left:
            return []
        if cut != left:
            factors.insert(0, cut // left)
        left = cut
    return factors if left == rows else []


def _with_fastest(row: Atom, factors: Sequence[int], k: int) -> Index:
    """Return the old number of a row, by its new number, in which loop `k` runs fastest."""
    order = [*(n for n in range(len(factors)) if n != k), k]
    at = dict(zip(order, ex.unflatten(ex.ix(row), tuple(factors[n] for n in order)), strict=True))
    return ex.flatten(factors, [at[n] for n in range(len(factors))])
