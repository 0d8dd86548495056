"""Placement: how one loop node sits in a kernel of R rows.

A kernel runs its rows in parallel; a row is named by one variable `o` in [0, R). What remains of a node's
iteration space is its inner part, run inside the row by one thread:

    point   every (row, inner) point is computed once
    inner   a reduction finished within its row
    outer   a reduction over rows: each thread accumulates, the results are combined after the last row
    scan    a running result along one inner loop, one per point of the loops around and inside it
    scatter rows touch disjoint parts of the buffer; within a row the data-dependent stores stay in order
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Loop, Pointwise, Reduction, Scan, Scatter
from ..ir.value import Value

ROW = "o"
ASKED = 4096  # answers that are kept: a node is tried with every kernel that it may join
VECTOR = 8  # columns from which sums side by side pay
COLUMNS = 64  # fewest neighbouring elements that a row of a scan or scatter keeps together: whole cache lines


@dataclass(frozen=True)
class MappedNode:
    """A node rewritten onto kernel variables: `row`, then `inner` (slow to fast).

    `reduced` is a subset of both, `scanned` those inner loops that a scan runs along.
    """

    node: Loop
    kind: str
    row: Atom
    inner: tuple[Atom, ...]
    reduced: frozenset[Atom]
    index: Index
    value: Value
    scanned: frozenset[Atom] = frozenset()

    @property
    def sizes(self) -> tuple[Index, ...]:
        return tuple(ex.size_of(v) for v in self.inner)


@dataclass(frozen=True)
class Refusal:
    """A refusal with its reason."""

    reason: str


def ordered_vars(node: Loop) -> list[Atom]:
    """Loop variables from slow to fast: kept ones first when the fastest is reduced."""
    if isinstance(node, Pointwise):
        return list(node.dims)
    if isinstance(node, (Scan, Scatter)):
        free = free_dims(node)
        return [*free, *(v for v in (*node.dims, *rdims(node)) if v not in free)]
    every = sorted((*node.dims, *node.rdims), key=ex.rank_of)
    if every and every[-1] in node.rdims:
        return [*node.dims, *node.rdims]
    return every


def rdims(node: Loop) -> tuple[Atom, ...]:
    return node.rdims if isinstance(node, (Reduction, Scan)) else ()


def free_dims(node: Scan | Scatter) -> dict[Atom, int]:
    """Loops whose iterations never touch each other's elements, with their steps, slowest in memory first.

    Every loop of a scan but the one that it runs along. Of a scatter those that move the stored position by a plain
    multiple which no other part of the position has: the node stores into a dense buffer of its own, whose
    dimensions differ in their strides, and an index from data stays below the size of its dimension.
    """
    steps = {v: _step(node.index, v) for v in node.dims} if isinstance(node, Scan) else _scatter_steps(node)
    return dict(sorted(steps.items(), key=lambda item: -item[1]))


def _step(index: Index, v: Atom) -> int:
    c = ex.coefficient(index, v)
    return c if isinstance(c, int) else 1 << 62


def _scatter_steps(node: Scatter) -> dict[Atom, int]:
    if isinstance(node.index, int):
        return {}
    if any(len(m) > 1 or m[0].kind not in ("var", "lookup") for m, _ in node.index.terms):
        return {}
    steps = [c for _, c in node.index.terms]
    return {m[0]: c for m, c in node.index.terms if m[0].kind == "var" and c > 0 and steps.count(c) == 1}


def _columns(node: Scan | Scatter) -> Atom | None:
    """The free loop over neighbouring elements, if there is one."""
    return next((v for v, step in free_dims(node).items() if step == 1), None)


def _blocks(n: Index) -> int:
    """Into how many rows a loop over `n` neighbours is cut: as many as leave COLUMNS each, at most 64."""
    if not isinstance(n, int):
        return 1
    return max(k for k in range(1, 65) if n % k == 0 and (k == 1 or n // k >= COLUMNS))


def _ordered_rows(node: Scan | Scatter) -> list[Index | None]:
    free, fast = free_dims(node), _columns(node)
    lead = ex.prod(ex.size_of(v) for v in free if v is not fast)
    if fast is None:
        return [lead, 1]
    enough = isinstance(lead, int) and lead >= 16
    return [lead if enough else ex.mul(lead, _blocks(ex.size_of(fast))), lead, 1]


def natural_rows(node: Loop, kept: bool = False) -> list[Index | None]:
    """Row counts to try when `node` opens a kernel, best first; None: a flat kernel without rows.

    `kept`: one row for every result, the most rows that there can be.
    """
    if isinstance(node, Pointwise):
        return [None]
    if kept and (isinstance(node, Scatter) or not node.dims):
        return [None, 1]
    if kept:
        return [ex.prod(ex.size_of(v) for v in node.dims)]
    if isinstance(node, (Scan, Scatter)):
        return _ordered_rows(node)
    results = ex.prod(ex.size_of(v) for v in node.dims)
    order = ordered_vars(node)
    if not node.dims:
        return [None, 1]
    if order[-1] in node.rdims:
        return [results]
    lead_reduced = _leading(order, frozenset(node.rdims))
    lead_kept = _leading(order, frozenset(node.dims))
    return [lead_reduced, results, 1] if lead_reduced != 1 else [lead_kept, results, 1]


def _leading(order: Sequence[Atom], among: frozenset[Atom]) -> Index:
    """Points of the slowest loops that are all `among` the given ones."""
    return ex.prod(ex.size_of(v) for v in itertools.takewhile(lambda v: v in among, order))


def fit(node: Loop, rows: Index) -> MappedNode | Refusal:
    """Place `node` in a kernel of `rows` rows, or say why it cannot be."""
    found = mappings(node, rows)
    return found if isinstance(found, Refusal) else found[0]


@functools.lru_cache(maxsize=ASKED)
def mappings(node: Loop, rows: Index, any_order: bool = False) -> tuple[MappedNode, ...] | Refusal:
    """Every way to place `node` in a kernel of `rows` rows, the one that follows memory order first.

    `any_order`: rows may also be loops that are not the slowest in memory.
    """
    if isinstance(node, (Scan, Scatter)):
        mapped = _fit_ordered(node, rows)
        return mapped if isinstance(mapped, Refusal) else (mapped,)
    order = ordered_vars(node)
    reduced = frozenset(rdims(node))
    tries = [order]
    if reduced and isinstance(node, Reduction):
        kept_first, reduced_first = [*node.dims, *node.rdims], [*node.rdims, *node.dims]
        by_name = sorted(order, key=ex.rank_of)
        tries = [kept_first, order, by_name, reduced_first]
        if node.dims and order[-1] not in reduced:  # columns: rows of the source are rows of the kernel
            wide = not _known_below(ex.size_of(order[-1]), VECTOR)
            # sums of neighbouring columns side by side read memory as it lies
            tries = [reduced_first, order, kept_first, by_name] if wide else [reduced_first, *tries]
            if wide and order[0] not in reduced:  # rows of both are there already
                tries = [order, reduced_first, kept_first, by_name]
    if any_order and isinstance(node, Pointwise):
        tries += _moved_to_front(order, rows)
    reason = Refusal("no way to cut its loops into the kernel's rows")
    found: list[MappedNode] = []
    for attempt in tries:
        cut = cut_rows(attempt, rows)
        if cut is None:
            continue
        outer, inner, env = cut
        origin = {v: next((w for w, e in env.items() if v in ex.vars_of(e)), v) for v in (*outer, *inner)}
        outer_reduced = [origin[v] in reduced for v in outer]
        inner_reduced = frozenset(v for v in inner if origin[v] in reduced)
        if any(outer_reduced) and not (isinstance(node, Reduction) and all(outer_reduced)):
            reason = Refusal("its rows mix kept and reduced dimensions")
            continue
        if isinstance(node, Reduction) and outer and not any(outer_reduced) and rows == 1 and not node.dims:
            continue
        kind = "outer" if any(outer_reduced) else "inner" if reduced else "point"
        mapped = _placed(node, kind, rows, outer, inner, inner_reduced, env)
        if mapped.kind == "point" or all(q.kind != mapped.kind for q in found):
            found.append(mapped)
    return tuple(found) or reason


def _known_below(n: Index, limit: int) -> bool:
    return isinstance(n, int) and n < limit


def cut_points(node: Pointwise, order: Sequence[Atom], rows: Index) -> MappedNode | Refusal:
    """`node` in a kernel of `rows` rows, its loops taken in the given order, which need not be that of memory."""
    cut = cut_rows(order, rows)
    if cut is None:
        return Refusal("no way to cut its loops into the kernel's rows")
    outer, inner, env = cut
    return _placed(node, "point", rows, outer, inner, frozenset(), env)


def _moved_to_front(order: list[Atom], rows: Index) -> list[list[Atom]]:
    """Orders in which neighbouring loops of just `rows` points together come first."""
    return [
        [*order[start:end], *order[:start], *order[end:]]
        for start in range(1, len(order))
        for end in range(start + 1, len(order) + 1)
        if ex.prod(ex.size_of(v) for v in order[start:end]) == rows
    ]


def _fit_ordered(node: Scan | Scatter, rows: Index) -> MappedNode | Refusal:
    """Rows are free loops only; what is left of the loop over neighbours runs innermost."""
    cut = cut_rows(ordered_vars(node), rows)
    if cut is None:
        return Refusal("no way to cut its loops into the kernel's rows")
    outer, inner, env = cut
    free, fast = free_dims(node), _columns(node)
    origin = {w: v for v, e in env.items() for w in ex.vars_of(e)}
    origin |= {v: v for v in (*outer, *inner) if v not in origin}
    if any(origin[v] not in free for v in outer):
        return Refusal("its loops must run in order")
    ordered = sorted(inner, key=lambda v: 2 if origin[v] is fast else 0 if origin[v] in free else 1)
    kind = "scan" if isinstance(node, Scan) else "scatter"
    mapped = _placed(node, kind, rows, outer, ordered, frozenset(), env)
    return replace(mapped, scanned=frozenset(v for v in ordered if origin[v] in rdims(node)))


def _placed(
    node: Loop,
    kind: str,
    rows: Index,
    outer: list[Atom],
    inner: list[Atom],
    reduced: frozenset[Atom],
    env: dict[Atom, Index],
) -> MappedNode:
    row = ex.var(ROW, rows)
    to_row = dict(zip(outer, ex.unflatten(ex.ix(row), tuple(ex.size_of(v) for v in outer)), strict=True))
    full = {v: ex.substitute(e, to_row) for v, e in env.items()} | to_row
    full = {v: e for v, e in full.items() if v not in inner}
    return MappedNode(
        node,
        kind,
        row,
        tuple(inner),
        reduced,
        ex.substitute(node.index, full),
        node.value.substitute(full),
    )


def cut_rows(order: Sequence[Atom], rows: Index) -> tuple[list[Atom], list[Atom], dict[Atom, Index]] | None:
    """Split loops into an outer part of exactly `rows` points and the rest; a loop may be cut in two."""
    outer: list[Atom] = []
    inner: list[Atom] = []
    env: dict[Atom, Index] = {}
    left = rows
    for v in order:
        n = ex.size_of(v)
        if left == 1:
            inner.append(v)
        elif (q := ex.exact_div(left, n)) is not None:
            outer.append(v)
            left = q
        elif (k := ex.exact_div(n, left)) is not None:
            high, low = ex.var(f"{v.args[0]}h", left), ex.var(f"{v.args[0]}l", k)
            env[v] = ex.add(ex.mul(ex.ix(high), k), ex.ix(low))
            outer.append(high)
            inner.append(low)
            left = 1
        else:
            return None
    return (outer, inner, env) if left == 1 else None


def common_refinement(chains: Sequence[tuple[Index, ...]]) -> tuple[Index, ...] | None:
    """The coarsest chain of sizes of which every given chain is a merge; None when they cross."""
    rest = [[n for n in c if n != 1] for c in chains]
    out: list[Index] = []
    while any(rest):
        if not all(rest):
            return None
        last = [c[-1] for c in rest]
        step = next((n for n in last if all(ex.exact_div(m, n) is not None for m in last)), None)
        if step is None:
            return None
        out.append(step)
        for c in rest:
            q = ex.exact_div(c.pop(), step)
            assert q is not None
            if q != 1:
                c.append(q)
    return tuple(reversed(out))


@functools.lru_cache(maxsize=ASKED)
def split_loops(p: MappedNode, chain: tuple[Index, ...]) -> MappedNode:
    """Split the inner loops of `p` to exactly `chain`, named i0, i1, ...; `chain` refines `p.sizes`."""
    fresh = [ex.var(f"i{k}", n) for k, n in enumerate(chain)]
    env: dict[Atom, Index] = {}
    new: dict[Atom, list[Atom]] = {}
    at = len(fresh)
    for v in reversed(p.inner):
        if ex.size_of(v) == 1:
            env[v] = 0
            continue
        parts: list[Atom] = []
        size: Index = 1
        while size != ex.size_of(v):
            at -= 1
            parts.insert(0, fresh[at])
            size = ex.mul(size, ex.size_of(fresh[at]))
        env[v] = ex.flatten([ex.size_of(x) for x in parts], [ex.ix(x) for x in parts])
        new[v] = parts
    reduced, scanned = (frozenset(w for v in old for w in new.get(v, ())) for old in (p.reduced, p.scanned))
    live = {v: e for v, e in env.items() if ex.ix(v) is not e}
    index, value = ex.substitute(p.index, live), p.value.substitute(live)
    return replace(p, inner=tuple(fresh), reduced=reduced, index=index, value=value, scanned=scanned)


def mergeable(p: MappedNode, k: int) -> bool:
    """Whether inner loops k and k+1 of `p` can run as one: every index is linear with matching steps."""
    a, b = p.inner[k], p.inner[k + 1]
    if (a in p.reduced) != (b in p.reduced) or p.kind == "scan":
        return False
    trees = [v for tree in (p.value, *ex.lookups(p.index)) for v in va.walk(tree)]
    seen = [p.index, *(v.attr[1] for v in trees if v.op == "load")]
    seen += [v.attr for v in trees if v.op in ("index", "wrap_index")]
    for index in seen:
        ca, cb = ex.coefficient(index, a), ex.coefficient(index, b)
        if ca is None or cb is None or ca != ex.mul(cb, ex.size_of(b)):
            return False
    return True


def merged(p: MappedNode, k: int) -> MappedNode:
    """Inner loops k and k+1 as one loop; the caller has checked `mergeable`."""
    a, b = p.inner[k], p.inner[k + 1]
    one = ex.var(f"m{k}", ex.mul(ex.size_of(a), ex.size_of(b)))
    env: dict[Atom, Index] = {a: 0, b: ex.ix(one)}
    inner = (*p.inner[:k], one, *p.inner[k + 2 :])
    reduced = (p.reduced - {a, b}) | ({one} if a in p.reduced else set())
    index, value = ex.substitute(p.index, env), p.value.substitute(env)
    return replace(p, inner=inner, reduced=reduced, index=index, value=value)
