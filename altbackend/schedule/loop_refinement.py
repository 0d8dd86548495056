"""Split and merge the inner loops of mapped nodes, so that several nodes run in one loop nest."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from .loop_mapping import Kind, MappedNode

CACHED_SPLITS = 4096


def common_refinement(chains: Sequence[tuple[Index, ...]]) -> tuple[Index, ...] | None:
    """Return the coarsest chain of loop extents from which merging gives every chain; None where they overlap."""
    rest = [[n for n in c if n != 1] for c in chains]
    refined: list[Index] = []
    while any(rest):
        if not all(rest):
            return None
        last = [c[-1] for c in rest]
        step = next((n for n in last if all(ex.exact_div(m, n) is not None for m in last)), None)
        if step is None:
            return None
        refined.append(step)
        for c in rest:
            quotient = ex.exact_div(c.pop(), step)
            assert quotient is not None
            if quotient != 1:
                c.append(quotient)
    return tuple(reversed(refined))


@functools.lru_cache(maxsize=CACHED_SPLITS)
def split_loops(q: MappedNode, chain: tuple[Index, ...]) -> MappedNode:
    """Split the inner loops of `q` to the extents `chain`, named i0, i1, ...; `chain` must refine `q.sizes`."""
    fresh = tuple([ex.var(f"i{k}", n) for k, n in enumerate(chain)])
    if q.inner == fresh:
        return q
    env: dict[Atom, Index] = {}
    parts_of: dict[Atom, list[Atom]] = {}
    position = len(fresh)
    for v in reversed(q.inner):
        if ex.size_of(v) == 1:
            env[v] = 0
            continue
        parts: list[Atom] = []
        size: Index = 1
        while size != ex.size_of(v):
            position -= 1
            parts.insert(0, fresh[position])
            size = ex.mul(size, ex.size_of(fresh[position]))
        env[v] = ex.flatten([ex.size_of(x) for x in parts], [ex.ix(x) for x in parts])
        parts_of[v] = parts
    reduced, scanned = (frozenset(w for v in loops for w in parts_of.get(v, ())) for loops in (q.reduced, q.scanned))
    changed = {v: e for v, e in env.items() if ex.ix(v) is not e}
    index, value = ex.substitute(q.index, changed), q.value.substitute(changed)
    return replace(q, inner=fresh, reduced=reduced, index=index, value=value, scanned=scanned)


def with_loops_of(q: MappedNode, chain: tuple[Index, ...]) -> MappedNode:
    """Return `q` with inner loops of the extents `chain`, of any names: unchanged where it has them already."""
    return q if q.sizes == chain else split_loops(q, chain)


def mergeable(q: MappedNode, k: int) -> bool:
    """Return whether inner loops k and k+1 of `q` can run as one: every index is linear with matching strides.

    The values that decide a part of an index are in the trees, so that their own indices count.
    """
    a, b = q.inner[k], q.inner[k + 1]
    if (a in q.reduced) != (b in q.reduced) or q.kind is Kind.SCAN:
        return False
    values = [v for tree in (q.value, *ex.lookups(q.index)) for v in va.walk(tree)]
    indices = [q.index, *(v.attr[1] for v in values if v.op == "load")]
    indices += [v.attr for v in values if v.op in ("index", "wrap_index")]
    for index in indices:
        plain = ex.without_lookups(index)
        stride_a, stride_b = ex.coefficient(plain, a), ex.coefficient(plain, b)
        if stride_a is None or stride_b is None or stride_a != ex.mul(stride_b, ex.size_of(b)):
            return False
    return True


def merged(q: MappedNode, k: int) -> MappedNode:
    """Return `q` with inner loops k and k+1 as one loop. The caller has checked `mergeable`."""
    a, b = q.inner[k], q.inner[k + 1]
    one = ex.var(f"i{k}", ex.mul(ex.size_of(a), ex.size_of(b)))
    env: dict[Atom, Index] = {a: 0, b: ex.ix(one)}
    inner = (*q.inner[:k], one, *q.inner[k + 2 :])
    reduced = (q.reduced - {a, b}) | ({one} if a in q.reduced else set())
    index, value = ex.substitute(q.index, env), q.value.substitute(env)
    return replace(q, inner=inner, reduced=reduced, index=index, value=value)
