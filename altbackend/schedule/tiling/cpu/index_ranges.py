"""Split a loop where conditions on its variable change, so that most of its iterations test none of them.

Padded windows, concatenations and shifts read memory under conditions such as i - 1 >= 0. A vector loop evaluates
them for each element. Between two changes all of them are constant (index-set splitting: M. Griebl, P. Feautrier, C.
Lengauer, "Index set splitting", International Journal of Parallel Programming 28, 2000).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ....ir.value import Value
from ...loop_mapping import MappedNode

MOST_PIECES = 5  # pieces of a loop whose conditions all become constant
LEAST_PIECE = 8  # mean iterations of such a piece
LEAST_INTERIOR = 16  # iterations between borders that keep their conditions
MOST_CUTS = 32  # cuts of one loop; loops over wider windows stay whole
MOST_VALUES = 1500  # values of all pieces, which the compiler has to read

Nodes = tuple[MappedNode, ...]
Range = tuple[int, int]


def split_ranges(inner: tuple[Atom, ...], members: Nodes) -> list[tuple[tuple[Atom, ...], Nodes]]:
    """Return (loops, nodes) of each piece of the innermost loop, in order: a single one if the loop stays whole.

    `members` are pointwise nodes over the loops `inner`.
    """
    n = ex.size_of(inner[-1])
    whole = [(inner, members)]
    if not isinstance(n, int) or n < 2 * LEAST_PIECE:
        return whole
    cuts = _all_cuts(inner, members, (0, n))
    values = sum(1 for q in members for _ in va.walk(q.value))
    ranges = _pieces(sorted(cuts), n)
    if len(ranges) < 2 or values * len(ranges) > MOST_VALUES:
        return whole
    return [_piece(inner, members, r) for r in ranges]


def _all_cuts(inner: tuple[Atom, ...], members: Nodes, r: Range) -> set[int]:
    """Return the iterations in `r` at which a condition changes; some show only where others are decided."""
    loops, nodes = _piece(inner, members, r)
    length = r[1] - r[0]
    offsets = {at for q in nodes for at in _cuts(q, loops[-1]) if 0 < at < length}
    if not offsets or len(offsets) > MOST_CUTS:
        return set()
    cuts = sorted(r[0] + at for at in offsets)
    edges = [r[0], *cuts, r[1]]
    return set(cuts).union(*(_all_cuts(inner, members, part) for part in itertools.pairwise(edges)))


def _pieces(cuts: Sequence[int], n: int) -> list[Range]:
    """Return the ranges of the pieces: all between cuts, or a long interior and its borders; none if it is short."""
    every = list(itertools.pairwise([0, *cuts, n]))
    if len(every) <= MOST_PIECES and n >= LEAST_PIECE * len(every):
        return every
    begin, end = max(every, key=lambda r: r[1] - r[0])
    if end - begin < max(LEAST_INTERIOR, n // 2):
        return []
    return [(a, b) for a, b in ((0, begin), (begin, end), (end, n)) if a < b]


def _piece(inner: tuple[Atom, ...], members: Nodes, r: Range) -> tuple[tuple[Atom, ...], Nodes]:
    """Return the nodes over the iterations `r` of the innermost loop."""
    old = inner[-1]
    new = ex.var(old.args[0], r[1] - r[0])
    loops = (*inner[:-1], new)
    env: dict[Atom, Index] = {old: ex.add(ex.ix(new), r[0])}
    nodes = [
        replace(q, inner=loops, index=ex.substitute(q.index, env), value=decided(q.value.substitute(env)))
        for q in members
    ]
    return loops, tuple(nodes)


# --- where conditions change -----------------------------------------------------------------------------------------


def _cuts(q: MappedNode, v: Atom) -> Iterator[int]:
    """Yield the iterations at which a condition, a position or a quotient of `v` alone changes its form."""
    for x in va.walk(q.value):
        if v not in x.vars:
            continue
        if x.op in _COMPARISONS and _are_indices(x.args):
            yield from _changes(ex.sub(*map(_index, x.args)), v)
        elif x.op == "abs" and _are_indices(x.args):
            yield from _changes(_index(x.args[0]), v)
        for index in (x.attr[1],) if x.op == "load" else (x.attr,) if x.op in ("index", "wrap_index") else ():
            yield from _cuts_of_index(index, v)


def _cuts_of_index(index: Index, v: Atom) -> Iterator[int]:
    if isinstance(index, int):
        return
    for a in {a for m, _ in index.terms for a in m}:
        if v not in ex.vars_of(ex.from_atom(a)):
            continue
        if isinstance(a, ex.Extremum):
            yield from _changes(ex.sub(*a.operands), v)
        elif isinstance(a, (ex.FloorDiv, ex.Mod)):
            x, d = a.operands
            low, high = ex.bounds(x)
            if isinstance(d, int) and d > 0 and high // d - low // d < MOST_PIECES:
                for k in range(low // d + 1, high // d + 1):
                    yield from _changes(ex.sub(x, k * d), v)


def _changes(difference: Index, v: Atom) -> Iterator[int]:
    """Yield the first v at which c*v + k >= 0 is another truth value than at the iterations before.

    It is ceil(-k / c) for positive and floor(k / -c) + 1 for negative c.
    """
    c = ex.coefficient(difference, v)
    if isinstance(c, int) and c != 0:
        k = ex.sub(difference, ex.mul(c, ex.ix(v)))
        if isinstance(k, int):
            yield -(k // c) if c > 0 else k // -c + 1


# --- what the range of a loop decides --------------------------------------------------------------------------------

_COMPARISONS = ("lt", "ge", "gt", "le")
_INTEGERS: dict[str, Callable[..., Index | None]] = {
    "add": ex.add,
    "sub": ex.sub,
    "mul": ex.mul,
    "neg": lambda a: ex.mul(-1, a),
    "abs": lambda a: next((e for e in (a, ex.mul(-1, a)) if ex.known_nonnegative(e)), None),
}


def decided(root: Value) -> Value:
    """Return `root` with conditions and positions that ranges of loops decide replaced by what they choose."""
    memo: dict[Value, Value] = {}
    for x in va.walk(root):
        memo[x] = _folded(x, tuple(memo[a] for a in x.args), memo)
    return memo[root]


def _folded(x: Value, args: tuple[Value, ...], memo: Mapping[Value, Value]) -> Value:
    if x.op in _COMPARISONS and _are_indices(args):
        a, b = map(_index, args)
        return va.compare_index(x.op, a, b) if x.op in ("lt", "ge") else va.compare_index(_MIRRORED[x.op], b, a)
    if x.op in _INTEGERS and x.dtype == torch.int64 and _are_indices(args):
        value = _INTEGERS[x.op](*map(_index, args))
        return va.make(x.op, args, x.dtype) if value is None else va.index(value)
    if x.op in _CHOICES:
        return _CHOICES[x.op](*args)
    attr = x.attr
    if x.op == "load":
        attr = (attr[0], _resolved(attr[1], memo))
    elif x.op in ("index", "wrap_index"):
        attr = _resolved(attr, memo)
    return x if args == x.args and attr is x.attr else va.make(x.op, args, x.dtype, attr)


def _resolved(index: Index, memo: Mapping[Value, Value]) -> Index:
    """Return an index whose lookups of decided positions are these positions."""
    values = ex.lookups(index)
    if all(memo[v] is v for v in values):
        return index
    changed = ex.substitute(index, {}, lambda v: memo[v])
    plain: dict[Atom, Index] = {
        a: _index(a.value)
        for m, _ in (() if isinstance(changed, int) else changed.terms)
        for a in m
        if isinstance(a, ex.Lookup) and _are_indices((a.value,))
    }
    return ex.substitute(changed, plain, lambda v: v) if plain else changed


_MIRRORED = {"gt": "lt", "le": "ge"}
_CHOICES: dict[str, Callable[..., Value]] = {"where": va.where, "masked": va.masked, "logical_and": va.conjunction}


def _are_indices(values: Sequence[Value]) -> bool:
    return all(a.op == "index" or (a.op == "const" and a.dtype == torch.int64) for a in values)


def _index(x: Value) -> Index:
    e: Index = int(x.attr) if x.op == "const" else x.attr
    return e
