"""Tile pointwise kernels of a CPU so that every thread reads and writes whole cache lines."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.loops import Reduction
from ...access import outside_row, same_point
from ...device import Cpu
from ...loop_mapping import Kind, MappedNode, Refusal, fit
from ...loop_refinement import common_refinement, mergeable, merged, with_loops_of

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
