"""Split reductions that have few results over much data into two steps, so that the whole device has work."""

from __future__ import annotations

import collections
import functools
import math
from dataclasses import field, replace

import torch

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Buffer, Node, Pointwise, Program, Reduction, reads
from ..ir.value import Value
from .device import Cpu, Device, Gpu
from .loop_mapping import ordered_vars
from .one_pass_forms import combined_position, combined_sum, is_exp_below, position
from .rows import CACHED, ROWS_OF_COLUMNS, touched

LONG = 1 << 16  # elements per result from which a split pays
SHORTEST_PART = 4096  # elements of one part
LONG_COLUMN = 1024  # elements of a column from which a split pays: a program reads it in few, dependent steps
SHORTEST_COLUMN = 64  # elements of one part of a column
SHORTEST_SQUARES = 512  # elements of one part of rows that are read in squares, both along and across them


def split_reductions(p: Program, device: Device, unsplit: frozenset[str] = frozenset()) -> Program:
    """Return `p` with every reduction of few, long rows replaced by partial results and their reduction.

    `unsplit`: buffers whose reductions stay as they are. Full reductions stay too: a flat kernel already runs them on
    all threads.
    """
    if device.parallelism < 2:
        return p
    splitter = _Splitter(p, device, dict(p.buffers))
    nodes: list[Node] = []
    for node in p.nodes:
        parts = splitter.split(node) if isinstance(node, Reduction) and node.out not in unsplit else None
        nodes += parts or [node]
    return replace(p, buffers=splitter.buffers, nodes=tuple(nodes))


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
    """Return whether results, not the elements that they reduce, are neighbours in memory, at least in one operand."""
    return ordered_vars(node)[-1] not in node.rdims or _reads_both_ways(node)


def _reads_both_ways(node: Reduction) -> bool:
    """Return whether one large operand is contiguous along the reduced loops, and another one across the results.

    A program then takes several results, and squares of both operands.
    """
    column = max(node.dims, key=ex.rank_of)
    loads = [(touched(index), index) for _, index in va.loads(node.value)]
    largest = max((elements for elements, _ in loads), default=0)
    indices = [index for elements, index in loads if elements * CACHED >= largest]
    along = [i for i in indices if any(ex.coefficient(i, v) == 1 for v in node.rdims)]
    across = [i for i in indices if ex.coefficient(i, column) == 1 and all(i is not other for other in along)]
    return bool(along) and bool(across)


def _cuts_on_gpu(node: Reduction, results: int, sizes: tuple[int, ...], device: Gpu) -> tuple[int, ...] | None:
    """Return into how many parts to cut each reduced loop, slow loops wholly first: one part for each program.

    A program takes one row, or a block of columns. Parts are equal where divisors give half as many as would fill the
    device. Else the last part of the loop is shorter.
    """
    columns, total = _has_columns(node), math.prod(sizes)
    programs = -(-results // ROWS_OF_COLUMNS) if columns else results
    squares = columns and _reads_both_ways(node)
    shortest = SHORTEST_SQUARES if squares else SHORTEST_COLUMN if columns else SHORTEST_PART
    target = -(-device.parallelism // programs)
    enough = device.sms if squares else device.parallelism // 2  # programs of squares have 16 warps
    if programs >= enough or total < (LONG_COLUMN if columns else LONG):
        return None
    cuts: list[int] = []
    for n in sizes:
        parts = math.prod(cuts)
        options = [
            c for c in range(1, min(n, 2 * target // parts) + 1) if n % c == 0 and total // (parts * c) >= shortest
        ]
        even = min(options, key=lambda c: abs(parts * c - target), default=1)
        uneven = _uneven_parts(n, min(-(-target // parts), total // (parts * shortest)))
        cuts.append(uneven if uneven >= 2 * even else even)
        if cuts[-1] != n:  # later loops are not cut
            break
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

    def value(self, op: str, of_row: Value) -> Value:
        """Return what the parts reduce by `op`: the value of the row, and the identity beyond the end of a loop."""
        value = of_row.substitute(self.env)
        inside = [va.apply("lt", va.index(position), va.const(n, torch.int64)) for position, n in self.ends]
        return va.masked(va.conjunction(*inside), value, va.identity(op, value.dtype)) if inside else value


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


@dataclass(frozen=True)
class _Split:
    """A reduction in two steps: `loops` cut its row, and `partial` holds the result of each part at `slot`.

    `dims`: the parallel loops of the first step.
    """

    node: Reduction
    loops: _CutLoops
    partial: Buffer
    dims: tuple[Atom, ...]
    slot: Index

    @property
    def part(self) -> Value:
        """Return the result of a part."""
        return va.load(self.partial.name, self.slot, self.partial.dtype)

    @property
    def in_part(self) -> Value:
        """Return what a part reduces if it reduces what the row does."""
        return self.loops.value(self.node.op, self.node.value)

    def steps(self, in_part: Value, combined: Value) -> list[Node]:
        """Return both steps: the reduction of `in_part` within the parts, and that of `combined` over the parts."""
        n = self.node
        return [
            Reduction(self.partial.name, self.dims, self.loops.inner, self.slot, n.op, in_part, n.origins),
            Reduction(n.out, n.dims, (self.loops.part,), n.index, n.op, combined, n.origins),
        ]


@dataclass
class _Splitter:
    """Splits reductions of a program in their order; `buffers` gains those of partial results."""

    program: Program
    device: Device
    buffers: dict[str, Buffer]
    extrema: dict[str, _Split] = field(default_factory=dict)  # maxima and minima in two steps, by their buffers

    def split(self, node: Reduction) -> list[Node] | None:
        """Return the two steps of a reduction; None where it stays whole."""
        if (steps := self._beside_extremum(node)) is not None:
            return steps
        if isinstance(self.device, Gpu):
            node = replace(node, rdims=_slowest_first(node))
        cuts = cuts_of(node, self.device)
        if cuts is None:
            return None
        split = self._in_two(node, _cut_loops(node, cuts))
        self.buffers[split.partial.name] = split.partial
        if node.op in ("max", "min"):
            self.extrema[node.out] = split
        return split.steps(split.in_part, split.part)

    def _in_two(self, node: Reduction, loops: _CutLoops) -> _Split:
        """Return the reduction in two steps."""
        results, parts = ex.prod(ex.size_of(v) for v in node.dims), ex.size_of(loops.part)
        out = self.buffers[node.out]
        # neighbouring columns stay neighbours where a GPU's program takes a block of them
        across = isinstance(self.device, Gpu) and _has_columns(node)
        sizes = (parts, results) if across else (results, parts)
        partial = Buffer(f"{node.out}_parts", out.dtype, sizes, (sizes[1], 1), out.device)
        row = ex.flatten([ex.size_of(v) for v in node.dims], [ex.ix(v) for v in node.dims])
        slot = ex.flatten(sizes, (ex.ix(loops.part), row) if across else (row, ex.ix(loops.part)))
        dims = (loops.part, *node.dims) if across else (*node.dims, loops.part)
        return _Split(node, loops, partial, dims, slot)

    def _beside_extremum(self, node: Reduction) -> list[Node] | None:
        """Return the two steps of a reduction that one pass over each part computes together with an extremum.

        Split alone, it would wait for the extremum of the whole row, and read its operand once more.
        """
        value = self._with_shared_point(node.value)
        for name, index in va.loads(value):
            best = self.extrema.get(name)
            if best is None or best.node.index is not index or not _same_loops(best.node, node):
                continue
            split = self._in_two(replace(node, dims=best.node.dims, rdims=best.node.rdims), best.loops)
            if (steps := _steps_beside(best, split, value)) is not None:
                self.buffers[split.partial.name] = split.partial
                return steps
        return None

    def _with_shared_point(self, value: Value) -> Value:
        """Return `value`, or what a pointwise node stores if `value` is its result and other nodes read it too."""
        if value.op != "load" or not self.extrema:
            return value
        name, index = value.attr
        node = self._shared_points.get(name)
        return node.value if node is not None and node.index is index else value

    @functools.cached_property
    def _shared_points(self) -> dict[str, Pointwise]:
        """Return the pointwise nodes whose results several nodes read, by buffer."""
        count = collections.Counter(b for n in self.program.nodes for b in set(reads(n)))
        return {n.out: n for n in self.program.nodes if isinstance(n, Pointwise) and count[n.out] > 1}


def _same_loops(a: Reduction, b: Reduction) -> bool:
    return {*a.dims} == {*b.dims} and {*a.rdims} == {*b.rdims}


def _steps_beside(best: _Split, split: _Split, value: Value) -> list[Node] | None:
    """Return the two steps of `split`, which reduces `value`, if one pass computes it together with `best`."""
    operand, at = best.node.value, (best.node.out, best.node.index)
    whole = va.load(*at, best.partial.dtype)
    if split.node.op == "sum" and best.node.op == "max" and is_exp_below(value, operand, at):
        in_part = va.apply("exp", va.apply("sub", best.in_part, best.part))
        return split.steps(in_part, combined_sum(split.part, best.part, whole))
    if split.node.op == "min" and position(value, operand, at) is not None:
        of_part = va.rewrite(value, on_load=lambda x: best.part if x.attr == at else None)
        in_part = best.loops.value("min", of_part)
        return split.steps(in_part, combined_position(split.part, best.part, whole))
    return None
