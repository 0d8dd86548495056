"""Tile pointwise kernels of a CPU so that every thread reads and writes whole cache lines."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Pointwise, Reduction
from ...access import outside_row, same_point
from ...device import LINE_FLOATS, Cpu
from ...loop_mapping import Kind, MappedNode, Refusal, cut_points, fit
from ...loop_refinement import common_refinement, mergeable, merged, with_loops_of

LINE = 4 * LINE_FLOATS  # bytes of a cache line
CACHED = 1024  # a kernel's loops are merged to find its rows, and then on those rows


def merge_all(mapped: Sequence[MappedNode]) -> list[MappedNode]:
    """Merge neighbouring inner loops wherever they merge in all nodes."""
    return list(_merge_all(tuple(mapped)))


@functools.lru_cache(CACHED)
def _merge_all(mapped: tuple[MappedNode, ...]) -> Sequence[MappedNode]:
    nodes: Sequence[MappedNode] = mapped
    for k in range(len(nodes[0].inner) - 2, -1, -1):
        if all(mergeable(q, k) for q in nodes):
            nodes = [merged(q, k) for q in nodes]
    return nodes


def spread_rows(mapped: Sequence[MappedNode]) -> Sequence[MappedNode]:
    """Run all loops but the fastest as rows where a kernel of one row has loops that do not merge into one.

    Its nodes are pointwise, or reductions to a single value that none of them reads: the rows of each thread give a
    part of it. As one row, such a kernel would run in one thread.
    """
    if ex.size_of(mapped[0].row) != 1 or not all(q.kind is Kind.POINT or _is_total(q, mapped) for q in mapped):
        return mapped
    chain = common_refinement([q.sizes for q in mapped])
    if chain is None:
        return mapped
    sizes = merge_all([with_loops_of(q, chain) for q in mapped])[0].sizes
    if len(sizes) < 2:
        return mapped
    rows = ex.prod(sizes[:-1])
    fitted = [fit(q.node, rows) for q in mapped]
    if any(isinstance(q, Refusal) for q in fitted):
        return mapped
    spread = [q for q in fitted if isinstance(q, MappedNode)]
    # a single row holds all values; one of several rows holds only its own
    return spread if all(_reads_own_row(spread[:n], q) for n, q in enumerate(spread)) else mapped


def runs_in_parallel(mapped: Sequence[MappedNode]) -> bool:
    """Return whether threads can share the points of a kernel of one row whose nodes are pointwise.

    They share the one loop of all nodes, or the rows that `spread_rows` finds.
    """
    chain = common_refinement([q.sizes for q in mapped])
    if chain is None:
        return False
    is_one_loop = len(merge_all([with_loops_of(q, chain) for q in mapped])[0].sizes) < 2
    return is_one_loop or ex.size_of(spread_rows(mapped)[0].row) != 1


def _is_total(q: MappedNode, mapped: Sequence[MappedNode]) -> bool:
    """Return whether `q` reduces everything to one value that no node of the kernel reads."""
    total = q.kind is Kind.IN_ROW and isinstance(q.node, Reduction) and not q.node.dims
    return total and all(b != q.node.out for m in mapped for b, _ in va.loads(m.value))


def _reads_own_row(writers: Sequence[MappedNode], reader: MappedNode) -> bool:
    return all(
        same_point(w, reader) or outside_row(w, reader, b, index) is None
        for b, index in va.loads(reader.value)
        for w in writers
        if w.node.out == b
    )


def turn_rows(mapped: list[MappedNode]) -> list[MappedNode]:
    """Make a loop along which loads are contiguous the fastest of the rows' loops, where columns lie apart in memory.

    Neighbouring rows then read the same cache lines, and `tile_transposed` finds squares. A copy of 256x64x256 numbers
    with the first and the last dimension exchanged took 11.4 ms for 0.7. Columns of less than a cache line stay: rows
    would write parts of lines far apart. With 4 columns of 64x50000 rows it would take 12.8 ms for 5.0, with 12 of
    64x20000 9.1 for 7.2, and with 16 11.8 for 17.0.
    """
    if any(len(q.inner) != 1 or not isinstance(q.node, Pointwise) for q in mapped):
        return mapped
    nodes = [q.node for q in mapped if isinstance(q.node, Pointwise)]
    rows, columns = ex.size_of(mapped[0].row), ex.size_of(mapped[0].inner[0])
    if len({tuple(map(ex.size_of, n.dims)) for n in nodes}) > 1 or ex.size_of(nodes[0].dims[-1]) != columns:
        return mapped
    if isinstance(columns, int) and columns * min(n.value.dtype.itemsize for n in nodes) < LINE:
        return mapped
    places = (k for n in nodes for _, index in va.loads(n.value) if (k := _contiguous_row(index, n.dims)) is not None)
    if (place := next(places, None)) is None:
        return mapped
    orders = ([*n.dims[:place], *n.dims[place + 1 : -1], n.dims[place], n.dims[-1]] for n in nodes)
    turned = [cut_points(n, order, rows) for n, order in zip(nodes, orders, strict=True)]
    fitting = [q for q in turned if isinstance(q, MappedNode) and len(q.inner) == 1]
    return fitting if len(fitting) == len(mapped) else mapped


def _contiguous_row(index: Index, loops: Sequence[Atom]) -> int | None:
    """Return the place of the loop along which a load is contiguous, if it is none of the two fastest; else None.

    A load of fewer elements than the loops have points comes from the cache.
    """
    is_whole = {v for v in loops if ex.size_of(v) != 1} <= ex.vars_of(index)
    if not is_whole or ex.coefficient(index, loops[-1]) in (None, 1):
        return None
    return next((k for k, v in enumerate(loops[:-2]) if ex.coefficient(index, v) == 1), None)


def tile_transposed(mapped: list[MappedNode], device: Cpu) -> tuple[list[MappedNode], dict[Atom, Index]]:
    """Block rows and columns where loads are contiguous along the rows and stores along the columns.

    The loops o = side*o' + a and i0 = side*b + c run in the order b, a, c. Each cache line of either side is used up
    while it is in L1. The second result bounds a and c where the last blocks are, or may be, smaller. Rows stay whole
    where no tile of a transposed load is one square of memory, since its rows belong to two images.
    """
    row, inner, side = mapped[0].row, mapped[0].inner, device.tile_side
    if len(inner) != 1 or any(q.kind is not Kind.POINT or q.inner != inner for q in mapped):
        return mapped, {}
    rows, columns = ex.size_of(row), ex.size_of(inner[0])
    transposed = any(_is_transposed(q, i, inner[0]) for q in mapped for _, i in va.loads(q.value))
    few = (isinstance(rows, int) and rows < side) or (isinstance(columns, int) and columns < 4 * side)
    # strides that are multiples of a line meet in few sets of the cache; with other, known strides tiles gain nothing
    uneven = isinstance(rows, int) and isinstance(columns, int) and (rows % side or columns % side)
    if not transposed or few or uneven:
        return mapped, {}
    o, a = ex.var(row.args[0], _ceil_div(rows, side)), ex.var("i1", side)
    b, c = ex.var("i0", _ceil_div(columns, side)), ex.var("i2", side)
    env = {
        row: ex.add(ex.mul(ex.ix(o), side), ex.ix(a)),
        inner[0]: ex.add(ex.mul(ex.ix(b), side), ex.ix(c)),
    }
    tail_bounds: dict[Atom, Index] = {}
    if ex.exact_div(rows, side) is None or ex.exact_div(columns, side) is None:
        tail_bounds = {a: ex.sub(rows, ex.mul(ex.ix(o), side)), c: ex.sub(columns, ex.mul(ex.ix(b), side))}
    tiled = [
        replace(q, row=o, inner=(b, a, c), index=ex.substitute(q.index, env), value=q.value.substitute(env))
        for q in mapped
    ]
    squares = any(ex.coefficient(i, a) == 1 for q in tiled for _, i in va.loads(q.value))
    return (tiled, tail_bounds) if squares else (mapped, {})


def _ceil_div(n: Index, d: int) -> Index:
    return ex.floordiv(ex.add(n, d - 1), d)


def _is_transposed(q: MappedNode, index: Index, column: Atom) -> bool:
    """Return whether a load has stride 1 along the rows and a larger one along the columns."""
    stride = ex.coefficient(index, column)
    if stride is None or stride in (0, 1) or ex.vars_of(stride):
        return False
    return ex.sub(ex.substitute(index, {q.row: 1}), ex.substitute(index, {q.row: 0})) == 1
