"""Print the loop of a matrix product in Triton, which runs before the pointwise code that uses its sums.

The text defines `across` and `along`, the numbers of the tile of rows and of that of columns. It also defines `batch`,
where there is one, and the float32 tile `sums` [XBLOCK, RBLOCK]. Tiles are numbered in bands of several rows, as in
Triton's matmul tutorial: programs that run together share columns in the L2 cache.
"""

from __future__ import annotations

import torch

from altbackend.lazy_dataclass import dataclass

from ....schedule.products.matmul import Matmul, Operand, tiles_of


@dataclass(frozen=True)
class Product:
    """A statement: compute the sums of tile number `tile` from the parameters `left` and `right`."""

    tile: str
    left: str
    right: str
    matmul: Matmul


@dataclass(frozen=True)
class Descriptors:
    """A statement: write the descriptors of both operands, once in every program."""

    left: str
    right: str
    matmul: Matmul


DESCRIPTOR_BYTES = 128  # bytes of global memory for one descriptor


def scratch_bytes(m: Matmul | None) -> int:
    """Return the bytes of global memory that each program of a kernel needs for its descriptors."""
    return 2 * DESCRIPTOR_BYTES if m is not None and m.tiles is not None and m.tiles.descriptors else 0


def lines(s: Product) -> list[str]:
    """Return the lines that compute the sums."""
    m = s.matmul
    t, _, _ = tiles_of(m)
    if t.descriptors:
        return [*_position(s.tile, m), *_load_by_descriptors(m)]
    left, right = m.left.strides, m.right.strides
    rows, row_mask = _inside("rows", m.rows, t.rows, masked=left[1] == 1)
    # a row that ends with padding is read to the end, 16 bytes at a time; nothing stores the results of padding
    columns, column_mask = _inside("columns", m.stored_columns, t.columns, masked=right[2] == 1)
    term_mask = "depth < left_over" if m.depth % t.depth else ""
    return [
        *_position(s.tile, m),
        "rows = across * XBLOCK + tl.arange(0, XBLOCK)",
        "columns = along * RBLOCK + tl.arange(0, RBLOCK)",
        *rows,
        *columns,
        "depth = tl.arange(0, KBLOCK)",
        f"left = {_base(s.left, m.left)}{_scaled('rows[:, None]', left[1])}{_scaled('depth[None, :]', left[2])}",
        f"right = {_base(s.right, m.right)}{_scaled('depth[:, None]', right[1])}"
        f"{_scaled('columns[None, :]', right[2])}",
        "sums = tl.zeros([XBLOCK, RBLOCK], tl.float32)",
        f"for begin in range(0, {m.depth}, KBLOCK):",
        *([f"    left_over = {m.depth} - begin"] if term_mask else []),
        f"    a = tl.load(left{_mask(row_mask, term_mask)})",
        f"    b = tl.load(right{_mask(term_mask, column_mask)})",
        _dot(m),
        f"    left += {_times('KBLOCK', left[2])}",
        f"    right += {_times('KBLOCK', right[1])}",
    ]


def descriptor_lines(s: Descriptors) -> list[str]:
    """Return the lines that write the descriptors; loads beyond the end of a matrix give zero."""
    m = s.matmul
    sides = (
        ("left", _base(s.left, m.left), m.left.strides, (m.rows, m.depth), ("XBLOCK", "KBLOCK")),
        ("right", _base(s.right, m.right), m.right.strides, (m.depth, m.columns), ("KBLOCK", "RBLOCK")),
    )
    out = []
    for label, base, (_, down, beside), sizes, blocks in sides:
        turn = 1 if beside == 1 else -1  # the contiguous dimension stands last
        shape, block = (", ".join(map(str, x[::turn])) for x in (sizes, blocks))
        step = down if beside == 1 else beside
        out.append(f"{label}_parts = tl.make_tensor_descriptor({base}, [{shape}], [{step}, 1], [{block}])")
    return out


def _load_by_descriptors(m: Matmul) -> list[str]:
    a = "[across * XBLOCK, begin])" if m.left.strides[2] == 1 else "[begin, across * XBLOCK]).T"
    b = "[begin, along * RBLOCK])" if m.right.strides[2] == 1 else "[along * RBLOCK, begin]).T"
    return [
        "sums = tl.zeros([XBLOCK, RBLOCK], tl.float32)",
        f"for begin in range(0, {m.depth}, KBLOCK):",
        f"    a = left_parts.load({a}",
        f"    b = right_parts.load({b}",
        _dot(m),
    ]


def _dot(m: Matmul) -> str:
    if m.dtype == torch.float32:
        return '    sums = tl.dot(to_tf32(a), to_tf32(b), sums, input_precision="tf32")'
    return "    sums = tl.dot(a, b, sums)"


def _position(tile: str, m: Matmul) -> list[str]:
    t, down, wide = tiles_of(m)
    out = []
    if m.batch > 1:
        out = [f"batch = {tile} // {down * wide}", f"within = {tile} % {down * wide}"]
        tile = "within"
    band = min(t.band, down)
    if band == 1:
        return [*out, f"across = {tile} // {wide}", f"along = {tile} % {wide}"]
    if band == down:
        return [*out, f"across = {tile} % {down}", f"along = {tile} // {down}"]
    height = str(band) if down % band == 0 else "height"
    return [
        *out,
        f"first = {tile} // {band * wide} * {band}",
        *([f"height = tl.minimum({down} - first, {band})"] if height == "height" else []),
        f"across = first + {tile} % {band * wide} % {height}",
        f"along = {tile} % {band * wide} // {height}",
    ]


def _inside(name: str, size: int, block: int, masked: bool) -> tuple[list[str], str]:
    """Return lines and a mask that confine positions to the matrix: a mask where they are contiguous, else clamping.

    Clamping costs nothing in the loop, but would hide from the compiler that positions are contiguous.
    """
    if size % block == 0:
        return [], ""
    if masked:
        return [], f"{name} < {size}"
    return [f"{name} = tl.minimum({name}, {size - 1})"], ""


def _base(param: str, o: Operand) -> str:
    batch = f" + {_times('batch', o.strides[0])}" if o.strides[0] else ""
    return param + (f" + {o.offset}" if o.offset else "") + batch


def _scaled(text: str, step: int) -> str:
    return f" + {_times(text, step)}"


def _times(text: str, step: int) -> str:
    return text if step == 1 else f"{text} * {step}"


def _mask(below: str, beside: str) -> str:
    """Return the mask arguments of a load; `below` masks the first axis, `beside` the second."""
    masks = [*([f"({below})[:, None]"] if below else []), *([f"({beside})[None, :]"] if beside else [])]
    return f", mask={' & '.join(masks)}, other=0.0" if masks else ""
