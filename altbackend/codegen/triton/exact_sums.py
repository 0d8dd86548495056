"""Emit running results of a loop over blocks; sums of float32 data keep what every addition rounds off.

A chain of n float32 additions is off by up to n/2 units of the last place, and eager's chains are short. An exact sum
has a second tile that adds up the rounding errors. Method: D. Knuth, "The Art of Computer Programming", volume 2,
section 4.2.2, the sum of two numbers and its error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir import expr as ex
from ...ir import value as va
from ...ir.expr import Index
from ...ir.loops import Reduction, Scan
from ...ir.value import Value
from ...schedule.loop_mapping import Kind, MappedNode
from ...schedule.tiling.gpu.blocks import WARP
from ..cpp.ast import name
from .contiguity import is_along_x
from .emitter import Emitter, Scope
from .scope import row_length
from .tile_ast import Accumulator, Fold, Masks, Shape

SHORT_CHAIN = 16  # additions of a loop that need no second tile
LOADED = 4  # float32 numbers that a thread loads at once
MOST_FLOPS = 2  # of a term: the six additions of an exact sum hide behind the loads of cheap terms alone
_LABELS = {"sum": "sum", "max": "best", "min": "best"}


@dataclass(frozen=True)
class Term:
    """A value that a loop combines into an accumulator of `shape` by `op`, where the masks hold."""

    op: str
    value: Value
    masks: Masks
    shape: Shape
    exact: bool


def is_exact(e: Emitter, q: MappedNode) -> bool:
    """Return whether the kernel keeps what a sum or cumulative sum of float32 data rounds off.

    Floats of 16 bits are themselves rounded by 2^-9 or more. Sums of computed terms, and sums that other elements of
    the row use, as inside a normalisation or softmax, stay plain: a LayerNorm of 20,000 columns took 373 us for 232 on
    an H100. A cumulative sum along memory takes at most 2 % longer. Across memory, eager adds one element after the
    other. A tile that holds the row adds a tree, whose errors are 0.04 to 0.9 of eager's: 465 us for 594.
    """
    is_sum = isinstance(q.node, Reduction | Scan) and q.node.op == "sum"
    terms = [b for b, _ in va.loads(q.value)]
    if not is_sum or q.value.dtype != torch.float32 or any(map(_is_half, _dtypes(e, terms))):
        return False
    return not _adds_tree_across(e, q) if q.kind is Kind.SCAN else _only_loads(e, q, terms)


def _adds_tree_across(e: Emitter, q: MappedNode) -> bool:
    """Return whether a tile holds the rows of a scan whose results are not next to each other in memory."""
    node = q.node
    assert isinstance(node, Scan)
    step = ex.coefficient(node.index, node.rdims[0])
    return q.points not in e.blocks.long and isinstance(step, int) and abs(step) != 1


def _only_loads(e: Emitter, q: MappedNode, terms: list[str]) -> bool:
    """Return whether a sum is a result of its kernel, and its terms are little more than loads."""
    written = {x.node.out for x in e.kernel.nodes}
    used = {b for x in e.kernel.nodes if x.points != 1 for b, _ in va.loads(x.value)}
    return q.node.out not in used and written.isdisjoint(terms) and va.flops(q.value) <= MOST_FLOPS


def is_long(points: Index, step: Index) -> bool:
    """Return whether a loop over `points` by `step` takes so many turns that a sum has to keep what it rounds off."""
    turns = ex.floordiv(points, step)
    return not isinstance(turns, int) or turns > SHORT_CHAIN


def halvings(e: Emitter, q: MappedNode) -> int:
    """Return how often a thread can add the halves of its part of a row, before it adds what remains in order.

    Triton adds the elements of a thread one after the other. Halves form a tree, whose error grows with its depth.
    Neighbouring threads take neighbours in memory, LOADED elements each: rows of the tile where these are contiguous.
    """
    b = e.blocks
    threads = b.warps * WARP
    block = b.xblock if b.flat else b.rblocks.get(row_length(e, q), 1)  # no block: a number of each row
    if b.rank > 1:
        if not any(is_along_x(index, b.xblock) for _, index in va.loads(q.value)):
            return 0
        threads //= max(1, b.xblock // LOADED)
    else:
        threads *= LOADED
    return max(0, (block // max(1, threads)).bit_length() - 1)


def _dtypes(e: Emitter, buffers: list[str]) -> Iterator[torch.dtype]:
    return (e.program.buffers[b].dtype for b in buffers)


def _is_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def fold(e: Emitter, before: Scope, inside: Scope, term: Term, label: str = "") -> tuple[Value, ...]:
    """Emit an accumulator in `before` and its update in the loop `inside`; return it, and for an exact sum its rest."""
    kind = term.value.dtype
    running = e.fresh(label or _LABELS.get(term.op, "part"))
    labels = (running, f"lost_{running}") if term.exact else (running,)
    for x in labels:
        before.body.append(Accumulator(x, kind, va.identity(term.op, kind), term.shape))
    inside.body.append(Fold(running, term.op, term.value, term.masks, *labels[1:]))
    tiles = tuple(name(x, kind) for x in labels)
    axes = {"XBLOCK": "x"}
    e.axes |= dict.fromkeys(tiles, frozenset(axes.get(block, "r") for block in term.shape if block != "1"))
    return tiles


def reduced(tile: Value, op: str, axis: int, rank: int, times: int = 0) -> Value:
    """Return a tile reduced along an axis, whose halves are added a number of times first."""
    function = "halves_of_rows" if rank > 1 else "halves_of_row"
    parts = va.make("halved", (tile,), tile.dtype, (function, times)) if times else tile
    return va.make("reduced", (parts,), tile.dtype, (op, axis, rank))


def rounded(tiles: tuple[Value, ...]) -> Value:
    """Return the tile itself, or for an exact sum the tile plus its rest, rounded to float32."""
    return tiles[0] if len(tiles) == 1 else va.make("helper", tiles, tiles[0].dtype, "with_lost")
