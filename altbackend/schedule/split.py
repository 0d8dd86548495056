"""Split reductions that have few results over much data into two steps, so that the whole device has work."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Buffer, Node, Program, Reduction
from ..ir.value import Value
from .device import Cpu, Device, Gpu
from .loop_mapping import ordered_vars
from .rows import ROWS_OF_COLUMNS

LONG = 1 << 16  # elements per result from which a split pays
SHORTEST_PART = 4096  # elements of one part
LONG_COLUMN = 1024  # elements of a column from which a split pays: a program reads it in few, dependent steps
SHORTEST_COLUMN = 64  # elements of one part of a column


def split_reductions(p: Program, device: Device, unsplit: frozenset[str] = frozenset()) -> Program:
    """Return `p` with every reduction of few, long rows replaced by partial results and their reduction.

    `unsplit`: buffers whose reductions stay as they are. Full reductions stay too: a flat kernel already runs them on
    all threads.
    """
    if device.parallelism < 2:
        return p
    buffers = dict(p.buffers)
    nodes: list[Node] = []
    for node in p.nodes:
        parts = _split(node, buffers, device) if isinstance(node, Reduction) and node.out not in unsplit else None
        nodes += parts or [node]
    return replace(p, buffers=buffers, nodes=tuple(nodes))


# --- into how many parts ---------------------------------------------------------------------------------------------


def cuts_of(node: Reduction, device: Device) -> tuple[int, ...] | None:
    """Return into how many parts to cut each reduced loop; None where the reduction is not split."""
    results = ex.prod(ex.size_of(v) for v in node.dims)
    sizes = tuple(n for v in node.rdims if isinstance(n := ex.size_of(v), int))
    if not node.dims or not sizes or not isinstance(results, int) or node.op.startswith("arg"):
        return None
    if len(sizes) < len(node.rdims):
        return None
    if isinstance(device, Gpu):
        return _cuts_on_gpu(node, results, sizes, device)
    parts = _parts_on_cpu(results, sizes[0], math.prod(sizes), device)
    return None if parts is None else (parts, *(1 for _ in sizes[1:]))


def _parts_on_cpu(results: int, slowest: int, total: int, device: Cpu) -> int | None:
    """Return into how many parts to cut the slowest of the reduced loops, which have `total` points."""
    if total < LONG or results >= 2 * device.parallelism:
        return None
    least = -(-4 * device.parallelism // results)
    parts = next((n for n in range(least, min(slowest, 64 * device.parallelism) + 1) if slowest % n == 0), None)
    return None if parts is None or total // parts < SHORTEST_PART else parts


def _has_columns(node: Reduction) -> bool:
    """Return whether results, not the elements that they reduce, are neighbours in memory."""
    return ordered_vars(node)[-1] not in node.rdims


def _cuts_on_gpu(node: Reduction, results: int, sizes: tuple[int, ...], device: Gpu) -> tuple[int, ...] | None:
    """Return into how many parts to cut each reduced loop, slow loops wholly first: one part for each program.

    A program takes one row, or a block of columns. Parts are equal where divisors give half as many as would fill it.
    Else the slowest loop is cut, and its last part is shorter.
    """
    columns, total = _has_columns(node), math.prod(sizes)
    programs = -(-results // ROWS_OF_COLUMNS) if columns else results
    shortest = SHORTEST_COLUMN if columns else SHORTEST_PART
    target = -(-device.parallelism // programs)
    if programs >= device.parallelism // 2 or total < (LONG_COLUMN if columns else LONG):
        return None
    cuts: list[int] = []
    for n in sizes:
        parts = math.prod(cuts)
        options = [
            c for c in range(1, min(n, 2 * target // parts) + 1) if n % c == 0 and total // (parts * c) >= shortest
        ]
        cuts.append(min(options, key=lambda c: abs(parts * c - target), default=1))
        if cuts[-1] != n:  # later loops are not cut
            break
    uneven = _uneven_parts(sizes[0], min(target, total // shortest))
    if uneven >= 2 * math.prod(cuts):
        cuts = [uneven]
    cuts += [1] * (len(sizes) - len(cuts))
    return tuple(cuts) if math.prod(cuts) > 1 else None


def _uneven_parts(n: int, parts: int) -> int:
    """Return about `parts` parts of a loop of `n` turns, none of them empty."""
    return -(-n // -(-n // max(min(parts, n), 1)))


def _slowest_first(node: Reduction) -> tuple[Atom, ...]:
    """Return the reduced loops in the order of memory, so that a part is a stretch of it.

    The strides are those of the element that depends on the most reduced loops.
    """
    indices = [i for _, i in va.loads(node.value)]
    if not indices:
        return node.rdims
    main = max(indices, key=lambda i: len(ex.vars_of(i) & {*node.rdims}))
    strides = {v: ex.coefficient(main, v) for v in node.rdims}
    if not all(isinstance(s, int) and s > 0 for s in strides.values()):
        return node.rdims
    return tuple(sorted(node.rdims, key=lambda v: -ex.bounds(strides[v] or 0)[1]))


# --- the two reductions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CutLoops:
    """Reduced loops cut in two: `part` numbers the parts, `inner` run within one, `env` rewrites the cut loops.

    `ends`: positions in cut loops, with the sizes of those loops, that the last part exceeds.
    """

    part: Atom
    inner: tuple[Atom, ...]
    env: dict[Atom, Index]
    ends: tuple[tuple[Index, int], ...]

    def value(self, node: Reduction) -> Value:
        """Return what the parts reduce: the node's value, and the identity beyond the end of a loop."""
        value = node.value.substitute(self.env)
        inside = [va.apply("lt", va.index(position), va.const(n, torch.int64)) for position, n in self.ends]
        return va.masked(va.conjunction(*inside), value, va.identity(node.op, value.dtype)) if inside else value


def _cut_loops(node: Reduction, cuts: tuple[int, ...]) -> _CutLoops:
    parts = math.prod(cuts)
    part = ex.dim(90, parts)
    env: dict[Atom, Index] = {}
    inner: list[Atom] = []
    ends: list[tuple[Index, int]] = []
    remaining: Index = ex.ix(part)
    for k, (v, n) in reversed(list(enumerate(zip(node.rdims, cuts, strict=True)))):
        if n == 1:
            inner.insert(0, v)
            continue
        high, remaining = (remaining, 0) if n == parts else (ex.mod(remaining, n), ex.floordiv(remaining, n))
        size = ex.size_of(v)
        length = ex.floordiv(ex.add(size, n - 1), n)
        low = ex.dim(91 + k, length)
        env[v] = ex.add(ex.mul(high, length), ex.ix(low))
        inner.insert(0, low)
        if isinstance(size, int) and size % n:
            ends.append((env[v], size))
    return _CutLoops(part, tuple(inner), env, tuple(ends))


def _split(node: Reduction, buffers: dict[str, Buffer], device: Device) -> list[Node] | None:
    """Return the reductions of the parts and of their results; enters the buffer of partial results in `buffers`."""
    if isinstance(device, Gpu):
        node = replace(node, rdims=_slowest_first(node))
    cuts = cuts_of(node, device)
    if cuts is None:
        return None
    results, parts, out = ex.prod(ex.size_of(v) for v in node.dims), math.prod(cuts), buffers[node.out]
    # neighbouring columns stay neighbours where a GPU's program takes a block of them
    across = isinstance(device, Gpu) and _has_columns(node)
    sizes = (parts, results) if across else (results, parts)
    partial = Buffer(f"{node.out}_parts", out.dtype, sizes, (sizes[1], 1), out.device)
    buffers[partial.name] = partial
    loops = _cut_loops(node, cuts)
    row = ex.flatten([ex.size_of(v) for v in node.dims], [ex.ix(v) for v in node.dims])
    slot = ex.flatten(sizes, (ex.ix(loops.part), row) if across else (row, ex.ix(loops.part)))
    dims = (loops.part, *node.dims) if across else (*node.dims, loops.part)
    value = va.load(partial.name, slot, out.dtype)
    return [
        Reduction(partial.name, dims, loops.inner, slot, node.op, loops.value(node), node.origins),
        Reduction(node.out, node.dims, (loops.part,), node.index, node.op, value, node.origins),
    ]
