"""How a kernel is cut into programs and tiles on a GPU: the sizes, without any code.

flat    one axis over all elements, a program computes one block of them
rows    a program computes XBLOCK rows; a row is one tile, or blocks that every pass reads one after the other
matmul  a program computes XBLOCK rows and RBLOCK columns of a matrix product, and what is made of them at once
slices  programs walk over rows (or, flat, over elements) and keep totals, of which each leaves one in a workspace
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Program, reads, writes
from ....ir.ops import OPS
from ...device import PROGRAMS_PER_SM, Target
from ...fusion.gpu_rules import COLUMNS, inner_points, is_long, rows_are_neighbours
from ...kernel import Kernel
from ...loop_mapping import MappedNode
from ...products.matmul import Matmul, tiles_of
from .online_softmax import Online, plan
from .pressure import alive_at_once

FLAT, ROWS, CROSSED, SLICES, MATMUL = "flat", "rows", "crossed", "slices", "matmul"
ALONE = 4096  # elements that one program reduces as fast as many programs and a second kernel do
FLAT_BLOCK = 1024  # 8 elements a thread of 4 warps: one 16-byte load of 16-bit floats
SLICE_BLOCK = 4096
CROSS_BLOCK, SMALL_CROSS_BLOCK = 64, 32  # a side of a square: whole cache lines for loads and stores
ROW_TILE = 2048  # elements of a tile of several short rows
ROW_ALONE = 1024  # elements of a row that is a tile of its own
LONG_BLOCK = 2048  # elements of a long row that are in registers at a time
LONG_BLOCK_OF_FEW = 8192  # the same where a row is read from one or two tensors
COLUMN_BLOCK = 64  # points of a tile whose rows, not points, are neighbours in memory; it has COLUMNS rows
MUCH_A_ROW = 16  # float additions: as long as two elements of a thread take
WINDOW = 3  # places of a tensor for a total each: more tiles than a program holds whole rows of
# Rows, points and warps of each of these tiles: the fastest of 12 over 8 depthwise convolutions on an H200.
SLIDING = (64, 16, 4)
COLUMN_LIMIT = 512  # points of such a row that are kept in registers
SECTOR = 32  # bytes that memory gives at least: of so many neighbours a program takes all
# Programs that keep totals over rows of at most so many elements: elements of their tile, and warps, as measured on an
# H200 with layer norms' backwards. A row within as few warps as may be, 16 elements a thread.
SLICED = {128: (4096, 8), 1024: (1024, 2), 2048: (2048, 4)}
FEWEST_SLICES, MOST_SLICES = 2, 8  # such programs a multiprocessor: all at once, since a second round would be a tail
LEAST_TURNS = 4  # of each, where they are more than the fewest: every one leaves a row of totals
REGISTER_FILE = 65536  # of a multiprocessor
OTHER_REGISTERS = 30  # of a thread, besides its elements of tiles: positions and masks
SPARE = 1.2  # times the estimate: the compiler took at most 1.21 times as many in 20 kernels of training steps
CACHE_BYTES = 64 << 20  # more than the L2 cache holds
ROWS_IN_CACHE = 24 << 20  # bytes of rows that are found there when they are read again
THREADS_PER_SM = 2048
MOST_LONG_WARPS = 16  # with LONG_BLOCK_OF_FEW for 8 warps, two such programs fill a multiprocessor's registers


@dataclass(frozen=True)
class Blocks:
    """`points`: extent of the axis `x`; `rblocks`: block of every row length, `long` those read in several blocks.

    `flat`: `x` runs over elements and there is no row axis. `programs`: launched programs. `wide`: positions need 64
    bits. `streams`: what is read does not fit in the cache. `cross`: loops of the axis `x` from slow to fast, then the
    one loop of the row axis. `depth`: terms of a matrix product's sums at a time, loaded `stages` turns ahead.
    """

    form: str
    flat: bool
    points: Index
    xblock: int
    rblocks: dict[Index, int]
    long: frozenset[Index]
    programs: Index
    warps: int
    wide: bool
    streams: bool
    cross: tuple[Atom, ...] = ()
    depth: int = 0
    stages: int = 1

    @property
    def tiled_x(self) -> bool:
        return self.xblock > 1

    @property
    def has_rows(self) -> bool:
        return bool(self.rblocks)

    @property
    def rank(self) -> int:
        return max(self.tiled_x + self.has_rows, 1)

    def looped(self, n: Index) -> bool:
        return n in self.long

    def name_of(self, n: Index) -> str:
        return f"RBLOCK{list(self.rblocks).index(n) or ''}"

    @property
    def constexprs(self) -> dict[str, int]:
        x = {"XBLOCK": self.xblock} if self.tiled_x else {}
        k = {"KBLOCK": self.depth} if self.depth else {}
        return x | {self.name_of(n): b for n, b in self.rblocks.items()} | k


def choose(p: Program, k: Kernel, target: Target) -> Blocks:
    """The blocks of a kernel."""
    if k.matmul is not None:
        return _matmul(p, k, k.matmul, target)
    members = [q for s in k.stages for q in s.members]
    kinds = {q.kind for q in members}
    lengths = list(dict.fromkeys(inner_points(q) for q in members))
    if k.rows == 1:
        totals = "inner" in kinds and "scan" not in kinds and not _reads_total(members)
        few = all(isinstance(n, int) and n <= ALONE for n in lengths)
        if (order := _crossing(k)) is not None:
            return _crossed(p, k, order, target)
        if (order := _row_blocks(k)) is not None:
            return _squares(p, k, order, (1, FLAT_BLOCK * (2 if _work_a_row(k, order[-1]) > MUCH_A_ROW else 1)))
        if kinds <= {"point", "scatter"}:
            return _flat(p, k, lengths, target)
        if totals and not few and len(lengths) == 1:
            return _flat_slices(p, k, lengths[0], target)
    return _rows(p, k, members, lengths, target)


MOST_WARPS = 32
PER_THREAD = 64  # elements of a tile that a thread may hold


def variants(b: Blocks, target: Target) -> list[Blocks]:
    """Other warps, rows or elements a program, and numbers of programs, for measuring. Static sizes only."""
    if b.form == MATMUL or not isinstance(b.points, int) or not isinstance(b.programs, int):
        return []
    sizes = [b]
    if b.form in (FLAT, ROWS):
        others = (b.xblock // 2, b.xblock * 2, *((b.xblock * 4,) if b.form == FLAT else ()))
        sizes += [replace(b, xblock=x, programs=-(-b.points // x)) for x in others if 1 <= x <= power_of_two(b.points)]
    if b.form == SLICES:
        turns = -(-b.points // b.xblock)
        sizes += [replace(b, programs=n) for n in (b.programs // 2, b.programs * 2) if 1 <= n <= turns]
        if b.has_rows:
            sizes += [_of_height(b, b.points, x) for x in (b.xblock // 2, b.xblock * 2) if x >= 1]
    return [replace(s, warps=w) for s in sizes for w in _warps_around(s) if s is not b or w != b.warps]


def _of_height(b: Blocks, rows: int, height: int) -> Blocks:
    """Programs that keep totals over `rows`, with tiles of so many."""
    return replace(b, xblock=height, programs=_at_most(b.programs, -(-rows // height)))


def _warps_around(b: Blocks) -> list[int]:
    tile = b.xblock * max(b.rblocks.values(), default=1)
    around = (b.warps // 2, b.warps, b.warps * 2, b.warps * 4)
    return [w for w in around if 1 <= w <= MOST_WARPS and w * 32 <= tile <= w * 32 * PER_THREAD]


def _reads_total(members: list[MappedNode]) -> bool:
    totals = {q.node.out for q in members if q.kind != "point"}
    return any(b in totals for q in members for b, _ in va.loads(q.value))


def ceil_div(n: Index, d: int) -> Index:
    return ex.floordiv(ex.add(n, d - 1), d)


def power_of_two(n: int) -> int:
    """The least power of two that is not less than `n`."""
    return 1 << max(n - 1, 0).bit_length()


def _warps(tile: int) -> int:
    for limit, warps in ((256, 1), (512, 2), (2048, 4), (8192, 8)):
        if tile <= limit:
            return warps
    return 16


def _is_wide(p: Program, k: Kernel, walked: Index) -> bool:
    """Whether a position in a buffer, or on the axis `x`, may pass 31 bits."""
    names = {b for m in k.members for b in (*reads(p.nodes[m]), *writes(p.nodes[m]))} if k.members else set()
    extents = [walked, *(p.buffers[b].extent for b in names)]
    return any(ex.bounds(n)[1] >= 2**31 - 2**24 for n in extents)


def _flat(p: Program, k: Kernel, lengths: list[Index], target: Target) -> Blocks:
    points = _longest(lengths)
    xblock = FLAT_BLOCK
    if isinstance(points, int):
        xblock = min(xblock, power_of_two(points))
        while xblock > 128 and points < xblock * target.parallel // 4:
            xblock //= 2
    programs = ceil_div(points, xblock)
    warps = _warps(xblock)
    if len(_loaded(q for s in k.stages for q in s.members)) == 1:
        warps = max(warps // 2, 1)  # two loads of 16 bytes under way where there would be one
    return Blocks(FLAT, True, points, xblock, {}, frozenset(), programs, warps, _is_wide(p, k, points), False)


def _loaded(members: Iterable[MappedNode]) -> set[str]:
    """The buffers that members read and none of them makes."""
    held = list(members)
    return {b for q in held for b, _ in va.loads(q.value)} - {q.node.out for q in held}


def _crossing(k: Kernel) -> tuple[Atom, ...] | None:
    """Loops with that along which loads are contiguous next to last and that of the stores last, if they differ."""
    if len(k.stages) != 1 or any(q.kind != "point" for q in k.stages[0].members):
        return None
    inner = k.stages[0].inner
    for q in k.stages[0].members:
        stored = _contiguous(q.index, inner)
        for _, index in va.loads(q.value):
            read = _contiguous(index, inner)
            if stored is None or read is None or read is stored or ex.coefficient(index, stored) == 0:
                continue
            if all(isinstance(n, int) and n >= SMALL_CROSS_BLOCK // 2 for n in map(ex.size_of, (read, stored))):
                return (*(v for v in inner if v is not read and v is not stored), read, stored)
    return None


def _contiguous(index: Index, loops: tuple[Atom, ...]) -> Atom | None:
    return next((v for v in loops if ex.coefficient(index, v) == 1), None)


def _crossed(p: Program, k: Kernel, order: tuple[Atom, ...], target: Target) -> Blocks:
    """Squares over two loops; the other loops are further rows of squares."""
    full = ex.prod(ex.size_of(v) for v in order)
    large = isinstance(full, int) and full >= target.parallel * CROSS_BLOCK * CROSS_BLOCK // 4
    side = CROSS_BLOCK if large else SMALL_CROSS_BLOCK
    return _squares(p, k, order, (side, side))


def _squares(p: Program, k: Kernel, order: tuple[Atom, ...], sides: tuple[int, int]) -> Blocks:
    """Tiles over all loops but the last, taken as rows, and the last one."""
    points, width = ex.prod(ex.size_of(v) for v in order[:-1]), ex.size_of(order[-1])
    across, along = sides
    programs = ex.mul(ceil_div(points, across), ceil_div(width, along))
    wide = _is_wide(p, k, ex.mul(points, width))
    return Blocks(
        CROSSED,
        False,
        points,
        across,
        {width: along},
        frozenset(),
        programs,
        _warps(across * along),
        wide,
        False,
        order,
    )


def _matmul(p: Program, k: Kernel, m: Matmul, target: Target) -> Blocks:
    t, high, wide = tiles_of(m)
    programs = m.batch * high * wide
    return Blocks(
        MATMUL,
        False,
        m.batch * m.rows,
        t.rows,
        {m.columns: t.columns},
        frozenset(),
        min(programs, target.parallel // PROGRAMS_PER_SM) if t.persistent else programs,
        t.warps,
        _is_wide(p, k, m.points),
        False,
        depth=t.depth,
        stages=t.stages,
    )


def _row_blocks(k: Kernel) -> tuple[Atom, ...] | None:
    """The loops of pointwise work on long rows some of whose operands are one number a row: it is read once a block.

    None where rows start at places that wide loads cannot take, or where one axis over all elements does as well.
    """
    if len(k.stages) != 1 or any(q.kind != "point" for q in k.stages[0].members) or len(k.stages[0].inner) < 2:
        return None
    *outer, column = k.stages[0].inner
    width = ex.size_of(column)
    if not isinstance(width, int) or width < FLAT_BLOCK:
        return None
    indices = [i for q in k.stages[0].members for i in (q.index, *(i for _, i in va.loads(q.value)))]
    numbers = [i for i in indices if column not in ex.vars_of(i)]
    starts = [ex.substitute(i, {column: 0}) for i in indices if ex.coefficient(i, column) == 1]
    aligned = all(ex.mod(i, 8) == 0 for i in starts)
    return (*outer, column) if aligned and any(ex.vars_of(i) for i in numbers) else None


def _work_a_row(k: Kernel, column: Atom) -> int:
    """What every program computes for its row before it computes elements, in float additions."""
    values = {v for q in k.stages[0].members for v in va.walk(q.value) if column not in v.vars}
    return sum(OPS[v.op].flops for v in values if v.op in OPS)


def _longest(lengths: list[Index]) -> Index:
    out = lengths[0]
    for n in lengths[1:]:
        out = ex.maximum(out, n)
    return out


def _flat_slices(p: Program, k: Kernel, n: Index, target: Target) -> Blocks:
    programs = _at_most(ceil_div(n, SLICE_BLOCK), target.parallel)
    wide = _is_wide(p, k, ex.add(n, target.parallel * SLICE_BLOCK))
    return Blocks(SLICES, True, n, SLICE_BLOCK, {}, frozenset(), programs, _warps(SLICE_BLOCK), wide, False)


def _at_most(n: Index, limit: int) -> Index:
    """How many programs share `n` turns; a number, since the second kernel's tile depends on it."""
    return min(n, limit) if isinstance(n, int) else limit


def _rows(p: Program, k: Kernel, members: list[MappedNode], lengths: list[Index], target: Target) -> Blocks:
    rows = [n for n in lengths if n != 1]
    columns = rows_are_neighbours(members)
    sliced = any(q.kind == "outer" for q in members)
    if columns and not sliced and len(rows) == 1 and _slides(members):
        return _sliding(p, k, rows[0], target)
    limit = target.row_limit
    narrow = _neighbours(p, k, members, target) if columns and not sliced else COLUMNS
    most = COLUMN_LIMIT * COLUMNS // narrow
    if columns and not sliced and _repeats_freely(p, members):
        limit = most
    long = frozenset(n for n in rows if is_long(n, target) or n > limit)  # type: ignore[operator]
    few = len(_loaded(members)) <= 2
    block = min(COLUMN_BLOCK if columns else LONG_BLOCK_OF_FEW if few else LONG_BLOCK, target.row_limit)
    more = 1 if columns or sliced or not long else _more_warps(p, k, long, _warps(block), target)
    unit, block = block, block * more
    rblocks = {n: block if n in long else power_of_two(n) for n in rows}  # type: ignore[arg-type]
    widest = max(rblocks.values(), default=1)
    if sliced and not columns and not long and widest <= max(SLICED):
        return _row_slices(p, k, members, lengths, rblocks, target)
    xblock = ROW_TILE // widest if widest < ROW_ALONE else 1
    least = 1 if not columns else COLUMNS if long else narrow
    xblock = max(least if long or widest <= most else 1, xblock)
    if isinstance(k.rows, int):
        xblock = min(xblock, power_of_two(k.rows))
        while xblock > least and k.rows < xblock * target.parallel // 4:
            xblock //= 2
    if k.rows == 1:
        xblock = 1
    programs = ceil_div(k.rows, xblock)
    if sliced:
        programs = _at_most(programs, target.parallel // 4)
    size = ex.mul(k.rows, *lengths[:1])
    streams = not long and isinstance(size, int) and size * 4 > CACHE_BYTES
    return Blocks(
        SLICES if sliced else ROWS,
        False,
        k.rows,
        xblock,
        rblocks,
        long,
        programs,
        _row_warps(xblock * (unit if more > 1 else widest), columns, bool(long), sliced) * more,
        _is_wide(p, k, _walked(k, lengths, xblock, target)),
        streams,
    )


def _walked(k: Kernel, lengths: list[Index], xblock: int, target: Target) -> Index:
    return ex.add(ex.mul(k.rows, _longest(lengths)), target.parallel * xblock)


def _row_slices(
    p: Program, k: Kernel, members: list[MappedNode], lengths: list[Index], rblocks: dict[Index, int], target: Target
) -> Blocks:
    """Programs that walk over tiles of whole rows, and keep totals over them in registers."""
    widest = max(rblocks.values(), default=1)
    tile, warps = next(form for most, form in SLICED.items() if widest <= most)
    multiprocessors = target.parallel // PROGRAMS_PER_SM
    xblock, fewest = tile // widest, multiprocessors * FEWEST_SLICES
    most = multiprocessors * _resident(members, warps, tile // (32 * warps))
    if isinstance(k.rows, int):
        while xblock > 1 and k.rows < xblock * fewest:
            xblock //= 2
    turns = ceil_div(k.rows, xblock)
    if isinstance(turns, int):
        most = min(most, max(fewest, turns // LEAST_TURNS))
    size = ex.mul(k.rows, *lengths[:1])
    streams = isinstance(size, int) and size * 4 > CACHE_BYTES
    return Blocks(
        SLICES,
        False,
        k.rows,
        xblock,
        rblocks,
        frozenset(),
        _at_most(turns, most),
        max(warps * xblock * widest // tile, 1),
        _is_wide(p, k, _walked(k, lengths, xblock, target)),
        streams,
    )


def _resident(members: list[MappedNode], warps: int, elements: int) -> int:
    """Programs that a multiprocessor's registers hold at once, of threads with so many elements of every tile."""
    tiles = alive_at_once(members) + sum(q.kind == "outer" for q in members)
    registers = SPARE * (OTHER_REGISTERS + elements * tiles)
    return min(max(int(REGISTER_FILE // (32 * warps * registers)), FEWEST_SLICES), MOST_SLICES)


def _neighbours(p: Program, k: Kernel, members: list[MappedNode], target: Target) -> int:
    """Rows of a program where rows are neighbours in memory: a cache line of them, fewer where programs are few."""
    sizes = [p.buffers[b].dtype.itemsize for b in _loaded(members)]
    least, width = SECTOR // max(min(sizes, default=4), 1), COLUMNS
    while isinstance(k.rows, int) and width > least and k.rows < width * target.parallel // PROGRAMS_PER_SM:
        width //= 2
    return width


def _more_warps(p: Program, k: Kernel, long: frozenset[Index], warps: int, target: Target) -> int:
    """How many times as many warps a program needs, so that its long row stays in the cache until it is read again.

    A multiprocessor then has fewer programs, and the device fewer rows, under way.
    """
    stages = [s for s in k.stages if ex.prod(ex.size_of(v) for v in s.inner) in long]
    if len([x for x in plan(k.stages, stages, k.stored) if isinstance(x, Online) or x in stages]) < 2:
        return 1
    members = [q for s in stages for q in s.members]
    rows = {b for q in members for b, i in va.loads(q.value) if q.row in ex.vars_of(i) and ex.vars_of(i) & {*q.inner}}
    read = rows & _loaded(members)
    row = max((n for n in long if isinstance(n, int)), default=0)
    row_bytes = row * sum(p.buffers[b].dtype.itemsize for b in read)
    most = MOST_LONG_WARPS if warps == _warps(LONG_BLOCK_OF_FEW) else MOST_WARPS
    choices = [more for more in (1, 2, 4, 8) if warps * more <= most]
    for more in choices:
        programs = target.parallel // PROGRAMS_PER_SM * (THREADS_PER_SM // (32 * warps * more))
        if programs * row_bytes <= ROWS_IN_CACHE:
            return more
    return choices[-1]


def _row_warps(tile: int, columns: bool, long: bool, sliced: bool) -> int:
    """As measured on an H200 (`benchmarks.tiles`)."""
    if columns and not sliced:
        return 16 if long else min(_warps(tile), 4) if tile <= 8192 else _warps(tile)
    if sliced and not columns and tile >= 4096:
        return 16  # totals and all that lives through a row share the registers
    return 2 if tile == ROW_ALONE and not sliced else _warps(tile)


def _sliding(p: Program, k: Kernel, n: Index, target: Target) -> Blocks:
    """Programs with a total for each of several places, read block by block."""
    xblock, rblock, warps = SLIDING
    long = frozenset({n}) if not isinstance(n, int) or n > rblock else frozenset[Index]()
    wide = _is_wide(p, k, _walked(k, [n], xblock, target))
    return Blocks(ROWS, False, k.rows, xblock, {n: rblock}, long, ceil_div(k.rows, xblock), warps, wide, False)


def _slides(members: list[MappedNode]) -> bool:
    """Whether totals are of one tensor read at several places, of which registers hold few at a time."""
    places: dict[str, set[Index]] = {}
    for b, index in (found for q in members if q.kind == "inner" for found in va.loads(q.value)):
        places.setdefault(b, set()).add(index)
    return max(map(len, places.values()), default=0) >= WINDOW and not _reads_total(members)


def _repeats_freely(p: Program, members: list[MappedNode]) -> bool:
    """Whether the passes over a row may compute its values again."""
    written = {q.node.out for q in members if p.buffers[q.node.out].kind != "temp"}
    read = {b for q in members for b, _ in va.loads(q.value)}
    return not written & read and all(q.kind != "scan" for q in members)
