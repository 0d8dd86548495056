"""Choose the blocks of a GPU kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from altbackend.lazy_dataclass import dataclass

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Program
from ....ir.ops import OPS
from ...device import Gpu
from ...kernel import Kernel
from ...loop_mapping import Kind, MappedNode
from ...products.matmul import Matmul, tiles_of
from ...rows import CACHED, row_step, touched
from .blocks import (
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
from .row_tiles import row_blocks

ONE_PROGRAM = 4096  # elements that one program reduces as fast as many programs and a second kernel do
FLAT_BLOCK = 1024  # 8 elements a thread of 4 warps: one 16-byte load of 16-bit floats
WINDOW = 4  # reads of one tensor at constant distances, from which on the cache bounds a kernel's time
STRIDED_WINDOW = 3  # the same where windows are apart: 127 us for 107 of a pool over rows by steps of two
# Bytes between the first reads of neighbouring threads, and warps: the fastest of 7 forms for nearly all of eight pools
# of 16 and 32 bits on an H100 (docs/decisions/windows-in-threads.md).
WINDOW_BYTES, WINDOW_WARPS = 8, 8
# Elements of a thread and warps where rows of odd lengths are read: 99 us for 191 or 264 of a slice of bfloat16.
ODD_ROW_ELEMENTS, ODD_ROW_WARPS = 4, 4
MOST_READS = 16  # positions of one tensor that eight points of a thread read beside divisions
PERSISTENT_BLOCK = 4096
SQUARE, SMALL_SQUARE = 64, 32  # sides of a transposing tile: whole cache lines for loads and stores
SHORT_SIDE = 8  # elements of a sector of float32, the one short side with which a tile has no elements outside
LEAST_READ, LEAST_STORED = 9, 5  # points of short sides whose steps are far apart on the other side
FAR_APART = 512  # elements
LEAST_RUN = 4  # neighbouring channels of a padded image, as of groups of five, of which tiles read whole sectors
NEAR = 4  # elements of a step, at most, for which the sectors that a tile reads still hold several of its elements
COSTLY_ROW = 16  # float additions of a row that take a thread as long as two elements
LOOKED_UP_TILE, LOOKED_UP_COLUMNS = 1024, (256, 128, 64, 32)  # elements and columns of tiles of looked-up rows
LOOKED_UP_BYTES = 64  # bytes that a thread of such a tile stores: four vectors
VECTOR_ELEMENTS = 8  # elements of 16 bits in one load


def choose_blocks(p: Program, k: Kernel, device: Gpu) -> Blocks:
    """Return the blocks of a kernel for a GPU."""
    if k.matmul is not None:
        return _matmul(p, k, k.matmul, device)
    lengths = list(dict.fromkeys(q.points for q in k.nodes))
    return (_without_rows(p, k, lengths, device) if k.rows == 1 else None) or row_blocks(p, k, lengths, device)


def _without_rows(p: Program, k: Kernel, lengths: list[Index], device: Gpu) -> Blocks | None:
    """Return the blocks of a kernel of one row; None where one program computes the row."""
    kinds = {q.kind for q in k.nodes}
    if (sides := transposed_sides(k)) is not None:
        return _transpose(p, k, sides, device)
    if (loops := _row_constant_loops(k)) is not None:
        costly = _flops_per_row(k, loops[-1]) > COSTLY_ROW
        columns = FLAT_BLOCK * (2 if costly else 1)
        return _two_loops(p, k, loops, (1, columns), warps_of(columns))
    if (tile := _looked_up_tile(k, device)) is not None:
        return _two_loops(p, k, k.stages[0].inner, tile, _warps_of_looked_up(p, k))
    if kinds <= {Kind.POINT, Kind.SCATTER}:
        return _flat(p, k, lengths, device)
    totals = Kind.IN_ROW in kinds and Kind.SCAN not in kinds and not reads_total(k.nodes)
    few = all(isinstance(n, int) and n <= ONE_PROGRAM for n in lengths)
    return _flat_persistent(p, k, lengths[0], device) if totals and not few and len(lengths) == 1 else None


def _flat(p: Program, k: Kernel, lengths: list[Index], device: Gpu) -> Blocks:
    points = longest(lengths)
    of_thread, most_warps = _elements_of_window(p, k), WINDOW_WARPS
    divides = not of_thread and _divides_windows(k)
    if not of_thread and not divides and _reads_odd_rows(k):
        of_thread, most_warps = ODD_ROW_ELEMENTS, ODD_ROW_WARPS
    xblock = of_thread * WARP * most_warps or (FLAT_BLOCK // 4 if divides else FLAT_BLOCK)
    if isinstance(points, int):
        xblock = min(xblock, power_of_two(points))
        while xblock > 128 and points < xblock * device.parallelism // 4:
            xblock //= 2
    warps = max(xblock // (of_thread * WARP), 1) if of_thread else warps_of(xblock)
    if divides:
        warps = max(xblock // (2 * WARP), 1)
    elif len(loaded_buffers(k.nodes)) == 1 and not of_thread:
        warps = max(warps // 2, 1)  # each thread has two loads of 16 bytes under way instead of one
    wide = is_wide(p, k, points)
    return Blocks(Form.FLAT, True, points, xblock, {}, frozenset(), ceil_div(points, xblock), warps, wide)


def _divides_windows(k: Kernel) -> bool:
    """Return whether points read wide windows and divide, or take roots.

    Both are subroutines, and the compiler has the reads of all windows under way around them. Eight elements a thread
    spilled 4 KB (a depthwise gradient in a gated normalisation took 15 ms); two do not.
    """
    values = [v for q in k.nodes for v in va.walk(q.value)]
    reads = Counter(v.attr[0] for v in values if v.op == "load" and v.vars)
    return max(reads.values(), default=0) >= MOST_READS and any(v.op in ("div", "sqrt") for v in values)


def _reads_odd_rows(k: Kernel) -> bool:
    """Return whether rows whose length no vector divides are read elsewhere than they are stored, as slices are.

    Such loads take one element each, while vectors of the store decide which elements a thread has. With eight, the
    loads of a warp lie 16 bytes or more apart.
    """
    for q in k.nodes:
        length = ex.size_of(q.inner[-1]) if q.inner else 0
        if not isinstance(length, int) or length % VECTOR_ELEMENTS == 0 or ex.coefficient(q.index, q.inner[-1]) != 1:
            continue
        for _, index in va.loads(q.value):
            if ex.coefficient(index, q.inner[-1]) in (1, -1) and not isinstance(ex.sub(index, q.index), int):
                return True
    return False


def _elements_of_window(p: Program, k: Kernel) -> int:
    """Return the elements of a thread where each reads a window of a tensor, as pools do; 0 for other kernels.

    Such loads take one element each, unless the window steps by whole vectors, as over the points of a channels-last
    image. Those of a warp touch the fewer cache lines, the closer its threads' elements lie together. The compiler has
    the reads of a wide window under way at once: four elements of 54 products took 164 registers a thread, two take 32.
    """
    for q in k.nodes:
        positions: dict[str, list[Index]] = {}
        for name, index in dict.fromkeys(va.loads(q.value)):
            positions.setdefault(name, []).append(index)
        for name, indices in positions.items():
            itemsize = p.buffers[name].dtype.itemsize
            shifts = [n * itemsize for i in indices if isinstance(n := ex.sub(i, indices[0]), int)]
            stride = ex.coefficient(indices[0], q.inner[-1]) if q.inner else 1
            fewest = WINDOW if stride == 1 else STRIDED_WINDOW
            if q.inner and len(shifts) >= fewest and any(n % VECTOR for n in shifts):
                apart = itemsize * (stride if isinstance(stride, int) else 1)
                return max(WINDOW_BYTES // max(apart, 1), 2) if len(shifts) < MOST_READS else 2
    return 0


def _flat_persistent(p: Program, k: Kernel, n: Index, device: Gpu) -> Blocks:
    """Return the blocks of totals over all elements."""
    programs = at_most(ceil_div(n, PERSISTENT_BLOCK), device.parallelism)
    wide = is_wide(p, k, ex.add(n, device.parallelism * PERSISTENT_BLOCK))
    warps = warps_of(PERSISTENT_BLOCK)
    return Blocks(Form.PERSISTENT, True, n, PERSISTENT_BLOCK, {}, frozenset(), programs, warps, wide)


# --- tiles over two loops --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sides:
    """The loops of a transposing tile from slow to fast: those that loads run along, and those of the stores."""

    read: tuple[Atom, ...]
    stored: tuple[Atom, ...]


def transposed_sides(k: Kernel) -> Sides | None:
    """Return the sides of tiles over the contiguous loops of loads and of stores; None if those are the same loops."""
    if len(k.stages) != 1 or any(q.kind is not Kind.POINT for q in k.nodes):
        return None
    loops = k.stages[0].inner
    for q in k.nodes:
        stored = _contiguous_loop(q.index, loops)
        for index in _large_loads(q):
            read = _contiguous_loop(index, loops) or _near_loop(index, loops) or _loop_of_runs(index, loops)
            if stored is None or read is None or read is stored or ex.coefficient(index, stored) == 0:
                continue
            sides = _grown(Sides((read,), (stored,)), loops, index, q.index)
            if _is_side(sides.read, q.index, LEAST_READ) and _is_side(sides.stored, index, LEAST_STORED):
                return sides
    return None


def _large_loads(q: MappedNode) -> Iterator[Index]:
    """Yield the places of loads but of those that come from the cache, as statistics of images do."""
    for _, index in va.loads(q.value):
        if not isinstance(q.points, int) or ex.syms_of(index) or touched(index) * CACHED > q.points:
            yield index


def _grown(sides: Sides, loops: tuple[Atom, ...], load: Index, store: Index) -> Sides:
    """Return the sides with further loops along which the load, or the store, runs on, where a side is short."""
    read, stored = sides.read, sides.stored
    while True:
        free = tuple(v for v in loops if v not in read and v not in stored)
        more_read, more_stored = _with_next(read, free, load), _with_next(stored, free, store)
        if more_read is None and more_stored is None:
            return Sides(read, stored)
        if more_stored is None or (more_read is not None and _length(read) <= _length(stored)):
            read = more_read or read
        else:
            stored = more_stored


def _with_next(side: tuple[Atom, ...], free: tuple[Atom, ...], index: Index) -> tuple[Atom, ...] | None:
    """Return a short side with the next slower loop of `index`; None if the side is long or there is no such loop."""
    length = _length(side)
    if length >= SQUARE:
        return None
    following = next((v for v in free if ex.coefficient(index, v) == length and isinstance(ex.size_of(v), int)), None)
    return None if following is None else (following, *side)


def _length(side: tuple[Atom, ...]) -> int:
    """Return the points of a side; of one of unknown size more than a tile has."""
    n = ex.prod(map(ex.size_of, side))
    return n if isinstance(n, int) else SQUARE


def _is_side(side: tuple[Atom, ...], other: Index, least: int) -> bool:
    """Return whether tiles with a side beat elements in the order of the stores.

    `other`: the access that runs along the other side. A short side of `least` points needs steps of FAR_APART there.
    With shorter steps, the elements of one program hold several points of the side, whose sectors are in the cache.
    40,000 images of 10x13x13 took 186 us in bfloat16, and 195 as tiles. 900 images of 10x197x197 took 1,533 and 498.
    """
    n, apart = ex.prod(map(ex.size_of, side)), ex.coefficient(other, side[-1])
    is_far = isinstance(apart, int) and apart >= FAR_APART
    return isinstance(n, int) and (n >= SMALL_SQUARE // 2 or n == SHORT_SIDE or (is_far and n >= least))


def _contiguous_loop(index: Index, loops: tuple[Atom, ...]) -> Atom | None:
    return next((v for v in loops if ex.coefficient(index, v) == 1), None)


def _transpose(p: Program, k: Kernel, sides: Sides, device: Gpu) -> Blocks:
    """Return squares over two sides; the other loops are further rows of squares."""
    others = tuple(v for v in k.stages[0].inner if v not in sides.read and v not in sides.stored)
    loops = (*others, *sides.read, *sides.stored)
    points = ex.prod(ex.size_of(v) for v in loops)
    large = isinstance(points, int) and points >= device.parallelism * SQUARE * SQUARE // 4
    side = SQUARE if large else SMALL_SQUARE
    width = ex.prod(map(ex.size_of, sides.stored))
    columns = min(side, power_of_two(width)) if isinstance(width, int) else side
    rows = side if columns > SHORT_SIDE else side * side // columns
    # as many warps as a square has: with 32 columns 8 warps took 0.21 ms where 4 took 0.31
    return _two_loops(p, k, loops, (rows, columns), warps_of(side * side), len(sides.stored))


def _two_loops(
    p: Program, k: Kernel, loops: tuple[Atom, ...], sides: tuple[int, int], warps: int, row_loops: int = 1
) -> Blocks:
    """Return tiles whose rows are all loops but the last `row_loops`, and whose columns are those."""
    points, width = (ex.prod(map(ex.size_of, part)) for part in (loops[:-row_loops], loops[-row_loops:]))
    rows, columns = sides
    return Blocks(
        form=Form.TRANSPOSE,
        flat=False,
        points=points,
        xblock=rows,
        rblocks={width: columns},
        long=frozenset(),
        programs=ex.mul(ceil_div(points, rows), ceil_div(width, columns)),
        warps=warps,
        wide=is_wide(p, k, ex.mul(points, width)),
        axis_loops=loops,
        row_loops=row_loops,
    )


def _row_constant_loops(k: Kernel) -> tuple[Atom, ...] | None:
    """Return the loops of pointwise work on long rows with operands of one number a row, which a tile reads once.

    None where rows start at positions that wide loads cannot take, or where one axis over all elements is as fast.
    """
    if len(k.stages) != 1 or any(q.kind is not Kind.POINT for q in k.nodes) or len(k.stages[0].inner) < 2:
        return None
    *outer, column = k.stages[0].inner
    if not isinstance(length := ex.size_of(column), int) or length < FLAT_BLOCK:
        return None
    indices = [i for q in k.nodes for i in (q.index, *(i for _, i in va.loads(q.value)))]
    row_constants = [i for i in indices if column not in ex.vars_of(i)]
    row_starts = [ex.substitute(i, {column: 0}) for i in indices if ex.coefficient(i, column) == 1]
    aligned = all(ex.mod(i, VECTOR_ELEMENTS) == 0 for i in row_starts)
    return (*outer, column) if aligned and any(ex.vars_of(i) for i in row_constants) else None


def _looked_up_tile(k: Kernel, device: Gpu) -> tuple[int, int] | None:
    """Return the rows and columns of tiles whose rows lie at looked-up places; None without such rows.

    A tile computes the place of each row once, and reads whole vectors along the columns. Element by element, an
    enlarged channels-last image of 256 channels took 160 us in float32 and 223 in bfloat16, for TorchInductor's 60 and
    40. Tiles of 2,048 elements with four warps took 73 and 64, of 1,024 with two warps 67 and 55, with one 72 and 48.
    Triton 3.6 would lay threads across the rows where columns are looked up, too.
    """
    if len(k.stages) != 1 or any(q.kind is not Kind.POINT for q in k.nodes) or len(k.stages[0].inner) < 2:
        return None
    column, length = k.stages[0].inner[-1], ex.size_of(k.stages[0].inner[-1])
    places = [v for q in k.nodes for _, i in va.loads(q.value) for v in ex.lookups(i)]
    of_rows = all(not va.loads(v) and column not in v.vars for v in places)
    if not places or not of_rows or not isinstance(length, int):
        return None
    columns = next((c for c in LOOKED_UP_COLUMNS if fills(length, c)), 0)
    points = ex.prod(map(ex.size_of, k.stages[0].inner))
    fills_device = isinstance(points, int) and points >= LOOKED_UP_TILE * device.parallelism
    return (LOOKED_UP_TILE // columns, columns) if columns and fills_device else None


def _warps_of_looked_up(p: Program, k: Kernel) -> int:
    """Return the warps of a tile of looked-up rows, whose threads store LOOKED_UP_BYTES each."""
    itemsize = max((p.buffers[b].dtype.itemsize for b in k.stored), default=4)
    return max(LOOKED_UP_TILE * itemsize // (LOOKED_UP_BYTES * WARP), 1)


def _flops_per_row(k: Kernel, column: Atom) -> int:
    """Return the float additions that every program computes for its row before it computes elements."""
    values = {v for q in k.nodes for v in va.walk(q.value) if column not in v.vars}
    return sum(OPS[v.op].flops for v in values if v.op in OPS)


def _near_loop(index: Index, loops: tuple[Atom, ...]) -> Atom | None:
    """Return the loop whose steps are a few elements, as those of strided windows; None without one."""
    return next((v for v in loops if isinstance(c := ex.coefficient(index, v), int) and 1 < c <= NEAR), None)


def _loop_of_runs(index: Index, loops: tuple[Atom, ...]) -> Atom | None:
    """Return the loop along which memory is contiguous in runs of some elements, as channels of padded groups are.

    The image of such a convolution, stored plain, took 645 us element by element in bfloat16, and takes 106 in squares.
    """
    for v in loops:
        if ex.coefficient(index, v) is not None or row_step(index, v) != 1:
            continue
        if all(isinstance(n, int) and n >= LEAST_RUN for n in ex.divisors(index, v)):
            return v
    return None


# --- matrix products -------------------------------------------------------------------------------------------------


def _matmul(p: Program, k: Kernel, m: Matmul, device: Gpu) -> Blocks:
    tiles, down, across = tiles_of(m)
    programs = m.batch * down * across
    return Blocks(
        form=Form.MATMUL,
        flat=False,
        points=m.batch * m.rows,
        xblock=tiles.rows,
        rblocks={m.columns: tiles.columns},
        long=frozenset(),
        programs=min(programs, device.sms) if tiles.persistent else programs,
        warps=tiles.warps,
        wide=is_wide(p, k, m.points),
        depth=tiles.depth,
        stages=tiles.stages,
    )
