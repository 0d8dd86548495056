"""Print the forward of attention in Triton: one program for each tile of queries, with an online softmax over keys."""

from __future__ import annotations

from ....ir import expr as ex
from ....ir.attention import Attention, Blocks
from ....ir.expr import Index
from ....ir.loops import Program, View
from ....schedule.attention import Tiles
from ..expressions import TYPES
from ..print_triton import TritonKernel, Workspace, module
from . import attention as text
from .attention import Kernel

Printed = tuple[TritonKernel, tuple[str, ...]]


def forward(p: Program, form: Attention, tiles: Tiles, fast: bool, tf32: bool) -> Printed:
    """Return the kernel and the buffers of its parameters."""
    k = text.kernel(p, form, tiles, fast, tf32)
    lines = [*sums_of(k), *store(k)]
    return finished(k, lines, programs(k), "attention")


def programs(k: Kernel) -> Index:
    """Return the number of tiles of queries."""
    return ex.mul(k.rows.blocks, k.rows.tiles, *k.form.query.sizes[:2])


def sums_of(k: Kernel) -> list[str]:
    """Return lines that compute `sums`, the `total` and `top` of a tile of queries over the keys that it visits."""
    k.outer.names = frozenset(("b", "h", "q_idx"))
    loops = [line for blocks in k.form.blocks or (None,) for line in _loop(k, blocks)]
    head = _head(k)
    return [*head, *k.outer.lines, *_start(k), *loops]


def finished(k: Kernel, lines: list[str], grid: Index, label: str, workspace: tuple[Workspace, ...] = ()) -> Printed:
    """Return the kernel of these lines, and the buffers of its parameters. `workspace`: what it writes besides."""
    t, parameters = k.tiles, k.parameters
    constexprs = {"ROWS": t.rows, "COLUMNS": t.columns, "DEPTH": t.depth, "WIDTH": t.width}
    symbols = tuple(sorted(parameters.symbols))
    pointers = [*(q.name for q in parameters.params.values()), *(w.name for w in workspace)]
    names = [*pointers, *["error"] * parameters.checks, *symbols]
    kernel = TritonKernel(
        source=module([*names, *(f"{c}: tl.constexpr" for c in constexprs)], lines),
        params=tuple(parameters.params.values()),
        symbols=symbols,
        constexprs=constexprs,
        grid=(grid,),
        num_warps=t.warps,
        num_stages=t.stages,
        workspace=workspace,
        checks=parameters.checks,
        label=label,
    )
    return kernel, tuple(parameters.params)


def _head(k: Kernel) -> list[str]:
    """Return lines that find the program's tile of queries and load it."""
    query = k.form.query
    mask = text.joined("", text.depth_mask(query, k.tiles.depth, "depth"))
    return [
        *place(k, k.rows, query.sizes[1]),
        "depth = tl.arange(0, DEPTH)",
        "width = tl.arange(0, WIDTH)",
        f"query = {k.matrix(k.base(query, 'b', 'h'), query, 'q_idx', 'depth[None, :]', mask)}",
        f"keys_of_head = {k.base(k.form.key, *k.head_batch(k.form.key))}",
        f"values_of_head = {k.base(k.form.value, *k.head_batch(k.form.value))}",
    ]


def place(k: Kernel, side: text.Side, heads: Index, names: tuple[str, str] = ("b", "h")) -> list[str]:
    """Return lines that find the batch, head and tile of a program.

    Later tiles, for which loops over queries' keys are often longer, run first.
    """
    tiles = k.parameters.text(ex.mul(side.blocks, side.tiles))
    per_block = k.parameters.text(side.tiles)
    program = ["program = tl.program_id(0)"]
    if k.splits > 1:
        program = [f"split = tl.program_id(0) % {k.splits}", f"program = tl.program_id(0) // {k.splits}"]
    lines = [
        *program,
        f"tile = program % {tiles}" if side is k.columns else f"tile = {tiles} - 1 - program % {tiles}",
        f"{names[1]} = tl.cast(program // {tiles} % {k.parameters.text(heads)}, tl.int32)",
        f"{names[0]} = tl.cast(program // {tiles} // {k.parameters.text(heads)}, tl.int32)",
        f"block = tl.cast(tile // {per_block}, tl.int32)",
        f"part = tl.cast(tile % {per_block}, tl.int32)",
    ]
    return [*lines, *text.tile_lines(k, side, "block", "part")]


def _start(k: Kernel) -> list[str]:
    lines = [
        'top = tl.full([ROWS], float("-inf"), tl.float32)',
        "total = tl.zeros([ROWS], tl.float32)",
        "sums = tl.zeros([ROWS, WIDTH], tl.float32)",
    ]
    return [*lines, 'largest_score = tl.full([ROWS], float("-inf"), tl.float32)'] if _wants(k, 2) else lines


def _wants(k: Kernel, result: int) -> bool:
    return len(k.form.out) > result and k.form.out[result] is not None


def _loop(k: Kernel, blocks: Blocks | None) -> list[str]:
    """Return the loop over the keys of the listed blocks, or over all."""
    level = k.open_level(("kv_idx", "score"))
    key, value = k.form.key, k.form.value
    near = text.near(k.columns, k)
    down = text.depth_mask(key, k.tiles.depth, "depth")
    level.lines.append(
        f"keys = {k.matrix('keys_of_head', key, near + '[None, :]', 'depth[:, None]', text.joined(down, ''))}"
    )
    text.scores(k, k.dot("query", "keys"), blocks is None or blocks.masked, k.columns)
    beside = text.joined("", text.depth_mask(value, k.tiles.width, "width"))
    level.lines += [
        *(["largest_score = largest(largest_score, tl.reduce(final, 1, largest))"] if _wants(k, 2) else []),
        "higher = tl.maximum(top, tl.max(final, 1))",
        'base = tl.where(higher == float("-inf"), 0.0, higher)',
        "weights = tl.exp2(final - base[:, None])",
        "kept = tl.exp2(top - base)",
        "total = total * kept + tl.sum(weights, 1)",
        f"values = {k.matrix('values_of_head', value, near + '[:, None]', 'width[None, :]', beside)}",
        f"sums = {k.dot(k.rounded('weights'), 'values', 'sums * kept[:, None]')}",
        "top = higher",
    ]
    return text.visit(k, blocks, "block", k.columns, k.close_level())


def store(k: Kernel) -> list[str]:
    """Return lines that store the results; a row without scores has 0, and a logsumexp of -inf."""
    inside = text.is_inside(k, k.rows, "block")
    lines = []
    out, *statistics = k.form.out
    if out is not None:
        b = k.program.buffers[out]
        v = View(out, b.sizes, b.strides)
        mask = text.joined(inside, text.depth_mask(k.form.value, k.tiles.width, "width"))
        at = f"{k.base(v, 'b', 'h')} + {k.step(v, 2, 'rows[:, None]')} + {k.step(v, 3, 'width[None, :]')}"
        value = f"tl.cast(sums / tl.where(total == 0.0, 1.0, total)[:, None], {TYPES[b.dtype]})"
        lines.append(f"tl.store({at}, {value}{f', mask={mask}' if mask else ''})")
    values = ('tl.where(top == float("inf"), top, top + tl.log2(total))', "largest_score")
    for name, value in zip(statistics, values, strict=False):
        if name is not None:
            b = k.program.buffers[name]
            v = View(name, b.sizes, b.strides)
            mask = f", mask={inside}" if inside else ""
            lines.append(f"tl.store({k.base(v, 'b', 'h')} + {k.step(v, 2, 'rows')}, {value}{mask})")
    return lines
