"""The sectors of memory that the rows of a GPU kernel touch, under the numberings that its rows can have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Program
from .loop_mapping import Kind, MappedNode
from .row_parts import parts_of_row
from .rows import SECTOR, estimate

STORED = 0.5  # cost of a stored sector beside one that is read: stores wait for nothing, and the cache merges them


@dataclass(frozen=True)
class Access:
    """One read or store of a row. `weight`: the cost of a sector, times the elements of a row that it touches."""

    index: Index
    itemsize: int
    inner: tuple[Atom, ...]
    weight: float

    @property
    def fewest(self) -> float:
        """Return the sectors of a row if all elements of each sector are used."""
        return self.weight * self.itemsize / SECTOR

    def sectors(self, row: Atom, tile_rows: int, index: Index, any_part: bool = False) -> float:
        """Return the sectors of a row in a tile of so many, with the access at `index`; for `any_part` see `run`.

        Neighbouring rows that touch the same elements share their sectors.
        """
        alike = min(_rows_alike(index, row), tile_rows)
        run = min(SECTOR, self.run(index, row, tile_rows, any_part) * self.itemsize) / self.itemsize
        if not any(_runs_along(index, v) for v in self.inner) and (step := self._short_step(index)) is not None:
            run = max(run, SECTOR / self.itemsize / step)
        return self.weight / run / alike

    def run(self, index: Index, row: Atom, tile_rows: int, any_part: bool) -> int:
        """Return how many neighbours in memory a tile of so many rows touches, in loops of a row and from row to row.

        A loop whose stride is the length of the run so far extends the run. So do the fastest parts of the row's
        number, as far as the rows of the tile count them. `any_part`: so do other parts of which a tile holds all
        values. A tile of rows (width, 3 channels) touches a run of the whole width for each channel.
        """
        run = next((estimate(ex.size_of(v)) for v in self.inner if _runs_along(index, v)), 1)
        parts = parts_of_row(index, row)
        rows = 1  # neighbouring rows in the run
        while True:
            longer = next((estimate(ex.size_of(v)) for v in self.inner if ex.coefficient(index, v) == run), 1)
            if run > 1 and longer > 1:
                run *= longer
                continue
            part = next((p for p in parts if p.stride == run and p.size > 1), None)
            if part is None or (part.fewer != rows and not (any_part and part.fewer * part.size <= tile_rows)):
                return run
            counted = max(min(part.size, tile_rows // part.fewer), 1)
            run *= counted
            if counted < part.size:
                return run
            rows *= part.size

    def _short_step(self, index: Index) -> int | None:
        """Return the least stride of a loop over elements of which a sector holds several; None without such a loop."""
        strides = [c for v in self.inner if isinstance(c := ex.coefficient(index, v), int) and c > 1]
        step = min(strides, default=SECTOR)
        return step if step * self.itemsize < SECTOR else None


def accesses_of(p: Program, mapped: Sequence[MappedNode], stored: frozenset[str]) -> Iterator[Access]:
    """Yield the reads and stores of memory that have an element for each point of a row.

    Accesses of a buffer that lie a constant apart, such as the coordinates of points, touch the same sectors.
    `stored`: the buffers that the kernel writes to memory.
    """
    written = {q.node.out for q in mapped}
    seen: set[tuple[str, Index]] = set()
    for q in mapped:
        at = [(name, index, 1.0) for name, index in va.loads(q.value) if name not in written]
        if q.kind in (Kind.POINT, Kind.SCAN) and q.node.out in stored:
            at.append((q.node.out, q.index, STORED))
        for name, index, weight in at:
            touched = ex.prod(ex.size_of(v) for v in q.inner if v in ex.vars_of(index))
            place = (name, ex.sub(index, _constant(index)))
            if touched != 1 and place not in seen:
                seen.add(place)
                yield Access(index, p.buffers[name].dtype.itemsize, q.inner, weight * estimate(touched))


def _constant(index: Index) -> int:
    return index if isinstance(index, int) else index.const


def sectors_of(
    accesses: Sequence[Access], row: Atom, tile_rows: int, number: Index | None, any_part: bool = False
) -> float:
    """Return the sectors of all accesses of a row with the rows numbered by `number`; None: as they are.

    `any_part`: see `Access.run`. Numbers of rows are compared without it: threads hold neighbouring rows.
    """
    at = (a.index if number is None else ex.substitute(a.index, {row: number}) for a in accesses)
    return sum(a.sectors(row, tile_rows, i, any_part) for a, i in zip(accesses, at, strict=True))


def numberings(accesses: Sequence[Access], row: Atom) -> list[Index]:
    """Return renumberings of the rows: for each loop of the row but the last, the one in which it runs fastest.

    A renumbering gives the old number of a row from its new number.
    """
    factors = _factors(ex.size_of(row), row, [a.index for a in accesses])
    return [_with_fastest(row, factors, k) for k in range(len(factors) - 1)]


def _runs_along(index: Index, v: Atom) -> bool:
    """Return whether a loop touches neighbours, be it backwards or from some element on, as a roll does."""
    if isinstance(index, int):
        return False
    rolled = (m[0].dividend for m, c in index.terms if c == 1 and len(m) == 1 and isinstance(m[0], ex.Mod))
    return ex.coefficient(index, v) in (1, -1) or any(ex.coefficient(d, v) in (1, -1) for d in rolled)


def _rows_alike(index: Index, row: Atom) -> int:
    """Return how many consecutive rows touch the same elements."""
    if isinstance(index, int) or row not in index.vars:
        return estimate(ex.size_of(row))
    return min(_atom_alike(a, row) for m, _ in index.terms for a in m if row in a.vars)


def _atom_alike(a: Atom, row: Atom) -> int:
    """Return for how many consecutive rows a part of a position, which depends on the row, stays as it is."""
    if not isinstance(a, (ex.FloorDiv, ex.Mod)):
        return 1
    if isinstance(a, ex.FloorDiv) and a.dividend is ex.ix(row):
        return a.divisor if isinstance(a.divisor, int) else 1
    return _rows_alike(a.dividend, row)


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
