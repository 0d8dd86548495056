"""Number the rows of a GPU kernel so that neighbouring rows are neighbours in memory where points of a row are not.

The rows of a softmax over the width of a channels-last image are its channels, batches and heights. A tile holds
several rows. If they are rows of neighbouring channels, the tile reads whole sectors of memory; if they are rows of
neighbouring heights, each element is read from a sector of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....ir import expr as ex
from ....ir.expr import Index
from ....ir.loops import Program
from ...device import Gpu
from ...loop_mapping import Kind, MappedNode
from ...rows import (
    ROW_TILE,
    ROWS_OF_COLUMNS,
    TILED_ROW,
    estimate,
    is_long,
    rows_are_neighbours,
    some_rows_are_neighbours,
)
from ...sectors import Access, accesses_of, numberings, sectors_of
from .row_order import LEAST_GAIN

LEAST_ROWS = 8  # rows of a tile whose rows are neighbours for some access: they fill a sector of float32


def number_rows(p: Program, mapped: Sequence[MappedNode], stored: frozenset[str], device: Gpu) -> list[MappedNode]:
    """Return the nodes with their rows numbered such that tiles of rows touch the fewest sectors.

    `stored`: the buffers that the kernel writes to memory. A numbering is a permutation of all rows, so that every
    kind of node takes it.
    """
    row = mapped[0].row
    widest = max((estimate(q.points) for q in mapped), default=1)
    columns = rows_are_neighbours(mapped, stored)
    if ex.size_of(row) == 1:
        return list(mapped)
    accesses = list(accesses_of(p, mapped, stored))
    if not columns and (widest > TILED_ROW or is_long(widest, device)):
        enough = estimate(ex.size_of(row)) >= ROWS_OF_COLUMNS * device.sms
        return _side_by_side(mapped, stored, accesses) if enough else list(mapped)
    tile_rows = ROWS_OF_COLUMNS if columns else max(ROW_TILE // widest, LEAST_ROWS)

    def cost(number: Index | None) -> float:
        return sectors_of(accesses, row, tile_rows, number)

    best = min(numberings(accesses, row), key=cost, default=None)
    if best is None or cost(best) * LEAST_GAIN > cost(None):
        return list(mapped)
    return _numbered(mapped, best)


def _numbered(mapped: Sequence[MappedNode], number: Index) -> list[MappedNode]:
    env = {mapped[0].row: number}
    return [replace(q, index=ex.substitute(q.index, env), value=q.value.substitute(env)) for q in mapped]


def _side_by_side(mapped: Sequence[MappedNode], stored: frozenset[str], accesses: Sequence[Access]) -> list[MappedNode]:
    """Return the nodes with rows numbered such that a tile of long rows reads whole sectors, where single rows do not.

    An example: the channels of a channels-last image in another order, as behind a channel shuffle.
    """
    row = mapped[0].row
    if some_rows_are_neighbours(mapped, stored) or any(q.kind not in (Kind.POINT, Kind.IN_ROW) for q in mapped):
        return list(mapped)
    alone = sectors_of(accesses, row, 1, None)
    best, least = list(mapped), alone / LEAST_GAIN
    for number in numberings(accesses, row):
        cost = sectors_of(accesses, row, ROWS_OF_COLUMNS, number)
        if cost < least and some_rows_are_neighbours(numbered := _numbered(mapped, number), stored):
            best, least = numbered, cost
    return best
