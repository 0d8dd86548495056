"""Map the loops of one node onto a kernel of R rows.

A kernel runs its rows in parallel; the variable `o` in [0, R) names the row. The other loops of the node are its inner
loops, which one thread runs within the row.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Loop, Pointwise, Reduction, Scan, Scatter
from ..ir.value import Value

ROW = "o"
CACHED_MAPPINGS = 4096  # fusion tries a node with every kernel that it may join
VECTOR = 8  # columns from which sums side by side fill a vector
LEAST_COLUMNS = 64  # fewest neighbouring elements that a row of a scan or scatter holds together: whole cache lines
MOST_BLOCKS = 64  # rows into which a loop over neighbouring elements is cut
# Results and rows of a sum whose float64 accumulators, one of each thread for each result, would fill 256 kB of cache.
MANY_RESULTS, FEW_ROWS = 1 << 15, 64
ENOUGH_ROWS = 16  # rows from which a scan, a scatter or a sum needs no more of them
MOST_REORDERED = 6  # loops of a node whose orders are all tried
UNKNOWN_STRIDE = 1 << 62  # sorts a loop without a constant stride as the slowest


class Kind(enum.Enum):
    """The relation of a mapped node's iterations to the rows of its kernel."""

    POINT = "point"  # every (row, inner) point is computed once
    IN_ROW = "in_row"  # a reduction that finishes within its row
    CROSS_ROW = "cross_row"  # a reduction over rows: threads hold partial results, combined after the last row
    SCAN = "scan"  # a running result along one inner loop, one for each point of the other loops
    SCATTER = "scatter"  # rows write disjoint parts of the buffer; within a row data-dependent stores run in order


@dataclass(frozen=True)
class MappedNode:
    """A node rewritten onto kernel variables: `row`, then the `inner` loops from slow to fast.

    `reduced` holds the inner loops that a reduction sums over, `scanned` those that a scan runs along.
    """

    node: Loop
    kind: Kind
    row: Atom
    inner: tuple[Atom, ...]
    reduced: frozenset[Atom]
    index: Index
    value: Value
    scanned: frozenset[Atom] = frozenset()

    @functools.cached_property
    def sizes(self) -> tuple[Index, ...]:
        """Return the extents of the inner loops."""
        return tuple(ex.size_of(v) for v in self.inner)

    @functools.cached_property
    def points(self) -> Index:
        """Return the number of points of one row."""
        return ex.prod(self.sizes)

    @functools.cached_property
    def parallel(self) -> tuple[Atom, ...]:
        """Return the inner loops over results: those that no reduction sums over."""
        return tuple(v for v in self.inner if v not in self.reduced)

    @functools.cached_property
    def results(self) -> Index:
        """Return the number of results of one row."""
        return ex.prod(ex.size_of(v) for v in self.parallel)


@dataclass(frozen=True)
class Refusal:
    """The `reason` why the scheduler does not do something."""

    reason: str


class RowCut(NamedTuple):
    """Loops cut at the rows of a kernel: `outer` are the row, `inner` run in it, `env` rewrites loops cut in two."""

    outer: list[Atom]
    inner: list[Atom]
    env: dict[Atom, Index]

    def origin(self) -> dict[Atom, Atom]:
        """Return the loop of the node from which each loop comes."""
        split = {part: v for v, e in self.env.items() for part in ex.vars_of(e)}
        return {v: split.get(v, v) for v in (*self.outer, *self.inner)}


NO_CUT = Refusal("its loops cannot be cut into the kernel's rows")


# --- loops of a node -------------------------------------------------------------------------------------------------


def ordered_vars(node: Loop) -> list[Atom]:
    """Return the loop variables from slow to fast: parallel loops first where the fastest is reduced."""
    if isinstance(node, Pointwise):
        return list(node.dims)
    if isinstance(node, (Scan, Scatter)):
        free = free_dims(node)
        return [*free, *(v for v in (*node.dims, *rdims(node)) if v not in free)]
    every = _by_number((*node.dims, *node.rdims))
    if every and every[-1] in node.rdims:
        return [*node.dims, *node.rdims]
    return every


def _by_number(loops: Sequence[Atom]) -> list[Atom]:
    """Sort `d0, d1, ...` by number, the order of memory."""
    return sorted(loops, key=ex.rank_of)


def rdims(node: Loop) -> tuple[Atom, ...]:
    """Return the loops that a reduction sums over or a scan runs along."""
    return node.rdims if isinstance(node, (Reduction, Scan)) else ()


def free_dims(node: Scan | Scatter) -> dict[Atom, int]:
    """Return the loops whose iterations touch disjoint elements, with their strides, slowest in memory first.

    For a scan, these are all loops but the one that it runs along. For a scatter, these are the loops that move the
    stored position by a multiple that no other term of the position has. These loops suffice: the node stores into a
    dense buffer of its own, whose dimensions differ in stride. An index read from data stays below the size of its
    dimension.
    """
    strides = {v: _stride(node.index, v) for v in node.dims} if isinstance(node, Scan) else _scatter_strides(node)
    return dict(sorted(strides.items(), key=lambda item: -item[1]))


def _stride(index: Index, v: Atom) -> int:
    c = ex.coefficient(index, v)
    return c if isinstance(c, int) else UNKNOWN_STRIDE


def _scatter_strides(node: Scatter) -> dict[Atom, int]:
    if isinstance(node.index, int):
        return {}
    if any(len(m) > 1 or not isinstance(m[0], (ex.Var, ex.Lookup)) for m, _ in node.index.terms):
        return {}
    strides = [c for _, c in node.index.terms]
    return {m[0]: c for m, c in node.index.terms if isinstance(m[0], ex.Var) and c > 0 and strides.count(c) == 1}


def has_columns(node: Scan | Scatter) -> bool:
    """Return whether results, not the elements along which the node runs, are neighbours in memory."""
    return _columns(node) is not None


def _columns(node: Scan | Scatter) -> Atom | None:
    """Return the free loop over neighbouring elements, if there is one."""
    return next((v for v, stride in free_dims(node).items() if stride == 1), None)


# --- row counts ------------------------------------------------------------------------------------------------------


def natural_rows(node: Loop, row_per_result: bool = False) -> list[Index | None]:
    """Return the row counts to try when `node` opens a kernel, best first; None is a flat kernel without rows.

    `row_per_result`: one row for every result, which is as many rows as possible.
    """
    if isinstance(node, Pointwise):
        return [None]
    if row_per_result and (isinstance(node, Scatter) or not node.dims):
        return [None, 1]
    results = ex.prod(ex.size_of(v) for v in node.dims)
    if row_per_result:
        return [results]
    if isinstance(node, (Scan, Scatter)):
        return _ordered_rows(node)
    order = ordered_vars(node)
    if not node.dims:
        return [None, 1]
    if order[-1] in node.rdims:
        return [results]
    leading_reduced = _leading(order, frozenset(node.rdims))
    leading_parallel = _leading(order, frozenset(node.dims))
    if leading_reduced == 1:
        return [leading_parallel, results, 1]
    return [*_rows_of_results(node, order, leading_reduced, results), leading_reduced, results, 1]


def _rows_of_results(node: Reduction, order: Sequence[Atom], reduced: Index, results: Index) -> list[Index | None]:
    """Return the rows of a sum of a few rows of many columns: parts of its results, which each thread completes.

    Rows of the source would need accumulators of all results for each thread, beyond a cache.
    """
    columns = ex.size_of(order[-1])
    if not all(isinstance(n, int) for n in (reduced, results, columns)):
        return []
    assert isinstance(reduced, int)
    assert isinstance(results, int)
    assert isinstance(columns, int)
    if results < MANY_RESULTS or reduced > FEW_ROWS:
        return []
    rows = results // columns
    return [rows] if rows >= ENOUGH_ROWS else []


def _ordered_rows(node: Scan | Scatter) -> list[Index | None]:
    free, fast = free_dims(node), _columns(node)
    lead = ex.prod(ex.size_of(v) for v in free if v is not fast)
    if fast is None:
        return [lead, 1]
    enough = isinstance(lead, int) and lead >= ENOUGH_ROWS
    return [lead if enough else ex.mul(lead, _blocks(ex.size_of(fast))), lead, 1]


def _blocks(n: Index) -> int:
    """Return into how many rows to cut a loop over `n` neighbours: as many as leave LEAST_COLUMNS elements each."""
    if not isinstance(n, int):
        return 1
    return max(k for k in range(1, MOST_BLOCKS + 1) if n % k == 0 and (k == 1 or n // k >= LEAST_COLUMNS))


def _leading(order: Sequence[Atom], among: frozenset[Atom]) -> Index:
    """Return the number of points of the slowest loops that are all in `among`."""
    return ex.prod(ex.size_of(v) for v in itertools.takewhile(lambda v: v in among, order))


# --- mapping ---------------------------------------------------------------------------------------------------------


def fit(node: Loop, rows: Index) -> MappedNode | Refusal:
    """Map `node` onto a kernel of `rows` rows, in memory order where possible."""
    candidates = mappings(node, rows)
    return candidates if isinstance(candidates, Refusal) else candidates[0]


@functools.lru_cache(maxsize=CACHED_MAPPINGS)
def mappings(node: Loop, rows: Index, any_order: bool = False) -> tuple[MappedNode, ...] | Refusal:
    """Return every mapping of `node` onto a kernel of `rows` rows, the one in memory order first.

    `any_order`: rows may also be loops that are not the slowest in memory.
    """
    if isinstance(node, (Scan, Scatter)):
        ordered = cut_ordered(node, ordered_vars(node), rows)
        return ordered if isinstance(ordered, Refusal) else (ordered,)
    orders = _reduction_orders(node) if isinstance(node, Reduction) and node.rdims else [ordered_vars(node)]
    if any_order and isinstance(node, Pointwise):
        orders += _moved_to_front(orders[0], rows)
    reason = NO_CUT
    candidates: list[MappedNode] = []
    for order in orders:
        mapped = _map_cut(node, order, rows, [q.kind for q in candidates])
        if isinstance(mapped, Refusal):
            reason = mapped if mapped is not NO_CUT else reason
        elif mapped is not None:
            candidates.append(mapped)
    return tuple(candidates) or reason


def _reduction_orders(node: Reduction) -> list[list[Atom]]:
    """Return the orders of a reduction's loops to try, best first."""
    order = ordered_vars(node)
    parallel_first, reduced_first = [*node.dims, *node.rdims], [*node.rdims, *node.dims]
    by_number = _by_number(order)
    if not node.dims or order[-1] in node.rdims:
        return [parallel_first, order, by_number, reduced_first]
    # the results are columns, so that rows of the source are rows of the kernel
    if _known_below(_neighbours(node, order), VECTOR):
        return [reduced_first, parallel_first, order, by_number, reduced_first]
    if order[0] not in node.rdims:  # the slowest loop already gives rows of both source and results
        return [order, reduced_first, parallel_first, by_number]
    # sums of neighbouring columns side by side read contiguous memory
    columns_last = [*(v for v in order[:-1] if v in node.dims), *node.rdims, order[-1]]
    return [reduced_first, order, columns_last, parallel_first, by_number]


def _neighbours(node: Reduction, order: Sequence[Atom]) -> Index:
    """Return the number of results that are neighbours in memory and in every operand, along one loop or several.

    `order`: the loops from slow to fast; the fastest is not reduced.
    """
    indices = [node.index, *(index for _, index in va.loads(node.value))]
    last, count = order[-1], ex.size_of(order[-1])
    for v in reversed(order[:-1]):
        strides = [(ex.coefficient(i, v), ex.coefficient(i, last)) for i in indices]
        if v in node.rdims or any(a is None or b is None or a != ex.mul(b, count) for a, b in strides):
            break
        count = ex.mul(count, ex.size_of(v))
    return count


def _map_cut(
    node: Pointwise | Reduction, order: Sequence[Atom], rows: Index, mapped_as: Collection[Kind]
) -> MappedNode | Refusal | None:
    """Map `node` with its loops in `order`.

    Return None where a full reduction would have a single row of one result. Return None, too, where a better order has
    mapped the reduction as the same kind before (`mapped_as`).
    """
    cut = cut_rows(order, rows)
    if cut is None:
        return NO_CUT
    origin, reduced = cut.origin(), frozenset(rdims(node))
    rows_reduced = [origin[v] in reduced for v in cut.outer]
    if any(rows_reduced) and not all(rows_reduced):
        return Refusal("its rows mix parallel and reduced dimensions")
    if isinstance(node, Reduction) and cut.outer and not any(rows_reduced) and rows == 1 and not node.dims:
        return None
    kind = Kind.CROSS_ROW if any(rows_reduced) else Kind.IN_ROW if reduced else Kind.POINT
    if kind is not Kind.POINT and kind in mapped_as:
        return None
    return _mapped(node, kind, rows, cut, frozenset(v for v in cut.inner if origin[v] in reduced))


def _known_below(n: Index, limit: int) -> bool:
    return isinstance(n, int) and n < limit


def cut_points(node: Pointwise, order: Sequence[Atom], rows: Index) -> MappedNode | Refusal:
    """Map `node` onto `rows` rows with its loops in `order`, which need not be the order of memory."""
    cut = cut_rows(order, rows)
    return NO_CUT if cut is None else _mapped(node, Kind.POINT, rows, cut, frozenset())


def _moved_to_front(order: list[Atom], rows: Index) -> list[list[Atom]]:
    """Return the orders in which some loops with `rows` points in all come first; whole loops before cut ones."""
    if len(order) > MOST_REORDERED:
        return []
    whole, cut = [], []
    for count in range(1, len(order)):
        for front in itertools.combinations(order, count):
            moved = [*front, *(v for v in order if v not in front)]
            left = ex.exact_div(rows, ex.prod(ex.size_of(v) for v in front[:-1]))
            if moved == order or left is None or left == 1:
                continue
            if left == ex.size_of(front[-1]):
                whole.append(moved)
            elif ex.exact_div(ex.size_of(front[-1]), left) is not None:
                cut.append(moved)
    return whole + cut


def cut_ordered(node: Scan | Scatter, order: Sequence[Atom], rows: Index) -> MappedNode | Refusal:
    """Map a scan or scatter onto `rows` rows with its loops in `order`.

    Only free loops become rows, and the loop over neighbours runs innermost.
    """
    cut = cut_rows(order, rows)
    if cut is None:
        return NO_CUT
    free, fast, origin = free_dims(node), _columns(node), cut.origin()
    if any(origin[v] not in free for v in cut.outer):
        return Refusal("its loops must run in order")
    inner = sorted(cut.inner, key=lambda v: 2 if origin[v] is fast else 0 if origin[v] in free else 1)
    kind = Kind.SCAN if isinstance(node, Scan) else Kind.SCATTER
    mapped = _mapped(node, kind, rows, cut._replace(inner=inner), frozenset())
    return replace(mapped, scanned=frozenset(v for v in inner if origin[v] in rdims(node)))


def _mapped(node: Loop, kind: Kind, rows: Index, cut: RowCut, reduced: frozenset[Atom]) -> MappedNode:
    """Write the node's index and value by the row variable and the inner loops."""
    row = ex.var(ROW, rows)
    to_row = dict(zip(cut.outer, ex.unflatten(ex.ix(row), tuple(ex.size_of(v) for v in cut.outer)), strict=True))
    env = {v: ex.substitute(e, to_row) for v, e in cut.env.items()} | to_row
    env = {v: e for v, e in env.items() if v not in cut.inner}
    index, value = ex.substitute(node.index, env), node.value.substitute(env)
    return MappedNode(node, kind, row, tuple(cut.inner), reduced, index, value)


def cut_rows(order: Sequence[Atom], rows: Index) -> RowCut | None:
    """Cut loops into outer ones of exactly `rows` points and the rest; a loop may be cut in two. None if impossible."""
    cut = RowCut([], [], {})
    left = rows
    for v in order:
        n = ex.size_of(v)
        if left == 1:
            cut.inner.append(v)
        elif (quotient := ex.exact_div(left, n)) is not None:
            cut.outer.append(v)
            left = quotient
        elif (low_size := ex.exact_div(n, left)) is not None:
            high, low = ex.var(f"{v.args[0]}h", left), ex.var(f"{v.args[0]}l", low_size)
            cut.env[v] = ex.add(ex.mul(ex.ix(high), low_size), ex.ix(low))
            cut.outer.append(high)
            cut.inner.append(low)
            left = 1
        else:
            return None
    return cut if left == 1 else None
