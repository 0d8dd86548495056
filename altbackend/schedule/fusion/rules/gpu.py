"""Fusion rules of a GPU, whose programs keep rows in registers.

A value is available only at the point that computed it. A program holds whole rows as one tile of at most `row_limit`
points a row. It reads a row that is longer, or of symbolic length, in blocks, one pass after the other. Every pass
computes the values of earlier passes that it needs once more.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Extern, Reduction, Scan
from ....ir.value import Value
from ...device import Gpu
from ...loop_mapping import Kind, MappedNode, Refusal, has_columns, ordered_vars, rdims
from ...rows import (
    COLUMN_LIMIT,
    ROWS_OF_COLUMNS,
    SECTOR,
    SHORT_COLUMN,
    TILED_ROW,
    estimate,
    exceeds,
    is_along_rows,
    is_long,
    rows_are_neighbours,
    total_points,
)
from ...sectors import Access, accesses_of, numberings, sectors_of
from ...split import cuts_of
from ..group import CACHED_COUNTS, Fusion, Group
from .rule import Edge, Proposal, Rule, Table

MOST_OPERATORS = 400  # Triton's time grows with their square: 1,000 in one kernel take it a minute
REPEATED_FLOPS = 256  # float additions that a pass over a long row may repeat
RESIDENT = 4  # programs of long rows that a multiprocessor runs at the same time, of 16 warps each
LARGE = 1 << 22  # elements from which a launch is short beside the pass
EVEN = 0.8  # share of the device that programs of long rows should keep busy; a launch costs less than the rest
SCATTERED = 128  # most points of a row that may lie in cache lines of their own, where other rows are contiguous
COLUMN_BLOCK = 64  # points of a column beyond which a warp scans neighbouring columns, block by block
MOST_OF_COLUMNS = 2048  # points of a column that one of few programs computes in about the time of a launch
MOST_OF_TOTALS = 512  # points of columns that one persistent program takes ROWS_OF_COLUMNS of
APART = 1.5  # one kernel may touch so many times the sectors of two, since the second costs a launch
# Elements of one tensor that a point may read in a kernel that also reduces. The gradient of a 7x7 depthwise
# convolution in one kernel with a layer norm's backward spilled 5 kB of registers and wanted 850 kB of shared memory.
WIDEST_WINDOW = 24
WIDE_WINDOW, LINE = 8, 128  # places of one tensor that a point reads, from which lines of so many bytes count


def _gpu(fusion: Fusion) -> Gpu:
    assert isinstance(fusion.device, Gpu)
    return fusion.device


# --- groups before mapping -------------------------------------------------------------------------------------------


def _build_time(fusion: Fusion, group: Group) -> Refusal | None:
    if group.operators > MOST_OPERATORS:
        return Refusal(f"one kernel would have more than {MOST_OPERATORS} operators, which take long to build")
    return None


def _window(fusion: Fusion, group: Group) -> Refusal | None:
    windows = [n for n in group.nodes if not isinstance(n, Extern) and _most_reads(n.value) > WIDEST_WINDOW]
    reductions = [n for n in group.nodes if isinstance(n, Reduction)]
    sums_windows = len(reductions) == 1 and windows == reductions  # one term after the other, as of a convolution
    if windows and reductions and not sums_windows:
        return Refusal(f"a window of more than {WIDEST_WINDOW} elements beside a reduction takes too many registers")
    return None


@functools.lru_cache(CACHED_COUNTS)
def _most_reads(value: Value) -> int:
    """Return at how many places a value reads one buffer, the one that it reads most."""
    return max(Counter(b for b, _ in va.loads(value)).values(), default=0)


# --- mapped groups ---------------------------------------------------------------------------------------------------


def _tiles(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse nodes that the tiles of a program cannot express."""
    for q in proposal.mapped:
        if (refusal := _node_on_tile(q, _gpu(fusion))) is not None:
            return refusal
    return None


def _node_on_tile(q: MappedNode, device: Gpu) -> Refusal | None:
    name, results = q.node.out, q.results
    if q.kind is Kind.IN_ROW and results != 1:
        return Refusal(f"{name} has several results in a row: needs shared memory")
    if q.kind is Kind.SCAN and any(v not in q.scanned and ex.size_of(v) != 1 for v in q.inner):
        return Refusal(f"{name} is several scans in a row: needs shared memory")
    if q.kind is not Kind.CROSS_ROW:
        return None
    if results != 1 and q.reduced:
        return Refusal(f"{name} is reduced across rows and within them, and has several results in a row")
    if not isinstance(results, int) or results > device.row_limit // 2:
        return Refusal(f"{name} has {ex.show(results)} totals, more than fit in registers")
    return None


def _rows_of_long_columns(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse one row for each long column in a kernel with sums of neighbours, whose rows would be single elements.

    The sums open a kernel of rows instead, and the columns become totals over those rows.
    """
    new = [proposal.mapped[n] for n in proposal.new]
    if not any(q.kind is Kind.CROSS_ROW and q.results != 1 and not q.reduced and _sums_neighbours(q) for q in new):
        return None
    columns = (q.node for q in proposal.mapped if q.kind is Kind.IN_ROW and not _sums_neighbours(q))
    if any(isinstance(n, Reduction) and n.dims and cuts_of(n, fusion.device) is not None for n in columns):
        return Refusal("neighbours in memory would be a row each")
    return None


def _sums_neighbours(q: MappedNode) -> bool:
    return ordered_vars(q.node)[-1] in rdims(q.node)


def _without_rows(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse kernels without rows that are neither parallel points with totals of them nor fit in one program."""
    if proposal.group.rows != 1 or all(q.kind is Kind.POINT for q in proposal.mapped):
        return None
    lengths = dict.fromkeys(q.points for q in proposal.mapped)
    if not any(is_long(n, _gpu(fusion)) for n in lengths):
        return None
    if any(q.kind is Kind.SCAN for q in proposal.mapped):
        return Refusal("a scan without rows would run on one program")
    return Refusal("totals of different sizes") if len(lengths) > 1 else None


def _totals_of_long_rows(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    if _has_long_rows(fusion, proposal) and any(q.kind is Kind.CROSS_ROW for q in proposal.mapped):
        return Refusal("totals over rows need rows that fit in registers")
    return None


def _scans_of_long_rows(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse what reads a scan of a long row in a later pass: its values are there only while the scan passes."""
    scanned = {q.node.out for q in proposal.mapped if isinstance(q.node, Scan) and _runs_in_blocks(fusion, q)}
    if not scanned or _is_one_pass(proposal.mapped):
        return None
    read = {b for q in proposal.mapped for b, _ in va.loads(q.value)}
    return None if scanned.isdisjoint(read) else Refusal("a scan of a long row is read in another pass")


def _is_one_pass(mapped: Sequence[MappedNode]) -> bool:
    """Return whether one pass over the rows scans them, computes points, and totals them: no point reads a total."""
    if any(q.kind not in (Kind.SCAN, Kind.POINT, Kind.IN_ROW) for q in mapped):
        return False
    rows = [q for q in mapped if q.points != 1]
    loops = {tuple(n for n in q.sizes if n != 1) for q in rows}
    totals = {q.node.out for q in mapped if q.kind is Kind.IN_ROW}
    return len(loops) == 1 and all(b not in totals for q in rows for b, _ in va.loads(q.value))


def _runs_in_blocks(fusion: Fusion, q: MappedNode) -> bool:
    """Return whether a scan's rows do not stay in registers; of columns, a program takes several side by side."""
    columns = isinstance(q.node, Scan) and has_columns(q.node)
    most = COLUMN_BLOCK if total_points(q) >= LARGE else COLUMN_LIMIT
    return exceeds(q.points, most if columns else _gpu(fusion).row_limit)


def _totals_of_columns(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse totals over rows that are neighbours in memory: a persistent program would take single columns.

    One total over all rows is refused beside reductions of columns that are not short, and others beside any columns of
    many points.
    """
    group = proposal.group
    totals = [q for q in proposal.mapped if q.kind is Kind.CROSS_ROW]
    if group.rows == 1 or not totals:
        return None
    tall = [q for q in proposal.mapped if exceeds(q.points, MOST_OF_TOTALS) and total_points(q) >= LARGE]
    if tall and rows_are_neighbours(tall):
        return Refusal("totals over long rows need rows that are contiguous in memory")
    if not any(q.results == 1 for q in totals):
        return None
    reduced = [q for q in proposal.mapped if q.kind is Kind.IN_ROW and exceeds(q.points, SHORT_COLUMN)]
    large = any(not isinstance(n := ex.mul(group.rows, q.points), int) or n >= LARGE for q in reduced)
    if large and rows_are_neighbours(reduced):
        return Refusal("a total over all rows needs rows that are contiguous in memory")
    return None


def _has_long_rows(fusion: Fusion, proposal: Proposal) -> bool:
    return proposal.group.rows != 1 and any(is_long(q.points, _gpu(fusion)) for q in proposal.mapped)


def _enough_rows(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    rows, device = proposal.group.rows, _gpu(fusion)
    if rows == 1 or not isinstance(rows, int):
        return None
    columns = proposal.rows_are_neighbours
    most = MOST_OF_COLUMNS if columns else device.row_limit
    few = rows < (ROWS_OF_COLUMNS if columns else 1) * device.parallelism // 8
    points = [q for q in proposal.mapped if q.kind is Kind.POINT and exceeds(q.points, most)]
    works_long = any(q.kind is Kind.POINT and exceeds(ex.mul(q.points, _cost(q)), most) for q in proposal.mapped)
    if few and works_long:
        return Refusal(f"{rows} rows would leave most of the device idle")
    if any(_is_uneven(fusion, rows, ROWS_OF_COLUMNS if columns else 1, q) for q in points):
        return Refusal(f"{rows} long rows would leave part of the device idle, and the cache does not hold them")
    return None


def _cost(q: MappedNode) -> int:
    """Return the cost of a point by what it loads; 1 is that of a sum of two tensors.

    One program for a 3x3 convolution of 64 channels in pairs, 486 points, and the totals of its channels took 64 us.
    """
    return max(sum(not ex.vars_of(i).isdisjoint(q.inner) for _, i in va.loads(q.value)) // 2, 1)


def _long_points_share(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse points of few long rows that read no tensor which the kernel's totals read too.

    Together they save a launch; the totals are a few numbers. Apart, the points run on the whole device.
    """
    rows = proposal.group.rows
    if rows == 1 or not isinstance(rows, int) or rows >= _gpu(fusion).parallelism:
        return None
    totals = [q for q in proposal.mapped if q.kind is not Kind.POINT]
    for q in proposal.mapped:
        if not totals or q.kind is not Kind.POINT or total_points(q) < LARGE or not is_long(q.points, _gpu(fusion)):
            continue
        loops = {v for v in q.inner if ex.size_of(v) != 1}
        read = {b for b, index in va.loads(q.value) if loops <= ex.vars_of(index)}
        others = {b for m in proposal.mapped if m is not q for b, _ in va.loads(m.value) if m.points == q.points}
        if read.isdisjoint(others) and not any(m.node.out in read for m in proposal.mapped):
            return Refusal(f"{q.node.out} reads nothing that the totals read, and {rows} rows are few")
    return None


def _is_uneven(fusion: Fusion, rows: int, rows_of_program: int, q: MappedNode) -> bool:
    """Return whether programs of long rows keep less than EVEN of the device busy to the end.

    Rows that the cache holds are worth that: the kernel that computed their totals has just read them. Many turns even
    out.
    """
    device = _gpu(fusion)
    programs, slots = -(-rows // rows_of_program), device.sms * RESIDENT
    places = slots if programs > slots else device.sms
    busy = programs / (places * -(-programs // places))
    itemsize = fusion.program.buffers[q.node.out].dtype.itemsize
    in_flight = rows_of_program * min(programs, slots) * itemsize
    cached = isinstance(q.points, int) and q.points * in_flight <= device.cached_row_bytes
    return programs < device.parallelism and busy < EVEN and not cached


def _same_direction(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse nodes that are contiguous from row to row in a kernel whose points are contiguous along rows.

    A point that reads a scan, as one that rounds it does, is stored in place of the scan where both lie alike.
    """
    if proposal.group.rows == 1 or proposal.rows_are_neighbours:
        return None
    turned_scans = {q.node.out for q in proposal.mapped if q.kind is Kind.SCAN and _row_stride(q) == 1}
    tall = [q for q in proposal.mapped if exceeds(q.points, SCATTERED)]
    # A program takes several neighbouring columns at once where it only sums them. Points along rows take one row.
    has_points_along = any(q.kind is Kind.POINT and is_along_rows(q) for q in tall)
    for q in tall:
        if q.kind is Kind.POINT and any(b in turned_scans for b, _ in va.loads(q.value)):
            continue
        if (q.kind is Kind.POINT or (q.kind is Kind.IN_ROW and has_points_along)) and rows_are_neighbours([q]):
            return Refusal(f"rows of {q.node.out} are not contiguous in memory")
    return None


def _whole_stores(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse to store points or a scan in parts of sectors in a kernel that reads its rows in another order.

    An example: a softmax over the depth of a channels-last volume, stored plain. A kernel of tiles over both orders
    reads the volume once more, and stores whole sectors.
    """
    if proposal.group.rows == 1 or not any(q.kind in (Kind.IN_ROW, Kind.SCAN) for q in proposal.mapped):
        return None
    new = [proposal.mapped[n] for n in proposal.new]
    for q in new:
        if q.kind not in (Kind.POINT, Kind.SCAN) or total_points(q) < LARGE or not _is_stored(fusion, proposal, q):
            continue
        if _stores_fragments(fusion, proposal, q):
            return Refusal(f"{q.node.out} would be stored in runs of few elements")
        stored = frozenset([q.node.out])
        others = list(accesses_of(fusion.program, [m for m in proposal.mapped if m is not q], frozenset()))
        own = list(accesses_of(fusion.program, [q], stored))
        tile_rows = _rows_of_tile(proposal)
        together = _fewest_sectors(list(accesses_of(fusion.program, proposal.mapped, stored)), q.row, tile_rows)
        apart = _fewest_sectors(others, q.row, tile_rows) + sum(a.fewest for a in own)
        if together > APART * apart:
            return Refusal(f"{q.node.out} would be stored in parts of sectors")
    return None


def _stores_fragments(fusion: Fusion, proposal: Proposal, q: MappedNode) -> bool:
    """Return whether the neighbours of an element in memory are few points of its row, and then points of other rows.

    So they are where the loops of the rows cut a contiguous loop of the node in two. Where rows alone are neighbours,
    those of the same tile do not count as others.
    """
    row_stride = _row_stride(q)
    loops, run = [v for v in q.inner if ex.size_of(v) != 1], 1
    while (following := next((v for v in loops if ex.coefficient(q.index, v) in (run, -run)), None)) is not None:
        run *= estimate(ex.size_of(following))
        loops.remove(following)
    itemsize = fusion.program.buffers[q.node.out].dtype.itemsize
    if not loops or row_stride == 1 or run * itemsize >= SECTOR:
        return False
    rows = _rows_of_tile(proposal) if run == 1 else 1
    return Access(q.index, itemsize, q.inner, 1.0).run(q.index, q.row, rows, any_part=True) * itemsize < SECTOR


def _row_stride(q: MappedNode) -> Index:
    """Return how far the first row's element lies from that of the second row in what a node stores."""
    return ex.sub(ex.substitute(q.index, {q.row: 1}), ex.substitute(q.index, {q.row: 0}))


def _one_order(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse to store rows of several loops along another loop than that along which the kernel reads them.

    An example: a group normalisation of a channels-last image, stored plain. A warp would store an element in each of
    32 sectors. With 11,296 images of 192x7x7 such a kernel took 3.5 ms; the program saved 2.9 ms without it.
    """
    if proposal.group.rows == 1 or not any(q.kind is Kind.IN_ROW for q in proposal.mapped):
        return None
    if proposal.rows_are_neighbours:
        return None
    written = {q.node.out for q in proposal.mapped}
    for q in proposal.mapped:
        if q.kind is not Kind.POINT or total_points(q) < LARGE or not _is_stored(fusion, proposal, q):
            continue
        reads = [
            index
            for m in proposal.mapped
            if m.inner == q.inner
            for name, index in va.loads(m.value)
            if name not in written and {*q.inner} <= ex.vars_of(index)
        ]
        along = {v for index in reads for v in q.inner if ex.coefficient(index, v) == 1}
        stored = {v for v in q.inner if ex.coefficient(q.index, v) == 1}
        if along and stored and not along & stored:
            return Refusal(f"{q.node.out} is stored along another loop of its rows than they are read")
    return None


def _is_stored(fusion: Fusion, proposal: Proposal, q: MappedNode) -> bool:
    """Return whether something outside the kernel's nodes reads a value."""
    readers = set(fusion.deps.readers.get(q.node.out, ()))
    return q.node.out in fusion.deps.escaping or not readers <= set(proposal.group.members)


def _rows_of_tile(proposal: Proposal) -> int:
    """Return the most rows that a tile holds: one of rows that are longer than TILED_ROW and contiguous."""
    longest = max(estimate(q.points) for q in proposal.mapped)
    return ROWS_OF_COLUMNS if longest <= TILED_ROW or proposal.rows_are_neighbours else 1


def _fewest_sectors(accesses: Sequence[Access], row: Atom, tile_rows: int) -> float:
    numbers: list[Index | None] = [None, *numberings(accesses, row)]
    return min(sectors_of(accesses, row, tile_rows, number, any_part=True) for number in numbers)


def _whole_sectors(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse points of long rows that lie apart in memory, such as a group's channels in a channels-last image.

    A kernel of their own takes tiles over both loops, and reads whole sectors.
    """
    if not _has_long_rows(fusion, proposal) or proposal.rows_are_neighbours:
        return None
    reduces = any(q.kind is Kind.IN_ROW for q in proposal.mapped)
    for q in proposal.mapped:
        if not reduces or q.kind is not Kind.POINT or not is_long(q.points, _gpu(fusion)):
            continue
        for name, index in va.loads(q.value):
            if _run_bytes(q, index, fusion.program.buffers[name].dtype.itemsize) < SECTOR:
                return Refusal(f"a row of {q.node.out} reads {name} in parts of sectors")
    return None


def _windows_alone(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse a large copy into another layout beside points that read windows.

    The kernel would have square tiles, as the copy needs. A 7x7 depthwise convolution of 64x96x56x56 in float32 took
    753 us beside a copy of its image, and takes 252 alone.
    """
    if proposal.group.rows != 1:
        return None
    windows = [q for q in proposal.mapped if q.kind is Kind.POINT and _most_reads(q.value) >= WIDE_WINDOW]
    for q in proposal.mapped:
        if total_points(q) < LARGE or q.kind is not Kind.POINT:
            continue
        if windows and windows != [q] and _turns_over(q):
            return Refusal(f"{q.node.out} is stored along another loop than it is read, beside windows")
    return None


def _turns_over(q: MappedNode) -> bool:
    """Return whether a node stores its points along another loop than that along which it reads them."""
    stored = {v for v in q.inner if ex.coefficient(q.index, v) == 1}
    read = {v for _, index in va.loads(q.value) for v in q.inner if ex.coefficient(index, v) == 1}
    return bool(stored and read) and stored.isdisjoint(read)


def _lines_of_windows(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse windows of columns that are neighbours in short runs, beside reductions of columns; the result is stored.

    Each of a window's loads would touch a cache line for each run. A depthwise convolution of 8x8 images in a kernel
    with their mean squares over the height took 496 us, and 880 in bfloat16; alone such convolutions take about 120.
    """
    if not proposal.rows_are_neighbours or not any(q.kind is Kind.IN_ROW for q in proposal.mapped):
        return None
    for q in proposal.mapped:
        if q.kind is not Kind.POINT or total_points(q) < LARGE or not _is_stored(fusion, proposal, q):
            continue
        reads = Counter(b for b, _ in va.loads(q.value))
        for name, index in va.loads(q.value):
            run = min((n for n in ex.divisors(index, q.row) if n > 1), default=LINE)
            if reads[name] >= WIDE_WINDOW and run * fusion.program.buffers[name].dtype.itemsize < LINE:
                return Refusal(f"windows of {name} are columns in runs of {run} elements")
    return None


def _run_bytes(q: MappedNode, index: Index, itemsize: int) -> int:
    """Return the bytes that are neighbours in a row's reads; SECTOR for an operand that is no tensor of this size."""
    loops = [v for v in q.inner if ex.size_of(v) != 1]
    if any(ex.coefficient(index, v) == 0 for v in loops):
        return SECTOR
    return max((estimate(ex.size_of(v)) for v in loops if ex.coefficient(index, v) == 1), default=1) * itemsize


def _repeated_work(fusion: Fusion, proposal: Proposal) -> Refusal | None:
    """Refuse long rows where a pass would compute too much again, or from inputs that the kernel overwrites."""
    if not _has_long_rows(fusion, proposal):
        return None
    buffers = fusion.program.buffers
    flops: dict[str, int] = {}
    for q in proposal.mapped:
        read = {b for b, _ in va.loads(q.value)}
        if any(buffers[w.node.out].kind != "temp" and w.node.out in read for w in proposal.mapped):
            return Refusal(f"{q.node.out} reads what a long row overwrites")
        cost = va.flops(q.value) + sum(flops.get(b, 0) for b in read)
        if q.kind is Kind.POINT:
            flops[q.node.out] = cost
        if cost > REPEATED_FLOPS:
            return Refusal(f"{q.node.out} would repeat {cost} operations in every pass over a long row")
    return None


# --- reads -----------------------------------------------------------------------------------------------------------


def _in_registers(fusion: Fusion, edge: Edge) -> Refusal | None:
    """Refuse reads of values that the registers of the reader's point do not hold."""
    writer = edge.writer
    if (
        edge.at_same_point
        or edge.at_scanned_point
        or (writer.kind in (Kind.POINT, Kind.IN_ROW) and writer.results == 1)
    ):
        return None
    return Refusal(f"{edge.buffer} is read at other points of the row than it is written: needs shared memory")


GPU = Table(
    nodes=(
        Rule("kernels build in bounded time", _build_time),
        Rule("no wide window beside a reduction", _window),
    ),
    mapping=(
        Rule("tiles express every node", _tiles),
        Rule("kernels without rows are points and totals", _without_rows),
        Rule("totals over rows need short rows", _totals_of_long_rows),
        Rule("scans of long rows are read as they run", _scans_of_long_rows),
        Rule("totals over rows need rows, not columns", _totals_of_columns),
        Rule("sums of neighbours are no totals over long columns", _rows_of_long_columns),
        Rule("rows fill the device", _enough_rows),
        Rule("few long rows share data with their totals", _long_points_share),
        Rule("nodes are contiguous in the same direction", _same_direction),
        Rule("long rows are read in whole sectors", _whole_sectors),
        Rule("windows share no kernel with copies into other layouts", _windows_alone),
        Rule("windows of columns are read in whole lines", _lines_of_windows),
        Rule("points are stored in whole sectors", _whole_stores),
        Rule("rows are read and stored along one loop", _one_order),
        Rule("passes over long rows repeat little", _repeated_work),
    ),
    edges=(Rule("values stay in registers", _in_registers),),
)
