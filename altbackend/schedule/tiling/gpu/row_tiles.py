"""Choose the blocks of GPU kernels whose programs compute rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Index
from ....ir.loops import Program, Reduction
from ...device import Gpu
from ...kernel import Kernel, Stage
from ...loop_mapping import Kind, MappedNode
from ...rows import (
    COLUMN_LIMIT,
    NEAR,
    ROW_TILE,
    ROWS_OF_COLUMNS,
    SECTOR,
    SHORT_COLUMN,
    TILED_ROW,
    is_long,
    is_turned,
    row_step,
    rows_are_neighbours,
    some_rows_are_neighbours,
)
from .blocks import (
    MOST_WARPS,
    VECTOR,
    WARP,
    Blocks,
    Form,
    at_most,
    ceil_div,
    fills,
    is_wide,
    loaded_buffers,
    longest,
    power_of_two,
    reads_total,
    warps_of,
)
from .narrow_rows import NARROW_PERSISTENT_PROGRAMS, narrow_tile
from .one_pass import joined_passes
from .pressure import alive_at_once
from .program_rows import is_shared

LONE_ROW = 1024  # elements from which on a row fills a tile alone
LONG_BLOCK = 2048  # elements of a long row that are in registers at a time
LONG_BLOCK_OF_FEW = 8192  # elements in registers of a long row that is read from one or two tensors
COLUMN_BLOCK = 64  # points of a tile whose rows, not points, are neighbours in memory; it has ROWS_OF_COLUMNS rows
WIDE_WINDOW = 8  # positions of a tensor that a point reads, from which they decide about registers and the cache
WINDOW_BYTES, WINDOW_WARPS = 96, 8  # bytes of a thread's windows of which all fit in L1, and warps of their program
WINDOW = 3  # positions of a tensor, each with its own total: registers do not hold whole rows of so many tiles
# Rows, points and warps of each of these tiles: the fastest of 12 over 8 depthwise convolutions on an H200.
SLIDING = (64, 16, 4)
LONG_SUM = 64  # terms from which few rows take tiles instead: means of 784 windows took 404 us for 30, and 209 for 41
# Reads of a window, from which on a loop adds its terms: windows of 7x7x7 over volumes of 19x19x19 took 3,229 us for
# 9,098 in float32, in bfloat16 3,954 for 8,830.
SUMMED_WINDOW = 7
SUMMED_WINDOWS = (512, 8)  # results and warps of a program that adds products of wide windows, one loop over channels
# Columns and points of tiles of scanned columns. One warp has SCANNED_RUN neighbouring columns in each thread, so that
# threads scan alone: 16 instructions an element. In tiles of 64 points, which four warps share, they are 85. With 32
# points, Triton lays the warp along an operand of one row, and the whole tile with it. Columns that begin anywhere have
# 32 points all the same, where there are too few for SCANNED_UNALIGNED: a scan over 256 channels of 5x5 took 225 us for
# 264.
SCANNED, SCANNED_RUN = (64, 16), 2
# Columns, points and warps of a scan whose columns begin anywhere: a thread has one column. Sums along the 321 rows of
# images that are 321 wide took 456 us, with two columns in each thread 941, and a copy 246.
SCANNED_UNALIGNED = (128, 32, 4)
# The estimated registers beside which a thread has those of its scans, which are twice as many as the elements, and the
# points of such a tile. A scan's gradient, a gate's and a softmax's spilled 392 registers of a thread with 32 points,
# 22 with 16 points, and none with 8; with an estimate of 100, others took 96 to 168.
SCANNED_REGISTERS, FEWEST_SCANNED = 100, 8
# Rows, points and warps where columns are few: more warps have loads under way. With columns that begin anywhere, few
# rows and many points were the fastest.
FEW_SCANNED, FEW_SCANNED_UNALIGNED = (64, 64, 4), (16, 128, 4)
# Scans along rows of up to SCANNED_ROW points run in one warp: 98 us for 137 with four warps, 129 points a row, and 94
# for 167 with 64 points, where a copy takes 97. Short rows fill the warp: four rows of 5 points took 1,564 us for 579.
# Rows that are stored side by side, as of channels-last images into plain ones, fill two sectors, with a warp for each
# 32 points: 648,172 rows of 72 points took 129 us for 224 with four rows, in bfloat16 89 for 165. Of 144 points in
# bfloat16, tiles of 16 rows took 384 us, of 32 rows 463.
SCANNED_ROW, SCANNED_ROWS, LEAST_SCANNED, SCANNED_TILE, TURNED_SCAN_TILE = 512, 4, 256, 1024, 4096
LEAST_TURNED_SCAN = 512  # elements of such a tile of short rows: programs start at a rate of 1.4 a nanosecond
# Elements of a tile of tall columns, of which a program has two sectors at least: a softmax over 248 points of 368,032
# columns took 293 us with 16 columns, 353 with 32 and 471 with 64.
TALL_TILE = 4096
# The same where a thread loads single elements, by their bytes: sectors are shared by programs. Softmaxes over 193
# points in columns of odd numbers took 141 to 149 us in bfloat16 with 64 columns, and 100 to 107 with 32; in float32
# 167 to 178 with 64, 182 to 205 with 32 on four warps, and 157 to 162 on 16.
TALL_UNALIGNED = {4: 16384, 2: 8192}
# Elements of a tile of columns of up to COLUMN_BLOCK points that one warp totals, its columns at least, and the
# estimated registers of a thread of one warp, at most. An argmin over 34 points took 57 us with 32 columns and 53 with
# 64, with four warps 137 and 121; means over 18 points 100 us with 64 columns, 109 with 128, and 103 with 128 in four.
LONE_TILE, LONE_COLUMNS, LONE_REGISTERS = 2048, 32, 128
# Points of a short row that is read across and stored along, at most, and the elements of its tile, which one warp has.
# Its threads total whole rows. With four warps, 2,048 elements of bfloat16 pass through shared memory in 66 accesses of
# each warp (763 us for 79 million elements). One warp took 276 us with 1,024 elements, 207 with 512 and 206 with 256,
# in float32 194, 197 and 207.
SHORT_TURNED, TURNED_TILE = 16, 512
# Elements of a thread whose columns begin anywhere: with eight warps a norm over 16 channels of 11x11 took 397 us for
# 452 with two, in bfloat16 205 for 253.
UNALIGNED_ELEMENTS, MOST_UNALIGNED_WARPS = 8, 8
# Columns of a program where a thread loads single elements of 17 to 32 points: log-softmaxes of 25 points took 127 to
# 150 us with 128 columns, and 139 to 168 with 64 (bfloat16: 92 to 95 and 101 to 110).
UNALIGNED_COLUMNS = 128
# Elements of a thread of other columns, where registers hold them. Of 64 columns of 49 points in bfloat16, a program of
# two warps normalizes 48 million elements in 71 us, of four in 103, and of eight in 177.
COLUMN_ELEMENTS = 64
# Elements of a tile whose loads run along rows and whose stores run across them, or the other way: a log-softmax
# of channels-last images of 11x11 took 345 us with 8,192 elements and 505 with 2,048; 512 channels of 7x7 took 205 and
# 462.
BOTH_WAYS = 16384
# For persistent programs over rows of at most so many elements: elements of their tile, and warps, as measured on an
# H200 with layer norms' backwards. A row within as few warps as possible, 16 elements a thread.
PERSISTENT_TILES = {128: (4096, 8), 1024: (1024, 2), 2048: (2048, 4)}
# The same for short rows with single numbers as totals, such as losses: a cross-entropy over 40 classes took 306 us for
# 367 in float32, over 12 classes 120 for 141 in bfloat16. With totals for each column, 4,096 elements are better.
SHORT_ROW, FEW_TOTALS = 128, (1024, 2)
# The same where an operand or a result lies across the rows, of which a program reads whole sectors then: totals of
# 116,952 rows of 768 took 312 us in tiles of eight rows, 1,077 row by row.
TURNED_PERSISTENT = (8192, 8)
# persistent programs of a multiprocessor: all of them are resident, since a second round would leave a tail
FEWEST_PERSISTENT, MOST_PERSISTENT = 2, 8
LEAST_TURNS = 4  # turns of a persistent program; each program more leaves one more row of totals to add
OTHER_REGISTERS = 30  # registers of a thread for positions and masks, besides its elements of tiles
SPARE = (
    1.2  # times the estimated registers: the compiler took at most 1.21 times as many in 20 kernels of training steps
)
# Times the registers of a thread: with an estimate of 1.5 of them kernels of norms over 512 columns do not spill, since
# values are computed one after the other; with 2.1 one spills 114 registers.
SPILL = 1.6
ADDRESS = 1.5  # registers of an element that no wide load brings: its address and mask
MOST_REGISTERS = 255  # registers that a thread can have
QUAD = 4  # elements of a wide load of float32
MOST_LONG_WARPS = 16  # with LONG_BLOCK_OF_FEW for 8 warps, two such programs fill a multiprocessor's registers


@dataclass(frozen=True)
class _Rows:
    """A kernel of rows with the facts that its blocks depend on. `lengths`: points of the nodes' rows, each once."""

    program: Program
    kernel: Kernel
    lengths: list[Index]
    device: Gpu

    @property
    def members(self) -> list[MappedNode]:
        return self.kernel.nodes

    @cached_property
    def columns(self) -> bool:
        """Return whether memory is contiguous from row to row, or long rows are read in both directions.

        A program then takes several rows, and blocks of them that are as wide as high, so that it reads whole sectors
        of both. With one row it would read an element of each sector: sums over plain gradients times channels-last
        images of 56x256x56x56 took 563 us.
        """
        if rows_are_neighbours(self.members, self.kernel.stored):
            return True
        both = self.some_lie_across
        if both and self._is_longer(SCANNED_ROW) and _scans_in_one_pass(self) and _has_many(self, SCANNED[0]):
            # 119,808 rows of 624 points took 214 us for 1,226 with 16 whole rows, in bfloat16 130 for 148
            return True
        simple = all(q.kind in (Kind.POINT, Kind.IN_ROW) for q in self.members) and not self._leave_device_idle
        return both and simple and (self._is_longer(TILED_ROW) or bool(self.turned))

    @cached_property
    def some_lie_across(self) -> bool:
        """Return whether an access is contiguous from row to row, though most may be contiguous along rows."""
        return some_rows_are_neighbours(self.members, self.kernel.stored)

    @cached_property
    def runs_backwards(self) -> bool:
        """Return whether a scan reads and stores its rows from their ends, as the gradient of a cumulative sum does.

        Totals may add in any order; the first of equal positions is another one from the end.
        """
        rows = [q for q in self.members if q.points != 1]
        static = all(isinstance(n, int) for n in self.lengths)
        if self.columns or not static or not any(q.kind is Kind.SCAN for q in rows):
            return False
        if any(len(q.inner) != 1 or q.points != rows[0].points or _finds_position(q) for q in rows):
            return False
        written, stored = {q.node.out for q in rows}, self.kernel.stored
        accesses = [(i, q.inner[0]) for q in rows for b, i in va.loads(q.value) if b not in written]
        accesses += [(q.index, q.inner[0]) for q in rows if q.node.out in stored]
        steps = [ex.coefficient(i, v) for i, v in accesses]
        return steps.count(-1) > steps.count(1)

    @property
    def _leave_device_idle(self) -> bool:
        """Return whether programs of ROWS_OF_COLUMNS rows would use less than a quarter of the device.

        42 rows of 10,000 points took 350 us.
        """
        rows = self.kernel.rows
        return isinstance(rows, int) and 4 * rows < ROWS_OF_COLUMNS * self.device.sms

    @cached_property
    def turned(self) -> frozenset[Index]:
        """Return the lengths of rows that pointwise nodes alone compute, reading across rows and storing along them.

        Nothing needs such a row as a whole. An instance norm of channels-last images, stored plain, had tiles of 16
        channels and 1,024 points, which took 634 us for 516 MB.
        """
        others = {q.points for q in self.members if q.kind is not Kind.POINT}
        pointwise = [q for q in self.members if isinstance(q.points, int) and q.points > COLUMN_BLOCK]
        turned = {q.points for q in pointwise if q.inner and is_turned(q, self.kernel.stored)}
        return frozenset(turned - others) if _is_repeatable(self) and not self._leave_device_idle else frozenset()

    def _is_longer(self, most: int) -> bool:
        return all(n == 1 or not isinstance(n, int) or n > most for n in self.lengths)

    @cached_property
    def persistent(self) -> bool:
        """Return whether programs total over rows."""
        return any(q.kind is Kind.CROSS_ROW for q in self.members)

    @cached_property
    def _reads_of_rows(self) -> list[tuple[MappedNode, Index]]:
        """Return the positions that depend on the row at which nodes load from memory."""
        loaded = loaded_buffers(self.members)
        return [(q, i) for q in self.members for b, i in va.loads(q.value) if b in loaded and q.row in ex.vars_of(i)]

    @property
    def _reads_across(self) -> list[tuple[MappedNode, Index]]:
        """Return those of these positions that are not contiguous along the rows."""
        return [(q, i) for q, i in self._reads_of_rows if all(ex.coefficient(i, v) != 1 for v in q.inner)]

    @cached_property
    def reads_few_elements(self) -> bool:
        """Return whether a thread cannot load four rows that are neighbours, since columns begin anywhere."""
        return self.columns and any(_begins_anywhere(i, q, QUAD) for q, i in self._reads_of_rows)

    @cached_property
    def reads_single_elements(self) -> bool:
        """Return whether a thread cannot load two rows that are neighbours, since columns begin anywhere."""
        return self.columns and any(_begins_anywhere(i, q, 2) for q, i in self._reads_across)

    @property
    def loads_unaligned_columns(self) -> bool:
        """Return whether rows of memory across which a kernel loads its columns begin anywhere."""
        return self.columns and any(_begins_anywhere(i, q, QUAD) for q, i in self._reads_across)

    @cached_property
    def reads_of_window(self) -> int:
        """Return the most positions at which a point reads one tensor; 0 where those are few."""
        most = max(_reads_of_windows(self.members).values(), default=0)
        return most if most >= WIDE_WINDOW else 0

    def is_wide(self, xblock: int) -> bool:
        extent = ex.mul(self.kernel.rows, longest(self.lengths))
        return is_wide(self.program, self.kernel, ex.add(extent, self.device.parallelism * xblock))

    def streams(self) -> bool:
        """Return whether one pass reads more than the cache holds."""
        size = ex.mul(self.kernel.rows, *self.lengths[:1])
        return isinstance(size, int) and size * 4 > self.device.streaming_bytes


def _begins_anywhere(index: Index, q: MappedNode, wide: int) -> bool:
    """Return whether loads of `wide` elements cannot begin where rows of memory do that columns cross."""
    strides = [ex.coefficient(index, v) for v in q.inner]
    return any(n % wide for n in (*ex.divisors(index, q.row), *(s for s in strides if isinstance(s, int))))


def row_blocks(p: Program, k: Kernel, lengths: list[Index], device: Gpu) -> Blocks:
    """Return the blocks of a kernel whose programs compute rows of `lengths` points."""
    r = _Rows(p, k, lengths, device)
    b = _row_blocks(r)
    return replace(b, backwards=True) if r.runs_backwards else b


def _finds_position(q: MappedNode) -> bool:
    return isinstance(q.node, Reduction) and q.node.op.startswith("arg")


def _row_blocks(r: _Rows) -> Blocks:
    k, lengths, device = r.kernel, r.lengths, r.device
    long_lengths = [n for n in lengths if n != 1]
    sums_windows = not r.persistent and len(long_lengths) == 1 and _sums_windows(r)
    if sums_windows and not _has_few_long_rows(r):
        return _summed_windows(r, long_lengths[0])
    if r.columns and not r.persistent and len(long_lengths) == 1 and _slides(r.members):
        return _sliding(r, long_lengths[0])
    alone = r.columns and len(long_lengths) == 1
    by_threads = alone and (_scans_in_one_pass(r) or _shares_points(r) or _totals_short_columns(r))
    if by_threads and (b := _scanned_columns(r, long_lengths[0])):
        return b
    column_rows = _rows_of_columns(r) if r.columns and not r.persistent else ROWS_OF_COLUMNS
    most = COLUMN_LIMIT * ROWS_OF_COLUMNS // column_rows
    limit = device.row_limit
    if r.columns and not r.persistent and _is_repeatable(r):
        limit = most if _windows_fit(r, long_lengths) else COLUMN_BLOCK
    few = len(loaded_buffers(r.members)) <= 2
    unit = min(COLUMN_BLOCK if r.columns else LONG_BLOCK_OF_FEW if few else LONG_BLOCK, device.row_limit)
    of_thread = 0 if r.persistent else _shared_lines(r)
    if of_thread and not r.columns:
        unit = min(unit, of_thread * WARP * WINDOW_WARPS)
        limit = unit if _is_one_pass(r) else limit
    long = frozenset(n for n in long_lengths if is_long(n, device) or n > limit or n in r.turned)  # type: ignore[operator]
    of_thread = 0 if long and r.columns else of_thread
    unit = unit if r.columns or of_thread else _filled(unit, long)
    unit_warps = unit // (of_thread * WARP) if of_thread else warps_of(unit)
    factor = 1 if r.columns or r.persistent or not long else _warp_factor(r, long, unit, unit_warps)
    rblocks = {n: unit * factor if n in long else power_of_two(n) for n in long_lengths}  # type: ignore[arg-type]
    widest = max(rblocks.values(), default=1)
    if r.persistent and not r.columns and not long and widest <= max(PERSISTENT_TILES):
        return _persistent_rows(r, rblocks)
    of_long = _rows_of_sector(r) if sums_windows else ROWS_OF_COLUMNS
    fewest = 1 if not r.columns else of_long if long else column_rows
    xblock = max(fewest if long or widest <= most else 1, ROW_TILE // widest if widest < LONE_ROW else 1)
    if not r.columns and not long and widest <= TILED_ROW and r.some_lie_across:
        xblock = max(xblock, _in_registers(r, min(ROWS_OF_COLUMNS, BOTH_WAYS // widest), widest))
    if r.reads_single_elements and not (long or r.persistent) and SHORT_COLUMN // 2 < widest <= SHORT_COLUMN:
        xblock = UNALIGNED_COLUMNS
    xblock = _fewer_rows(r, xblock, fewest)
    scans = not r.columns and widest <= SCANNED_ROW and any(q.kind is Kind.SCAN for q in r.members)
    if scans:
        xblock = min(xblock, max(SCANNED_ROWS, LEAST_SCANNED // widest), max(SCANNED_TILE // widest, 1))
    turned_scan = scans and r.some_lie_across
    if turned_scan:
        most = max(2 * _rows_of_sector(r), LEAST_TURNED_SCAN // widest)
        xblock = _fewer_rows(r, min(most, TURNED_SCAN_TILE // widest), xblock)
    least = min(_rows_of_sector(r), xblock) if r.columns else 1  # a single column would be one element of each sector
    while of_thread and xblock > least and xblock * widest > of_thread * WARP * WINDOW_WARPS:
        xblock //= 2
    if r.columns and not long:
        xblock = _in_registers(r, _of_tall_tile(r, xblock, widest), widest)
    one_warp = 0 if r.persistent or long or of_thread or scans else _rows_of_one_warp(r, widest)
    xblock = one_warp or xblock
    warps = min(max(xblock * widest // (of_thread * WARP), 1), MOST_WARPS) if of_thread else 1
    warps = max(widest // WARP, 1) if turned_scan else warps
    if not (of_thread or scans or one_warp):
        warps = _row_warps(r, xblock * (unit if factor > 1 else widest), bool(long)) * factor
    programs = ceil_div(k.rows, xblock)
    if r.persistent:
        programs = at_most(programs, _programs_of_turns(r, xblock * widest, warps))
    return Blocks(
        form=Form.PERSISTENT if r.persistent else Form.ROWS,
        flat=False,
        points=k.rows,
        xblock=xblock,
        rblocks=rblocks,
        long=long,
        programs=programs,
        warps=warps,
        wide=r.is_wide(xblock),
        streams=not long and r.streams(),
    )


def _fewer_rows(r: _Rows, xblock: int, fewest: int, warps: int = 4) -> int:
    """Return at most `xblock` rows a program, so few that the programs of so many warps fill the device."""
    rows = r.kernel.rows
    if isinstance(rows, int):
        xblock = min(xblock, power_of_two(rows))
        while xblock > fewest and rows < xblock * r.device.parallelism // warps:
            xblock //= 2
    return 1 if rows == 1 else xblock


def _shared_lines(r: _Rows) -> int:
    """Return the elements of a thread for which the windows of all threads stay in L1; 0 without such windows.

    Each read of a window then takes single elements of the cache lines that its next reads need. A pool over 22 columns
    of 236,236 rows of 7 windows took 1,029 us with 16 elements a thread.
    """
    window = 0
    for q in r.members:
        positions: dict[str, list[Index]] = {}
        for b, index in va.loads(q.value):
            positions.setdefault(b, []).append(index)
        for b, indices in positions.items():
            itemsize = r.program.buffers[b].dtype.itemsize
            shifts = [n * itemsize for i in indices if isinstance(n := ex.sub(i, indices[0]), int)]
            if len(shifts) >= WIDE_WINDOW and any(n % VECTOR for n in shifts):
                window = max(window, len(shifts) * itemsize)
    return power_of_two(max(WINDOW_BYTES // window, 1) + 1) // 2 if window else 0


def _reads_of_windows(members: list[MappedNode]) -> dict[str, int]:
    """Return for each tensor the most positions at which a point of a node reads it."""
    reads: dict[str, int] = {}
    for q in members:
        counts = Counter(b for b, index in va.loads(q.value) if ex.vars_of(index) & {q.row, *q.inner})
        reads |= {b: max(n, reads.get(b, 0)) for b, n in counts.items()}
    return reads


def _in_registers(r: _Rows, xblock: int, width: int) -> int:
    """Return at most `xblock` rows a program, so few that the tiles of `width` points stay in registers.

    A warp still reads whole sectors.
    """
    least = _rows_of_sector(r)
    while xblock > least and not _fits(r, xblock * width):
        xblock //= 2
    return xblock


def _windows_fit(r: _Rows, lengths: list[Index]) -> bool:
    """Return whether registers hold the reads of windows of whole columns, at least for the rows of a sector."""
    return not r.reads_of_window or _fits(r, _rows_of_sector(r) * _width(lengths))


def _width(lengths: list[Index]) -> int:
    """Return the points of a tile of whole rows; symbolic lengths count as none."""
    return max((power_of_two(n) for n in lengths if isinstance(n, int)), default=1)


def _fits(r: _Rows, tile: int) -> bool:
    threads = WARP * _row_warps(r, tile, long=False)
    return _registers_needed(r, tile // threads) <= min(r.device.registers / threads, MOST_REGISTERS)


def _registers_needed(r: _Rows, elements: int) -> float:
    """Return an estimate of the registers of a thread that has `elements` of every tile.

    A loop over tiles keeps operands of all tiles in registers besides; other programs compute values one by one.
    """
    if r.persistent:
        return SPARE * (OTHER_REGISTERS + elements * _tiles_of_thread(r))
    # the compiler moves all reads of a window to the front
    alive = max(_tiles_of_thread(r), r.reads_of_window)
    return elements * (alive + ADDRESS * r.reads_few_elements) / SPILL


def _row_warps(r: _Rows, tile: int, long: bool) -> int:
    """Return the warps of a tile, as measured on an H200 (`benchmarks.tiles`)."""
    if r.columns and not r.persistent:
        return 16 if long else _column_warps(r, tile)
    if r.columns and not long and (elements := _elements_of_turn(r)):
        return max(tile // (WARP * elements), 1)
    if r.persistent and not r.columns and tile >= 4096:
        return 16  # totals share the registers with all values that live through a row
    return 2 if tile == LONE_ROW and not r.persistent else warps_of(tile)


def _column_warps(r: _Rows, tile: int) -> int:
    """Return the warps of a tile of whole columns: few, since warps that share columns meet in shared memory."""
    width = _width(r.lengths)
    if r.reads_single_elements and (tile <= ROW_TILE or width <= SHORT_COLUMN):
        return min(max(tile // (WARP * UNALIGNED_ELEMENTS), 1), MOST_UNALIGNED_WARPS)
    light = not r.reads_single_elements and _registers_needed(r, COLUMN_ELEMENTS) <= LONE_REGISTERS
    if light and _has_many(r, tile // width):
        return min(max(tile // (WARP * COLUMN_ELEMENTS), 1), MOST_WARPS)
    most = 2 if all(n <= SHORT_COLUMN for n in r.lengths if isinstance(n, int)) else 4
    return min(warps_of(tile), most) if tile <= 8192 else warps_of(tile)


def _elements_of_turn(r: _Rows) -> int:
    """Return a thread's elements where a persistent program totals columns in each turn; 0 where rows' rules hold."""
    if r.reads_single_elements or not any(q.kind is Kind.IN_ROW for q in r.members):
        return 0
    fitting = (n for n in (COLUMN_ELEMENTS, COLUMN_ELEMENTS // 2) if n * _tiles_of_thread(r) / SPILL <= LONE_REGISTERS)
    return next(fitting, 0)


def _programs_of_turns(r: _Rows, tile: int, warps: int) -> int:
    """Return the most persistent programs; those of fewer warps are more, as far as registers hold them."""
    short = r.columns and all(isinstance(n, int) and n <= SHORT_COLUMN for n in r.lengths)
    programs = r.device.parallelism // (1 if short else 4)
    if not r.columns or warps >= warps_of(tile):
        return programs
    registers = OTHER_REGISTERS + tile // (WARP * warps) * _tiles_of_thread(r) / SPILL
    resident = r.device.sms * max(int(r.device.registers / (WARP * warps * registers)), 1)
    return min(programs * warps_of(tile) // warps, max(resident, programs))


# --- persistent programs ---------------------------------------------------------------------------------------------


def _persistent_rows(r: _Rows, rblocks: dict[Index, int]) -> Blocks:
    """Return the blocks of programs that loop over tiles of whole rows, with totals over rows in registers."""
    rows, sms = r.kernel.rows, r.device.sms
    widest = max(rblocks.values(), default=1)
    tile, warps = next(form for most, form in PERSISTENT_TILES.items() if widest <= most)
    if widest <= SHORT_ROW and all(q.results == 1 for q in r.members if q.kind is Kind.CROSS_ROW):
        tile, warps = FEW_TOTALS
    if r.some_lie_across and tile // widest < _rows_of_sector(r):
        tile, warps = TURNED_PERSISTENT
    narrow = 0 if r.some_lie_across else narrow_tile(r.program, r.kernel, widest, True, r.runs_backwards)
    if narrow:
        tile, warps = narrow, 1
    xblock, fewest = tile // widest, sms * FEWEST_PERSISTENT
    most = sms * _resident(r, warps, tile // (WARP * warps))
    if isinstance(rows, int):
        while xblock > 1 and rows < xblock * fewest:
            xblock //= 2
    turns = ceil_div(rows, xblock)
    if isinstance(turns, int):
        most = min(most, max(fewest, turns // LEAST_TURNS))
    return Blocks(
        form=Form.PERSISTENT,
        flat=False,
        points=rows,
        xblock=xblock,
        rblocks=rblocks,
        long=frozenset(),
        programs=at_most(turns, most),
        warps=max(warps * xblock * widest // tile, 1),
        wide=r.is_wide(xblock),
        streams=r.streams(),
    )


def _resident(r: _Rows, warps: int, elements: int) -> int:
    """Return the programs that a multiprocessor's registers hold, whose threads have `elements` of every tile."""
    registers = _registers_needed(r, elements)
    most = NARROW_PERSISTENT_PROGRAMS if warps == 1 else MOST_PERSISTENT
    return min(max(int(r.device.registers // (WARP * warps * registers)), FEWEST_PERSISTENT), most)


def _tiles_of_thread(r: _Rows) -> float:
    """Return an estimate of the registers of a tile's element: values alive at once, and totals over rows."""
    return alive_at_once(r.members) + sum(q.kind is Kind.CROSS_ROW for q in r.members)


# --- rows that are neighbours ----------------------------------------------------------------------------------------


def _rows_of_columns(r: _Rows) -> int:
    """Return the rows of a program where rows are neighbours: a cache line of them, fewer where programs are few."""
    least, width = _rows_of_sector(r), ROWS_OF_COLUMNS
    while isinstance(r.kernel.rows, int) and width > least and r.kernel.rows < width * r.device.sms:
        width //= 2
    return width


def _of_tall_tile(r: _Rows, xblock: int, widest: int) -> int:
    """Return at most `xblock` columns of `widest` points: a tile, or two sectors of each operand."""
    rows = _rows_of_sector(r)
    tile = TALL_UNALIGNED.get(SECTOR // rows, TALL_TILE) if r.reads_single_elements else TALL_TILE
    return min(xblock, max(2 * rows, tile // widest))


def _rows_of_sector(r: _Rows) -> int:
    """Return the rows whose elements at one place fill a sector of each operand."""
    itemsizes = [r.program.buffers[b].dtype.itemsize for b in loaded_buffers(r.members)]
    return SECTOR // max(min(itemsizes, default=4), 1)


def _slides(members: list[MappedNode]) -> bool:
    """Return whether totals read one tensor at several positions, of which registers hold few at a time."""
    positions: dict[str, set[Index]] = {}
    for q in members:
        for b, index in va.loads(q.value) if q.kind is Kind.IN_ROW else ():
            positions.setdefault(b, set()).add(index)
    return max(map(len, positions.values()), default=0) >= WINDOW and not reads_total(members)


def _sliding(r: _Rows, n: Index) -> Blocks:
    """Return the blocks of programs that read their rows block by block, with a total for each of several positions."""
    xblock, rblock, warps = SLIDING
    long = frozenset({n}) if not isinstance(n, int) or n > rblock else frozenset[Index]()
    rows = r.kernel.rows
    extent = ex.add(ex.mul(rows, n), r.device.parallelism * xblock)
    wide = is_wide(r.program, r.kernel, extent)
    return Blocks(Form.ROWS, False, rows, xblock, {n: rblock}, long, ceil_div(rows, xblock), warps, wide)


def _sums_windows(r: _Rows) -> bool:
    """Return whether every node with rows sums terms that read wide windows, as a convolution in narrow groups does.

    Neighbouring rows are neighbouring results, which read near places.
    """
    rows = [q for q in r.members if q.points != 1]
    wide = all(q.kind is Kind.IN_ROW and max(_reads_of_windows([q]).values(), default=0) >= SUMMED_WINDOW for q in rows)
    return wide and all(row_step(i, q.row) <= NEAR for q in rows for _, i in va.loads(q.value))


def _has_few_long_rows(r: _Rows) -> bool:
    """Return whether a thread a row would leave the device idle, as for the mean of a convolution over its points."""
    few = isinstance(r.kernel.rows, int) and r.kernel.rows < r.device.sms * r.device.threads_per_sm
    return few and all(n == 1 or not isinstance(n, int) or n > LONG_SUM for n in r.lengths)


def _summed_windows(r: _Rows, n: Index) -> Blocks:
    """Return the blocks of programs that add one term after the other, each of a few elements a thread."""
    xblock, warps = SUMMED_WINDOWS
    xblock = _fewer_rows(r, xblock, WARP)
    programs = ceil_div(r.kernel.rows, xblock)
    warps = min(warps, max(xblock // WARP, 1))
    return Blocks(
        Form.ROWS, False, r.kernel.rows, xblock, {n: 1}, frozenset({n}), programs, warps, wide=r.is_wide(xblock)
    )


def _scans_in_one_pass(r: _Rows) -> bool:
    """Return whether a kernel scans its rows, and computes everything else in the same pass over them."""
    passes = [s for s in r.kernel.stages if any(ex.size_of(v) != 1 for v in s.inner)]
    kinds = {q.kind for q in r.members}
    return len(passes) == 1 and Kind.SCAN in kinds and kinds <= {Kind.SCAN, Kind.POINT, Kind.IN_ROW}


def _shares_points(r: _Rows) -> bool:
    """Return whether one pass totals columns, and reads along their points what the columns of a program share."""
    members = r.members
    if len(r.kernel.stages) != 1 or any(q.kind is not Kind.IN_ROW for q in members) or not _has_many(r, SCANNED[0]):
        return False
    reads = [(q, i) for q in members for _, i in va.loads(q.value)]
    return any(ex.coefficient(i, q.inner[-1]) == 1 and is_shared(i, SCANNED[0], q.row) for q, i in reads)


def _totals_short_columns(r: _Rows) -> bool:
    """Return whether a kernel only totals short columns that begin anywhere, so many that a thread may take two.

    Of 18 points, 64 columns are 110 instructions of eight warps each, with four barriers. One warp has 175 and none.
    """
    most = 2 * SCANNED[1]
    few = all(n == 1 or (isinstance(n, int) and n <= most) for n in r.lengths)
    passes = [s for s in r.kernel.stages if any(ex.size_of(v) != 1 for v in s.inner)]
    rows = [q for q in r.members if q.points != 1]
    totals = len(passes) == 1 and all(q.kind is Kind.IN_ROW and not _finds_position(q) for q in rows)
    light = SCANNED[0] * most // WARP * _tiles_of_thread(r) <= MOST_REGISTERS / 2
    return r.reads_few_elements and few and totals and light and _has_many(r, SCANNED[0])


def _rows_of_one_warp(r: _Rows, widest: int) -> int:
    """Return the rows of a program of one warp, whose tiles its registers hold; 0 where more warps are better."""
    if r.columns:
        return _columns_of_one_warp(r, widest)
    if r.some_lie_across:
        tile = TURNED_TILE if widest <= SHORT_TURNED else 0
    else:
        tile = narrow_tile(r.program, r.kernel, widest, persistent=False, backwards=r.runs_backwards)
    if not tile:
        return 0
    xblock = max(tile // widest, 1)
    while xblock > 1 and _registers_needed(r, xblock * widest // WARP) > LONE_REGISTERS:
        xblock //= 2
    return _fewer_rows(r, xblock, 1, warps=1)


def _columns_of_one_warp(r: _Rows, widest: int) -> int:
    """Return the columns whose totals one warp computes: 0 where points are stored, or registers do not hold a tile.

    The programs fill the device.
    """
    only_totals = all(q.points == 1 or (q.kind is Kind.IN_ROW and q.results == 1) for q in r.members)
    if not only_totals or widest > COLUMN_BLOCK:
        return 0
    xblock = LONE_TILE // widest
    while xblock >= LONE_COLUMNS and _registers_needed(r, xblock * widest // WARP) > LONE_REGISTERS:
        xblock //= 2
    return xblock if xblock >= LONE_COLUMNS and _has_many(r, 4 * xblock) else 0


def _has_many(r: _Rows, xblock: int) -> bool:
    """Return whether programs that take so many rows fill the device."""
    rows = r.kernel.rows
    return not isinstance(rows, int) or rows >= xblock * r.device.parallelism // 4


def _scanned_columns(r: _Rows, n: Index) -> Blocks | None:
    """Return the blocks of programs that scan several columns side by side, block by block; None for other tiles."""
    rows = r.kernel.rows
    xblock, rblock = SCANNED
    warps, run = 1, SCANNED_RUN
    if not _has_many(r, xblock):
        if isinstance(n, int) and n <= COLUMN_BLOCK:
            return None
        xblock, rblock, warps = FEW_SCANNED_UNALIGNED if r.reads_few_elements else FEW_SCANNED
        xblock, run = _fewer_rows(r, xblock, min(xblock, _rows_of_sector(r))), 0
        warps = min(warps, warps_of(xblock * rblock))
    else:
        if r.loads_unaligned_columns and _scans_in_one_pass(r) and _has_many(r, SCANNED_UNALIGNED[0]):
            xblock, rblock, warps = SCANNED_UNALIGNED
        elif r.reads_few_elements:
            rblock *= 2
        if isinstance(n, int):
            rblock = min(rblock, power_of_two(n))
        of_thread = xblock // (WARP * warps)
        while rblock > FEWEST_SCANNED and _registers_needed(r, of_thread * rblock) > SCANNED_REGISTERS:
            rblock //= 2
    return Blocks(
        form=Form.ROWS,
        flat=False,
        points=rows,
        xblock=xblock,
        rblocks={n: rblock},
        long=frozenset() if isinstance(n, int) and n <= rblock else frozenset({n}),
        programs=ceil_div(rows, xblock),
        warps=warps,
        wide=r.is_wide(xblock),
        run=run,
    )


def _is_repeatable(r: _Rows) -> bool:
    """Return whether passes over a row may compute its values again."""
    written = {q.node.out for q in r.members if r.program.buffers[q.node.out].kind != "temp"}
    read = {b for q in r.members for b, _ in va.loads(q.value)}
    return not written & read and all(q.kind is not Kind.SCAN for q in r.members)


def _is_one_pass(r: _Rows) -> bool:
    """Return whether no point of a row reads a total of the row, so that a loop over the row reads everything once."""
    of_row = {q.node.out for q in r.members if q.kind is not Kind.POINT or q.points == 1}
    read = {b for q in r.members if q.points != 1 for b, _ in va.loads(q.value)}
    return _is_repeatable(r) and not of_row & read


# --- long rows -------------------------------------------------------------------------------------------------------


def _warp_factor(r: _Rows, long: frozenset[Index], unit: int, warps: int) -> int:
    """Return how many times as many warps a program needs for its long row to stay in the cache between passes.

    A multiprocessor then runs fewer programs, and the device has fewer rows under way. The points fill the larger
    blocks: rows of 16,896 points took 403 us in blocks of 16,384, 237 in blocks of 4,096 and 209 in blocks of 2,048.
    """
    k = r.kernel
    stages = [s for s in k.stages if ex.prod(ex.size_of(v) for v in s.inner) in long]
    passes = [x for x in joined_passes(k.stages, stages, k.stored) if not isinstance(x, Stage) or x in stages]
    if len(passes) < 2:
        return 1
    members = [q for s in stages for q in s.members]
    rows = {b for q in members for b, i in va.loads(q.value) if q.row in ex.vars_of(i) and ex.vars_of(i) & {*q.inner}}
    read = rows & loaded_buffers(members)
    length = max((n for n in long if isinstance(n, int)), default=0)
    row_bytes = length * sum(r.program.buffers[b].dtype.itemsize for b in read)
    most = MOST_LONG_WARPS if warps == warps_of(LONG_BLOCK_OF_FEW) else MOST_WARPS
    factors = [factor for factor in (1, 2, 4, 8) if warps * factor <= most and fills(length, unit * factor)] or [1]
    for factor in factors:
        programs = r.device.sms * (r.device.threads_per_sm // (WARP * warps * factor))
        if programs * row_bytes <= r.device.cached_row_bytes:
            return factor
    return factors[-1]


def _filled(unit: int, long: frozenset[Index]) -> int:
    """Return a block of at most `unit` points that a long row fills, LONG_BLOCK at least."""
    length = max((n for n in long if isinstance(n, int)), default=0)
    while unit > LONG_BLOCK and not fills(length, unit):
        unit //= 2
    return unit
