"""Tiles of attention kernels, from the registers and shared memory of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ..errors import Unsupported
from ..ir import expr as ex
from ..ir.attention import Attention
from ..ir.expr import Index
from ..ir.loops import Program
from .device import Gpu

LEAST = 16  # rows, columns and depth of the tensor cores' smallest tile
LARGEST = 256
# float32 numbers that a thread may keep in tiles, of 255 registers; the rest is for addresses and operands. From
# capability 9.0 on, tensor cores read their operands from shared memory.
PER_THREAD, PER_THREAD_FROM_90 = 160, 200
# Gradients of 64 by 64 scores of 16 bits, from capability 9.0 on: one group of four warps computes a product of 64
# rows. On an H100 with 128 elements of a head, which need 224 numbers a thread, eight warps take 1.8 times as long, and
# three stages 1.13 times.
PER_THREAD_OF_GROUP, GROUP_WARPS, GROUP_STAGES = 224, 4, 2
# Gradients in TF32 take 64 by 64 scores, too, for heads of up to so many elements. On an H200 with 2,552 keys of 32
# elements, both directions take 2.4 ms; tiles of 32 by 32 with two stages take 7.0, and 64 by 64 with two stages 2.6.
TF32_DEPTH = 64
# Without tensor cores, a thread holds its part of whole operands, along all elements of a head.
EXACT_SIDE, EXACT_WARPS = 32, 8
SPARE = 4 << 10  # bytes of shared memory for reductions and changes of layout

# Tiles of queries are shared where there are fewer than so many programs for each multiprocessor. Each of the sharing
# programs then has at least so many turns, and there are at most so many of them.
PROGRAMS, SPLIT_TURNS, MOST_SPLITS = 2, 4, 64


@dataclass(frozen=True)
class Tiles:
    """`rows` of queries by `columns` of keys; loads run `stages` turns ahead.

    `depth` and `width`: the elements of a query and of a value, padded to a power of two.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int
    width: int


def padded(n: int) -> int:
    """Return the least power of two that tensor cores take and that is at least `n`."""
    return max(LEAST, 1 << (n - 1).bit_length())


def forward_tiles(p: Program, form: Attention, device: Gpu, exact: bool) -> Tiles:
    """Return the tiles of the forward: as many rows as its sums and scores leave registers for.

    `exact`: products of float32 that tensor cores do not compute.
    """
    start = _start(p, form, exact, rows=128, columns=64)
    chosen = _of_user(form, start, "fwd_", ("BLOCK_M", "BLOCK_N"))
    if chosen is not None and forward_bytes(p, form, chosen) <= device.shared_memory:
        return chosen
    t = _within_queries(form, start)
    room = PER_THREAD_FROM_90 if device.capability >= 90 else PER_THREAD
    while t.rows > LEAST and _per_thread(t.rows * (t.width + 2 * t.columns), t.warps) > room:
        t = replace(t, columns=t.columns // 2) if t.columns > 2 * LEAST else replace(t, rows=t.rows // 2)
    return _fitting(t, lambda x: forward_bytes(p, form, x), device)


def splits_of(form: Attention, t: Tiles, device: Gpu) -> int:
    """Return how many programs share the keys of a tile of queries: several where few queries leave a GPU idle.

    Return 1 where the number of tiles is symbolic.
    """
    *outer, rows = form.query.sizes[:3]
    blocks = min(form.block_sizes[0], rows) if isinstance(rows, int) else 0
    if not blocks or not all(isinstance(n, int) for n in outer) or (len(form.out) > 2 and form.out[2] is not None):
        return 1
    tiles = -(-_number(rows) // blocks) * -(-blocks // t.rows) * _number(outer[0]) * _number(outer[1])
    wanted = PROGRAMS * device.sms // tiles
    possible = ex.bounds(form.key.sizes[2])[1] // (SPLIT_TURNS * t.columns)
    return max(1 << min(wanted, possible, MOST_SPLITS).bit_length() >> 1, 1)


def backward_tiles(p: Program, form: Attention, device: Gpu, exact: bool, by_keys: bool) -> Tiles:
    """Return the tiles of the gradients of keys and values (`by_keys`), or of those of queries."""
    start = _start(p, form, exact, rows=64, columns=64)
    if not exact and p.buffers[form.query.buffer].dtype.itemsize > 2 and max(start.depth, start.width) <= TF32_DEPTH:
        start = replace(start, rows=64, columns=64, stages=1)
    names = ("BLOCK_M1", "BLOCK_N1") if by_keys else ("BLOCK_M2", "BLOCK_N2")
    chosen = _of_user(form, start, "bwd_", names)
    if chosen is not None and backward_bytes(p, form, chosen, by_keys) <= device.shared_memory:
        return chosen
    one_group = _one_group(p, form, device, start, exact)
    room = PER_THREAD if one_group is start else PER_THREAD_OF_GROUP
    t = one_group if by_keys else _within_queries(form, one_group)
    while max(t.rows, t.columns) > LEAST and _per_thread(_backward_numbers(t, by_keys), t.warps) > room:
        outer, inner = (t.columns, t.rows) if by_keys else (t.rows, t.columns)
        outer, inner = (outer, inner // 2) if inner > 2 * LEAST or outer <= LEAST else (outer // 2, inner)
        t = replace(t, columns=outer, rows=inner) if by_keys else replace(t, rows=outer, columns=inner)
    return _fitting(t, lambda x: backward_bytes(p, form, x, by_keys), device)


def _one_group(p: Program, form: Attention, device: Gpu, t: Tiles, exact: bool) -> Tiles:
    """Return the tiles for one group of warps where its registers hold the sums of either kind of gradient."""
    if exact or device.capability < 90 or p.buffers[form.query.buffer].dtype.itemsize > 2 or t.warps <= GROUP_WARPS:
        return t
    few = replace(t, warps=GROUP_WARPS, stages=GROUP_STAGES)
    return few if _per_thread(_backward_numbers(few, by_keys=True), GROUP_WARPS) <= PER_THREAD_OF_GROUP else t


def _backward_numbers(t: Tiles, by_keys: bool) -> int:
    """Return the numbers of a program's sums, and of three tiles of scores."""
    return (t.columns * (t.depth + t.width) if by_keys else t.rows * t.depth) + 3 * t.rows * t.columns


def forward_bytes(p: Program, form: Attention, t: Tiles) -> int:
    """Return the bytes of shared memory: the queries, and the keys and values of all stages."""
    size = p.buffers[form.query.buffer].dtype.itemsize
    return (t.rows * t.depth + t.stages * t.columns * (t.depth + t.width) + t.rows * t.columns) * size + SPARE


def backward_bytes(p: Program, form: Attention, t: Tiles, by_keys: bool) -> int:
    """Return the bytes of shared memory: one side's operands once, the other's for all stages, and two score tiles."""
    size = p.buffers[form.query.buffer].dtype.itemsize
    once, often = (t.columns, t.rows) if by_keys else (t.rows, t.columns)
    return ((once + t.stages * often) * (t.depth + t.width) + 2 * t.rows * t.columns) * size + SPARE


def _start(p: Program, form: Attention, exact: bool, rows: int, columns: int) -> Tiles:
    depth, width = (padded(_number(v.sizes[3])) for v in (form.query, form.value))
    if exact:
        return Tiles(EXACT_SIDE, EXACT_SIDE, EXACT_WARPS, 2, depth, width)
    warps = 4 if max(depth, width) <= 64 else 8
    wide = p.buffers[form.query.buffer].dtype.itemsize > 2
    return Tiles(rows // 2 if wide else rows, columns // 2 if wide else columns, warps, 3 - wide, depth, width)


def _within_queries(form: Attention, t: Tiles) -> Tiles:
    """Return tiles with no more rows than there are queries; fewer rows take fewer warps."""
    rows = min(t.rows, padded(min(ex.bounds(form.query.sizes[2])[1], LARGEST)))
    return replace(t, rows=rows, warps=t.warps if rows == t.rows else min(t.warps, max(rows // LEAST, 4)))


def _per_thread(numbers: int, warps: int) -> float:
    return numbers / (32 * warps)


def _fitting(t: Tiles, size: Callable[[Tiles], int], device: Gpu) -> Tiles:
    """Return the tiles, smaller if they exceed shared memory. Raises Unsupported where none fit."""
    while size(t) > device.shared_memory and (t.stages > 1 or max(t.rows, t.columns) > LEAST):
        if t.stages > 1:
            t = replace(t, stages=t.stages - 1)
        elif t.columns > LEAST and t.columns >= t.rows:
            t = replace(t, columns=t.columns // 2)
        else:
            t = replace(t, rows=t.rows // 2)
    if size(t) > device.shared_memory:
        raise Unsupported("attention", f"its smallest tiles need {size(t)} bytes of shared memory")
    return t


def _of_user(form: Attention, t: Tiles, prefix: str, names: tuple[str, str]) -> Tiles | None:
    """Return the tiles that the call's kernel options name, or None where they name none that are possible."""

    def option(label: str, default: int) -> int:
        return form.options.get(prefix + label, form.options.get(label, default))

    rows, columns = (option(n, size) for n, size in zip(names, (t.rows, t.columns), strict=True))
    warps, stages = option("num_warps", t.warps), option("num_stages", t.stages)
    chosen = replace(t, rows=rows, columns=columns, warps=warps, stages=stages)
    powers = all(n & (n - 1) == 0 for n in (rows, columns, warps))
    possible = min(rows, columns) >= LEAST and max(rows, columns) <= LARGEST and 1 <= warps <= LEAST
    return chosen if chosen != t and powers and possible and 1 <= stages <= 8 else None


def _number(n: Index) -> int:
    assert isinstance(n, int)
    return n
