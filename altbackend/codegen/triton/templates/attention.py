"""Text that the attention kernels share: addresses of operands, positions of tiles, and loops over listed blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir.attention import BATCH, COLUMN, GRADIENT, HEAD, ROW, SCORE, WHOLE, Attention, Blocks, extents, names
from ....ir.expr import Index
from ....ir.loops import Program, View
from ....schedule.attention import Tiles
from ....schedule.tiling.gpu.blocks import ceil_div
from ..expressions import TYPES
from .scalars import Level, Parameters, Scalars

LOG2E = 1.4426950408889634
_SMALL = 2**31 - 1


@dataclass(frozen=True)
class Side:
    """The queries or the keys. `name`: their positions in scalar trees; `block`: positions of a listed block.

    `tile`: the constant with the positions of a tile; `size`: its number. `axis`: that of the score tile.
    """

    name: str
    positions: str
    extent: Index
    block: int
    tile: str
    size: int
    axis: int

    @property
    def along(self) -> str:
        """Return the subscript that puts positions onto the axis of the score tile."""
        return "[:, None]" if self.axis == 0 else "[None, :]"

    @property
    def blocks(self) -> Index:
        """Return the number of blocks."""
        return 1 if self.block >= WHOLE else ceil_div(self.extent, self.block)

    @property
    def tiles(self) -> Index:
        """Return the number of tiles in a block."""
        return ceil_div(self.extent if self.blocks == 1 else ex.minimum(self.block, self.extent), self.size)

    @property
    def exact(self) -> bool:
        """Return whether no tile exceeds its block, nor the last block the positions."""
        single = self.blocks == 1
        length = self.extent if single else self.block
        fits = isinstance(length, int) and length % self.size == 0
        return fits and (single or (isinstance(self.extent, int) and self.extent % self.block == 0))


@dataclass
class Kernel:
    """One kernel while its text is made.

    `outer`: the lines before the loop over tiles. `splits`: programs that share the keys of a tile of queries.
    """

    program: Program
    form: Attention
    tiles: Tiles
    parameters: Parameters
    scalars: Scalars
    outer: Level
    rows: Side
    columns: Side
    dtype: torch.dtype
    tf32: bool
    splits: int = 1

    def base(self, v: View, *at: str) -> str:
        """Return the address of the matrix of a view at the given batch and head."""
        parts = [self.parameters.of(v.buffer)]
        if v.offset != 0:
            parts.append(f"{self.parameters.text(v.offset)}")
        for position, n, stride in zip(at, v.sizes, v.strides, strict=False):
            if position and n != 1 and stride != 0:
                parts.append(f"tl.cast({position}, tl.int64) * {self.parameters.text(stride)}")
        return " + ".join(parts)

    def step(self, v: View, axis: int, position: str) -> str:
        """Return the distance in memory of a position along an axis from the first one."""
        n, stride = v.sizes[axis], v.strides[axis]
        if stride == 1:
            return position
        far = not isinstance(n, int) or not isinstance(stride, int) or (n + 256) * stride > _SMALL
        return f"{f'tl.cast({position}, tl.int64)' if far else position} * {self.parameters.text(stride)}"

    def matrix(self, base: str, v: View, down: str, beside: str, mask: str) -> str:
        """Return the load of a tile of a view; `down` and `beside`: positions along its last two dimensions."""
        place = f"{base} + {self.step(v, 2, down)} + {self.step(v, 3, beside)}"
        return f"tl.load({place}{f', mask={mask}, other=0.0' if mask else ''})"

    def dot(self, a: str, b: str, total: str = "") -> str:
        """Return a product of tiles in float32."""
        total = f", {total}" if total else ""
        if self.dtype != torch.float32:
            return f"tl.dot({a}, {b}{total})"
        if self.tf32:
            return f'tl.dot(to_tf32({a}), to_tf32({b}){total}, input_precision="tf32")'
        return f'tl.dot({a}, {b}{total}, input_precision="ieee")'

    def rounded(self, x: str) -> str:
        """Return a float32 tile as an operand of a product."""
        return x if self.dtype == torch.float32 else f"tl.cast({x}, {TYPES[self.dtype]})"

    def head_batch(self, v: View) -> tuple[str, str]:
        """Return the batch and the head at which a view has the matrix of batch `b` and head `h`."""
        heads, own = self.form.query.sizes[1], v.sizes[1]
        assert isinstance(heads, int)
        assert isinstance(own, int)
        group = heads // own
        return "b", "h" if group == 1 else f"(h // {group})"

    def open_level(self, names: Sequence[str]) -> Level:
        """Add a level inside the present ones."""
        level = Level(frozenset(names))
        self.scalars.levels.append(level)
        return level

    def close_level(self) -> list[str]:
        """Remove the innermost level and return its lines."""
        return self.scalars.levels.pop().lines


def kernel(p: Program, form: Attention, tiles: Tiles, fast: bool, tf32: bool, transposed: bool = False) -> Kernel:
    """Return an empty kernel. `transposed`: its tiles of scores have keys on their first axis."""
    dtype = p.buffers[form.query.buffer].dtype
    b = form.backward
    captured = [g.out.buffer for g in b.captured] if b is not None else []
    written = frozenset([*(o for o in form.out if o), *captured])
    rows = Side("q_idx", "rows", form.query.sizes[2], form.block_sizes[0], "ROWS", tiles.rows, int(transposed))
    columns = Side(
        "kv_idx", "columns", form.key.sizes[2], form.block_sizes[1], "COLUMNS", tiles.columns, int(not transposed)
    )
    parameters = Parameters(p.buffers, written)
    outer = Level(frozenset())
    axes = {BATCH: "", HEAD: "", ROW: "m", COLUMN: "n", SCORE: "mn", GRADIENT: "mn"}
    shape = {"n": "COLUMNS", "m": "ROWS"} if transposed else {"m": "ROWS", "n": "COLUMNS"}
    scalars = Scalars(parameters, [outer], {x.attr: frozenset(a) for x, a in axes.items()}, shape, extents(form), fast)
    return Kernel(p, form, tiles, parameters, scalars, outer, rows, columns, dtype, tf32)


# --- positions -------------------------------------------------------------------------------------------------------


def tile_lines(k: Kernel, side: Side, block: str, within: str) -> list[str]:
    """Return lines that define the positions of a tile, raw and confined to the operand.

    `block`: the number of the listed block. `within`: that of the tile in the block. They are names.
    """
    one = side.blocks == 1
    first = f"{within} * {side.tile}" if one else f"{block} * {side.block} + {within} * {side.tile}"
    if side.tiles == 1:
        first = "" if one else f"{block} * {side.block}"
    lines = [f"{side.positions} = {first + ' + ' if first else ''}tl.arange(0, {side.tile})"]
    confined = side.positions
    if not side.exact:
        confined = f"tl.minimum({side.positions}, {k.parameters.text(side.extent)} - 1)"
    if not isinstance(side.extent, int):
        confined = f"tl.cast({confined}, tl.int32)"
    if confined != side.positions:
        lines.append(f"{side.positions}_near = {confined}")
        confined = f"{side.positions}_near"
    return [*lines, f"{side.name} = {confined}{side.along}"]


def near(side: Side, k: Kernel) -> str:
    """Return the name of the confined positions of a tile, of one axis."""
    return side.positions if side.exact and isinstance(side.extent, int) else f"{side.positions}_near"


def is_inside(k: Kernel, side: Side, block: str) -> str:
    """Return the condition, of one axis, under which positions of a tile belong to its block, or "" for always."""
    if side.exact:
        return ""
    conditions = []
    if not (isinstance(side.extent, int) and side.extent % side.block == 0):
        conditions.append(f"({side.positions} < {k.parameters.text(side.extent)})")
    if side.blocks != 1 and side.block % side.size:
        conditions.append(f"({side.positions} < {block} * {side.block} + {side.block})")
    return " & ".join(conditions)


def depth_mask(v: View, padded: int, name: str) -> str:
    """Return the condition under which an element belongs to a head, or "" for always."""
    return "" if v.sizes[3] == padded else f"{name} < {v.sizes[3]}"


def joined(first: str, second: str) -> str:
    """Return the mask of a tile from masks of its two axes."""
    parts = [f"({first})[:, None]"] if first else []
    return " & ".join([*parts, *([f"({second})[None, :]"] if second else [])])


# --- loops over blocks -----------------------------------------------------------------------------------------------


def visit(k: Kernel, blocks: Blocks | None, outer: str, side: Side, body: list[str]) -> list[str]:
    """Return the loop over the tiles of `side` in the blocks that are listed for the block `outer` of the other side.

    Without `blocks`, over all tiles. `body` reads the positions of the tile.
    """
    if blocks is None:
        lines = ["within = tl.cast(turn, tl.int32)", *tile_lines(k, side, "", "within"), *body]
        return [*_turns(k, k.parameters.text(side.tiles)), *(f"    {x}" for x in lines)]
    counts, indices = blocks.counts, blocks.indices
    at = [position if n != 1 else "0" for position, n in zip(("b", "h", outer), counts.sizes, strict=True)]
    count_at, list_at = (
        "".join(f" + {x} * {k.parameters.text(s)}" for x, s in zip(at, v.strides, strict=False) if x != "0")
        for v in (counts, indices)
    )
    starts = [k.base(counts), k.base(indices)]
    longest = indices.sizes[3]
    other = k.rows if side is k.columns else k.columns
    listed = counts.sizes[2]
    is_in_bounds = isinstance(listed, int) and isinstance(other.blocks, int) and other.blocks <= listed
    mask = "" if is_in_bounds or at[2] == "0" else f", mask={outer} < {k.parameters.text(listed)}, other=0"
    if at[2] == "0" and other.blocks != 1:
        mask = f", mask={outer} == 0, other=0"
    tiles = k.parameters.text(side.tiles)
    most = "1" if side.blocks == 1 else k.parameters.text(longest)
    lines = [f"count = tl.minimum(tl.load({starts[0]}{count_at}{mask}), {most})"]
    last = k.parameters.text(ex.sub(side.blocks, 1))
    block = [
        f"visited = tl.load({starts[1]}{list_at}{{turn}})",
        f"visited = tl.cast(tl.minimum(tl.maximum(visited, 0), {last}), tl.int32)",
    ]
    turns = f"count * {tiles}" if side.tiles != 1 else "count"
    inside: list[str] = []
    if side.blocks == 1:
        pass
    elif longest == 1:
        lines += [x.format(turn="") for x in block]
    else:
        turn = "turn" if side.tiles == 1 else f"turn // {tiles}"
        step = indices.strides[3]
        inside = [x.format(turn=f" + {turn}" + (f" * {k.parameters.text(step)}" if step != 1 else "")) for x in block]
    if side.tiles != 1:
        alone = side.blocks == 1 or longest == 1
        inside.append("within = tl.cast(turn, tl.int32)" if alone else f"within = tl.cast(turn % {tiles}, tl.int32)")
    inside += tile_lines(k, side, "visited", "within")
    return [*lines, *_turns(k, turns), *(f"    {x}" for x in (*inside, *body))]


def _turns(k: Kernel, count: str) -> list[str]:
    """Return the head of a loop, over the program's part of it if several programs share it."""
    if k.splits == 1:
        return [f"for turn in range(0, {count}):"]
    n = k.splits
    return [f"turns = {count}", f"for turn in range(turns * split // {n}, turns * (split + 1) // {n}):"]


def scores(k: Kernel, product: str, masked: bool, side: Side) -> bool:
    """Add lines that turn the product of queries and keys into `final`, scores of base 2.

    Where a score is left out, `keeps` is false and the final score -inf. Return whether `keeps` is defined. `side`:
    the one along which the loop runs. `masked`: the mask function applies.
    """
    form = k.form
    backward = form.backward
    trees = [form.score, *([backward.score, *(g.value for g in backward.captured)] if backward is not None else [])]
    folded = form.score is SCORE and all(SCORE not in names(t) for t in trees[1:])
    lines = k.scalars.levels[-1].lines
    lines.append(f"score = {product} * {form.scale * LOG2E if folded else form.scale!r}")
    inside = is_inside(k, side, "visited")
    conditions = [f"({inside}){side.along}"] if inside else []
    everywhere = form.mask.op == "const" and bool(form.mask.attr)
    if masked and not everywhere:
        conditions.append(k.scalars.full(form.mask))
    text = "score" if form.score is SCORE else k.scalars.full(form.score)
    if conditions:
        lines.append(f"keeps = {' & '.join(conditions)}")
        text = f'tl.where(keeps, {text}, float("-inf"))'
    lines.append(f"final = {text}" + ("" if folded else f" * {LOG2E!r}"))
    return bool(conditions)
