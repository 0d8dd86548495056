"""Decide in which order the threads of a program access memory, under which masks, and what the cache keeps."""

from __future__ import annotations

from typing import TypeAlias

import torch

from ...ir import expr as ex
from ...ir.expr import Atom, Index
from ...ir.value import Value
from ...schedule.rows import CACHED, SECTOR, touched
from ...schedule.tiling.gpu.blocks import WARP, Form
from ..cpp.ast import name
from .contiguity import blocks_of_neighbours, hidden_run, is_along_x
from .emitter import Emitter
from .tile_ast import Masks

Tile: TypeAlias = tuple[str, str]  # names of the blocks of a tile's two axes

LINE = 128  # bytes of the cache that the loads of a warp look up at once
SHARED_POINTS = 4  # consecutive points of a row in one thread, as loads of 16 bytes make them


def mask_names(masks: Masks) -> tuple[Value, ...]:
    """Return masks as values."""
    return tuple(name(m, torch.bool) for m in masks)


def line_shape(e: Emitter, position: Index, axes: frozenset[str], masks: Masks, row: Index | None) -> Tile | None:
    """Return the shape of a line that all rows, or all points, of a tile read, where it is to have one dimension.

    Of two dimensions, be it one row or the full tile, Triton gives a load a layout along the line, and converts full
    tiles to it through shared memory: a mean square over 192 channels and a gate took 513 us. So it does with what the
    points of neighbouring rows read, and with a number of each row if these are as many as threads.
    """
    b = e.blocks
    if len(axes) != 1 or b.form not in (Form.ROWS, Form.PERSISTENT) or b.rank != 2 or b.run:
        return None
    if plain_axes(e, position) != axes or any(e.axes.get(m, axes) != axes for m in mask_names(masks)):
        return None
    if axes == {"x"}:
        return ("XBLOCK", "1") if b.xblock >= WARP * b.warps else None
    return ("1", b.name_of(row)) if row is not None and e.rows_are_neighbours else None


def without_end_mask(e: Emitter, position: Index, masks: Masks) -> tuple[Index, Masks]:
    """Return a position without the mask of the row's end where runs of points read one element each, as parameters.

    Triton loads such an element once for a thread, but under a mask once for a point: a group norm behind a depthwise
    convolution had 91 loads for four points, of which 64 were such. Points beyond the end read the last one's element.
    """
    r = _point(position)
    if e.blocks.rank != 1 or r is None or not changes_in_runs(position) or masks != (e.masks.get(r),):
        return position, masks
    size = ex.size_of(r)
    in_block = ex.var(r.key, ex.add(size, e.blocks.rblocks[size]))  # of the variable itself, nothing is beyond the end
    return ex.substitute(position, {r: ex.minimum(ex.ix(in_block), ex.sub(size, 1))}), ()


def _point(position: Index) -> Atom | None:
    """Return the variable of the points of a row, or None where a position has none."""
    return next((a for a in ex.vars_of(position) if a.key != "x"), None)


def changes_in_runs(position: Index) -> bool:
    """Return whether only quotients of the row's points by multiples of four lead to a position."""
    r = _point(position)
    if isinstance(position, int) or r is None or ex.lookups(position):
        return False
    parts = [a for monomial, _ in position.terms for a in monomial if r in a.vars]
    quotients = [a.divisor for a in parts if isinstance(a, ex.FloorDiv) and a.dividend is ex.ix(r)]
    return len(quotients) == len(parts) and all(isinstance(n, int) and n % SHARED_POINTS == 0 for n in quotients)


def ordered_load(e: Emitter, position: Index, masks: Masks, row: Index | None, dtype: torch.dtype) -> Tile | None:
    """Return the shape of a tile whose elements threads read in the order of its rows; None: as Triton decides.

    A pool of a row to three points, read with neighbouring threads in different rows, took 306 us, and takes 63.
    """
    shared = not masks and changes_in_runs(position)
    return None if shared else _ordered(e, position, row, LINE // dtype.itemsize)


def ordered_store(e: Emitter, position: Index, row: Index, dtype: torch.dtype) -> Tile | None:
    """Return the shape of a tile whose elements threads write in the order of its rows; None: as Triton decides."""
    return _ordered(e, position, row, SECTOR // dtype.itemsize)


def _ordered(e: Emitter, position: Index, row: Index | None, block: int) -> Tile | None:
    """Return the shape of a tile where neighbouring points touch at most half of the blocks that neighbouring rows do.

    `block`: elements that memory moves at once.
    """
    b = e.blocks
    if b.form in (Form.FLAT, Form.MATMUL) or b.rank != 2 or row is None or run_of(e, position):
        return None
    if plain_axes(e, position) != {"x", "r"}:
        return None
    lookups = {v: e.axes.get(v, frozenset()) for v in ex.lookups(position)}
    points, rows = blocks_of_neighbours(position, lookups, block) or (1, 1)
    return ("XBLOCK", b.name_of(row)) if 2 * points <= rows else None


def run_of(e: Emitter, position: Index) -> int:
    """Return how many rows of the tile are neighbours at `position`, where Triton needs the hint; else 0."""
    b = e.blocks
    if b.rank != 2:
        return 0
    return b.run if b.run and is_along_x(position, b.xblock) else hidden_run(position, b.xblock)


def is_only_read(e: Emitter, b: str, position: Index, row: Index | None) -> bool:
    """Return whether nothing reads a full tile again.

    Tensors that many rows share (weights) stay in the cache, and so do those that neighbouring points read as windows
    and rows that are read in parts: a gate behind a total took 291 us for 262.
    """
    streams = e.blocks.streams and row is not None and not is_shared(e, position, row)
    return streams and b not in e.windows | e.read_in_parts


def is_shared(e: Emitter, position: Index, points: Index) -> bool:
    """Return whether many rows of `points` share the elements of an operand, as images share statistics of points."""
    total = ex.mul(e.blocks.points, points)
    return isinstance(total, int) and touched(position) * CACHED <= total


def is_last_read(e: Emitter, b: str, index: Index) -> bool:
    """Return whether no later pass reads a long row again, so that the cache may evict it."""
    keys = {a.key for a in ex.vars_of(index)}
    return b in e.last_reads and "x" in keys and len(keys) > 1


def plain_axes(e: Emitter, index: Index) -> frozenset[str]:
    """Return the axes of the printed index: those of its variables, and of the names in it."""
    own = frozenset("x" if a.key == "x" else "r" for a in ex.vars_of(index))
    return own.union(*(e.axes.get(v, frozenset()) for v in ex.lookups(index)))
