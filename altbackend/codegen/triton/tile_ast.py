"""The tile AST: statements over whole tiles that one program of a GPU runs.

A tile has up to two axes. Axis `x` runs over rows or, without rows, over all elements. Axis `r` runs over the points
of a row. A scalar of the IR becomes a named tile that has the axes on which it depends. Values are `ir.value` trees
whose operands are names. They have these operators beside those of the IR:

    tile_load   args: masks; attr: (parameter, index, shape to broadcast the index to or None, eviction policy, run)
    line_load   args: masks; attr: (parameter, index, shape, eviction policy, run): what all rows or all points read
    ordered_load  args: masks; attr: (parameter, index, shape, eviction policy): in the order of rows
    tile_index  attr: index, as int64
    wrapped     args: position; attr: size
    inside      args: wrapped position; attr: size
    tile_scalar attr: index, without a conversion
    narrowed    args: number of 64 bits; attr: index with which it is compared
    guarded     args: value, mask, identity of an operator where the mask does not hold
    broadcast   attr: shape
    reshaped    attr: shape
    spread      one number a thread, for the middle one of three axes
    helper      attr: function of `runtime.tile_math`
    reduced     attr: (operator, axis number, rank)
    halved      attr: function of `runtime.tile_math` that adds the halves of the last axis, how often
    exact_sum   attr: (axis number, rank)
    scanned     attr: (operator, axis number, whether a sum is exact)

`shape` is a tuple of block names, "1" for an axis that the tile does not have, () for a scalar.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from altbackend.lazy_dataclass import dataclass

from ...ir.expr import Index
from ...ir.value import Value
from ...schedule.tiling.gpu.blocks import Blocks
from ...schedule.tiling.gpu.tiled import PartialTotal
from ..cpp.ast import Let, Param
from .templates.matmul import Descriptors, Product

Shape = tuple[str, ...]
Masks = tuple[str, ...]


@dataclass(frozen=True)
class Points:
    """`name`: the positions of an axis that start at `base`, or a single position without a block.

    `axis` is the number of the axis among the `rank` axes of the tile.
    """

    name: str
    base: str
    block: str | None
    axis: int
    rank: int


@dataclass(frozen=True)
class Mask:
    """`name = var < size`."""

    name: str
    var: str
    size: Index


@dataclass(frozen=True)
class Accumulator:
    """A tile that a loop updates, filled with `init`."""

    name: str
    dtype: torch.dtype
    init: Value
    shape: Shape


@dataclass(frozen=True)
class Fold:
    """`target = target op value` where the masks hold. `lost`: the tile that adds up what a sum rounds off."""

    target: str
    op: str
    value: Value
    masks: Masks
    lost: str = ""


@dataclass(frozen=True)
class TileStore:
    """`target[index] = value`, or the atomic `op` of both, where the masks hold. `run`: see `contiguity.hidden_run`.

    `ordered`: neighbouring threads store points of a row (`access.ordered_store`); `shape` is that of the tile.
    """

    target: str
    index: Index
    value: Value
    masks: Masks
    shape: Shape | None
    op: str = ""
    run: int = 0
    ordered: bool = False


@dataclass(frozen=True)
class TileLoop:
    """`for var in range(begin, end, step)`. `stages`: turns whose loads are under way at the same time.

    `joined`: Triton flattens the loop with the loop inside it, so that loads run ahead from one turn to the next.
    """

    var: str
    begin: str
    end: Index
    step: str
    body: tuple[TileStmt, ...]
    stages: int = 1
    joined: bool = False


@dataclass(frozen=True)
class Comment:
    """A comment in the generated code."""

    text: str


TileStmt: TypeAlias = (
    "Let | Points | Mask | Accumulator | Fold | TileStore | TileLoop | Descriptors | Product | Comment"
)


@dataclass(frozen=True)
class Total:
    """The accumulator of `shape` in which a program reduces its rows to a `partial` total; of exact sums also the rest.

    `halvings`: how often the program adds the accumulator's halves first.
    """

    accumulators: tuple[Value, ...]
    shape: Shape
    partial: PartialTotal
    halvings: int


@dataclass(frozen=True)
class TileFunction:
    """A function for the printer; `buffers` are the program's buffers in the order of `params`."""

    params: tuple[Param, ...]
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]
    checks: bool
    blocks: Blocks
    body: tuple[TileStmt, ...]
    totals: tuple[Total, ...]
