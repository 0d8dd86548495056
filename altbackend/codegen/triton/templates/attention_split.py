"""Print the forward of attention for few queries: several programs share the keys of a tile, a second kernel adds.

Each program leaves its sums of values, its total weight and its top score for every row. With `m` the largest top:

    sums  = sum over programs of 2^(top - m) * sums         total = sum over programs of 2^(top - m) * total
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ....ir import expr as ex
from ....ir.attention import Attention
from ....ir.expr import Index
from ....ir.loops import Program
from ....schedule.attention import LEAST, Tiles
from ...cpp.ast import Param
from ..print_triton import Finish, Workspace
from . import attention as text
from .attention import Kernel
from .attention_forward import Printed, finished, place, programs, store, sums_of

_PARTS = ("part_sums", "part_totals", "part_tops")


def split_forward(p: Program, form: Attention, tiles: Tiles, fast: bool, tf32: bool, splits: int) -> Printed:
    """Return the kernel of the parts, which the second kernel finishes, and the buffers of the parameters of both."""
    k = text.kernel(p, form, tiles, fast, tf32)
    k.splits = splits
    rows = ex.mul(*form.query.sizes[:3], splits)
    sizes = (ex.mul(rows, tiles.width), rows, rows)
    workspace = tuple(Workspace(name, torch.float32, n) for name, n in zip(_PARTS, sizes, strict=True))
    lines = [*sums_of(k), *_store_parts(k)]
    parts, buffers = finished(k, lines, ex.mul(programs(k), splits), "attention_parts", workspace)
    second, outs = _added(p, form, replace(tiles, rows=LEAST, warps=4, stages=1), workspace, splits)
    totals = tuple(replace(q, name=f"result{n}") for n, q in enumerate(second.params))
    arguments = (*(q.name for q in totals), *_PARTS)
    # the second kernel takes the parts behind its results
    second = replace(second, params=(*second.params, *(Param(w.name, w.dtype, False) for w in workspace)))
    second = replace(second, workspace=())
    return replace(parts, totals=totals, finish=(Finish(second, arguments),)), (*buffers, *outs)


def _row(k: Kernel) -> list[str]:
    """Return the line that finds the number of each row of a tile among the rows of all heads, times the splits."""
    heads, length = (k.parameters.text(n) for n in k.form.query.sizes[1:3])
    near = text.near(k.rows, k)
    return [f"row = ((tl.cast(b, tl.int64) * {heads} + h) * {length} + {near}) * {k.splits}"]


def _store_parts(k: Kernel) -> list[str]:
    inside = text.is_inside(k, k.rows, "block")
    mask = f", mask={inside}" if inside else ""
    wide = f", mask=({inside})[:, None]" if inside else ""
    return [
        *_row(k),
        f"tl.store(part_sums + (row + split)[:, None] * WIDTH + width[None, :], sums{wide})",
        f"tl.store(part_totals + row + split, total{mask})",
        f"tl.store(part_tops + row + split, top{mask})",
    ]


def _added(p: Program, form: Attention, tiles: Tiles, workspace: tuple[Workspace, ...], splits: int) -> Printed:
    """Return the second kernel, and the buffers of its results."""
    k = text.kernel(p, form, tiles, fast=False, tf32=False)
    where: Index = form.query.sizes[1]
    lines = place(k, k.rows, where)
    k.splits = splits
    lines += [
        *_row(k),
        "width = tl.arange(0, WIDTH)",
        'top = tl.full([ROWS], float("-inf"), tl.float32)',
        "total = tl.zeros([ROWS], tl.float32)",
        "sums = tl.zeros([ROWS, WIDTH], tl.float32)",
        f"for split in range(0, {splits}):",
        "    top = tl.maximum(top, tl.load(part_tops + row + split))",
        'base = tl.where(top == float("-inf"), 0.0, top)',
        f"for split in range(0, {splits}):",
        "    kept = tl.exp2(tl.load(part_tops + row + split) - base)",
        "    total += kept * tl.load(part_totals + row + split)",
        "    values = tl.load(part_sums + (row + split)[:, None] * WIDTH + width[None, :])",
        "    sums += kept[:, None] * values",
        *store(k),
    ]
    return finished(k, lines, programs(k), "attention_added", workspace)
