"""Split scans of few, long rows into parts, so that a whole GPU has work.

The sums of all parts, their scan, and the scan within each part follow one another. The scan within a part starts from
the result of the parts before it:

    y[p * n + i] = scan over i of (x[p * n + i] + [i = 0 and p > 0] * sum of x[0 .. p * n - 1])

The input is read twice in place of once.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom
from ..ir.loops import COMBINE, Buffer, Node, Program, Reduction, Scan
from .device import Device, Gpu
from .loop_mapping import has_columns
from .rows import ROWS_OF_COLUMNS

LONG_ROW, SHORTEST_ROW = 1 << 14, 1 << 11  # elements along the scan from which it is split, and of a part
LONG_COLUMN, SHORTEST_COLUMN, BEST_COLUMN = 1 << 10, 1 << 6, 1 << 7
IDLE = 3  # a scan is split where it would fill at most one such part of the device


def split_scans(p: Program, device: Device) -> Program:
    """Return `p` with every scan of few, long rows in parts. On a CPU, where rows fill the cores, nothing changes."""
    if not isinstance(device, Gpu) or not any(isinstance(n, Scan) for n in p.nodes):
        return p
    buffers = dict(p.buffers)
    nodes: list[Node] = []
    for node in p.nodes:
        parts = parts_of(node, device) if isinstance(node, Scan) else 1
        nodes += _in_parts(node, parts, buffers) if isinstance(node, Scan) and parts > 1 else [node]
    return replace(p, buffers=buffers, nodes=tuple(nodes))


def parts_of(node: Scan, device: Gpu) -> int:
    """Return into how many equal parts to cut the scanned loop; 1 where its rows fill the device or it is short."""
    n, results = ex.size_of(node.rdims[0]), ex.prod(ex.size_of(v) for v in node.dims)
    if node.op not in COMBINE or not isinstance(n, int) or not isinstance(results, int):
        return 1
    columns = has_columns(node)
    programs = -(-results // ROWS_OF_COLUMNS) if columns else results
    long, shortest = (LONG_COLUMN, SHORTEST_COLUMN) if columns else (LONG_ROW, SHORTEST_ROW)
    if n < long or programs * IDLE > device.parallelism:
        return 1
    # a block of columns in registers is wide where the columns are short
    target = n // BEST_COLUMN if columns else -(-device.parallelism // programs)
    options = [c for c in range(2, min(n // shortest, 2 * target) + 1) if n % c == 0]
    return min(options, key=lambda c: abs(c - target), default=1)


def _in_parts(node: Scan, parts: int, buffers: dict[str, Buffer]) -> list[Node]:
    """Return the three nodes that compute `node`; enters the buffers of the parts' results in `buffers`."""
    along, out = node.rdims[0], buffers[node.out]
    length = ex.exact_div(ex.size_of(along), parts)
    assert length is not None
    part, low = ex.dim(90, parts), ex.dim(91, length)
    position = {along: ex.add(ex.mul(ex.ix(part), length), ex.ix(low))}
    value = node.value.substitute(position)
    # results that are neighbours in memory stay neighbours
    sizes = (parts, *(ex.size_of(v) for v in node.dims))
    names = [f"{node.out}_parts", f"{node.out}_until"]
    for name in names:
        buffers[name] = Buffer(name, out.dtype, (parts, ex.prod(sizes[1:])), (ex.prod(sizes[1:]), 1), out.device)
    totals, until = names

    def slot(p: ex.Index) -> ex.Index:
        return ex.flatten(sizes, (p, *map(ex.ix, node.dims)))

    every: tuple[Atom, ...] = (part, *node.dims)
    total = va.load(totals, slot(ex.ix(part)), out.dtype)
    before = va.load(until, slot(ex.sub(ex.ix(part), 1)), out.dtype)
    carries = va.conjunction(*(va.apply("lt", *map(va.index, pair)) for pair in ((ex.ix(low), 1), (0, ex.ix(part)))))
    carried = va.masked(carries, before, va.identity(node.op, out.dtype))
    first = va.apply("where", carries, va.apply(COMBINE[node.op], carried, value), value)
    return [
        Reduction(totals, every, (low,), slot(ex.ix(part)), node.op, value, node.origins),
        Scan(until, node.dims, (part,), slot(ex.ix(part)), node.op, total, node.origins),
        Scan(node.out, every, (low,), ex.substitute(node.index, position), node.op, first, node.origins),
    ]
