"""Placement: how one loop node sits in a kernel of R rows.

A kernel runs its rows in parallel; a row is named by one variable `o` in [0, R). What remains of a node's
iteration space is its inner part, run inside the row by one thread:

    point   every (row, inner) point is computed once
    inner   a reduction finished within its row
    outer   a reduction over rows: each thread accumulates, the results are combined after the last row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Loop, Pointwise, Reduction, Scan, Scatter
from ..ir.value import Value

ROW = "o"


@dataclass(frozen=True)
class Placed:
    """A node rewritten onto kernel variables: `row`, then `inner` (slow to fast); `reduced` is a subset of both."""

    node: Loop
    kind: str
    row: Atom
    inner: tuple[Atom, ...]
    reduced: frozenset[Atom]
    index: Index
    value: Value

    @property
    def sizes(self) -> tuple[Index, ...]:
        return tuple(v.args[1] for v in self.inner)


@dataclass(frozen=True)
class No:
    """A refusal with its reason."""

    reason: str


def ordered_vars(node: Loop) -> list[Atom]:
    """Loop variables from slow to fast: kept ones first when the fastest is reduced."""
    if isinstance(node, (Pointwise, Scatter)):
        return list(node.dims)
    if isinstance(node, Scan):
        return [*node.dims, *node.rdims]
    every = sorted((*node.dims, *node.rdims), key=lambda v: int(v.args[0][1:]))
    if every and every[-1] in node.rdims:
        return [*node.dims, *node.rdims]
    return every


def natural_rows(node: Loop) -> list[Index | None]:
    """Row counts to try when `node` opens a kernel, best first; None: a flat kernel without rows."""
    if isinstance(node, Pointwise):
        return [None]
    if isinstance(node, Scatter):
        return [1]
    kept = ex.prod(v.args[1] for v in node.dims)
    if isinstance(node, Scan):
        return [kept]
    order = ordered_vars(node)
    if not node.dims:
        return [None, 1]
    if order[-1] in node.rdims:
        return [kept]
    lead_reduced: Index = 1
    for v in order:
        if v not in node.rdims:
            break
        lead_reduced = ex.mul(lead_reduced, v.args[1])
    lead_kept: Index = 1
    for v in order:
        if v in node.rdims:
            break
        lead_kept = ex.mul(lead_kept, v.args[1])
    return [lead_reduced, kept, 1] if lead_reduced != 1 else [lead_kept, kept, 1]


def fit(node: Loop, rows: Index) -> Placed | No:
    """Place `node` in a kernel of `rows` rows, or say why it cannot be."""
    order = ordered_vars(node)
    reduced = frozenset(() if isinstance(node, (Pointwise, Scatter)) else node.rdims)
    tries = [order]
    if reduced and isinstance(node, Reduction):
        tries = [[*node.dims, *node.rdims]] + [order, sorted(order, key=lambda v: int(v.args[0][1:]))]
    reason = No("no way to cut its loops into the kernel's rows")
    for attempt in tries:
        cut = cut_rows(attempt, rows)
        if cut is None:
            continue
        outer, inner, env = cut
        origin = {v: next((w for w, e in env.items() if v in ex.vars_of(e)), v) for v in (*outer, *inner)}
        outer_reduced = [origin[v] in reduced for v in outer]
        inner_reduced = frozenset(v for v in inner if origin[v] in reduced)
        if any(outer_reduced) and not (isinstance(node, Reduction) and all(outer_reduced)):
            reason = No("its rows mix kept and reduced dimensions")
            continue
        if any(outer_reduced) and node.op.startswith("arg"):  # type: ignore[union-attr]
            reason = No("the position of an extremum is not combined across rows")
            continue
        if isinstance(node, Reduction) and outer and not any(outer_reduced) and rows == 1 and not node.dims:
            continue
        kind = "outer" if any(outer_reduced) else "inner" if reduced else "point"
        if isinstance(node, Scan):
            if any(outer_reduced) or not inner or origin[inner[-1]] not in reduced:
                continue
            kind, inner_reduced = "scan", frozenset()
        return _placed(node, kind, rows, outer, inner, inner_reduced, env)
    return reason


def _placed(
    node: Loop,
    kind: str,
    rows: Index,
    outer: list[Atom],
    inner: list[Atom],
    reduced: frozenset[Atom],
    env: dict[Atom, Index],
) -> Placed:
    row = ex.var(ROW, rows)
    to_row = dict(zip(outer, ex.unflatten(ex.ix(row), tuple(v.args[1] for v in outer)), strict=True))
    full = {v: ex.substitute(e, to_row) for v, e in env.items()} | to_row
    full = {v: e for v, e in full.items() if v not in inner}
    return Placed(
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
        n = v.args[1]
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


def refine(chains: Sequence[tuple[Index, ...]]) -> tuple[Index, ...] | None:
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


def rechain(p: Placed, chain: tuple[Index, ...]) -> Placed:
    """Split the inner loops of `p` to exactly `chain`, named i0, i1, ...; `chain` refines `p.sizes`."""
    fresh = [ex.var(f"i{k}", n) for k, n in enumerate(chain)]
    env: dict[Atom, Index] = {}
    reduced = set()
    at = len(fresh)
    for v in reversed(p.inner):
        if v.args[1] == 1:
            env[v] = 0
            continue
        parts: list[Atom] = []
        size: Index = 1
        while size != v.args[1]:
            at -= 1
            parts.insert(0, fresh[at])
            size = ex.mul(size, fresh[at].args[1])
        env[v] = ex.flatten([x.args[1] for x in parts], [ex.ix(x) for x in parts])
        if v in p.reduced:
            reduced.update(parts)
    live = {v: e for v, e in env.items() if ex.ix(v) is not e}
    return Placed(
        p.node, p.kind, p.row, tuple(fresh), frozenset(reduced), ex.substitute(p.index, live), p.value.substitute(live)
    )


def mergeable(p: Placed, k: int) -> bool:
    """Whether inner loops k and k+1 of `p` can run as one: every index is linear with matching steps."""
    a, b = p.inner[k], p.inner[k + 1]
    if (a in p.reduced) != (b in p.reduced) or p.kind == "scan":
        return False
    seen = [p.index] + [i for _, i in va.loads(p.value)]
    seen += [v.attr for v in va.walk(p.value) if v.op in ("index", "wrap_index")]
    for index in seen:
        ca, cb = ex.coefficient(index, a), ex.coefficient(index, b)
        if ca is None or cb is None or ca != ex.mul(cb, b.args[1]):
            return False
    return True


def merged(p: Placed, k: int) -> Placed:
    """Inner loops k and k+1 as one loop; the caller has checked `mergeable`."""
    a, b = p.inner[k], p.inner[k + 1]
    one = ex.var(f"m{k}", ex.mul(a.args[1], b.args[1]))
    env: dict[Atom, Index] = {a: 0, b: ex.ix(one)}
    inner = (*p.inner[:k], one, *p.inner[k + 2 :])
    reduced = (p.reduced - {a, b}) | ({one} if a in p.reduced else set())
    return Placed(p.node, p.kind, p.row, inner, reduced, ex.substitute(p.index, env), p.value.substitute(env))
