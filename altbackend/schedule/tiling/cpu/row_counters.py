"""Count row coordinates instead of dividing the row's number by sizes that only the call knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ...loop_mapping import Kind, MappedNode, cut_rows, ordered_vars


def with_row_counters(mapped: list[MappedNode]) -> tuple[list[MappedNode], tuple[Atom, ...]]:
    """Return the nodes with counters in place of quotients of the row's number, and the counters, slowest first.

    There are no counters where they would not free all indices of division by symbols. One division takes as long as
    ten elements.
    """
    row = mapped[0].row
    if any(q.kind not in (Kind.POINT, Kind.IN_ROW) for q in mapped) or not _divides(mapped):
        return mapped, ()
    for q in mapped:
        cut = cut_rows(ordered_vars(q.node), ex.size_of(row))
        sizes = [ex.size_of(v) for v in cut.outer if ex.size_of(v) != 1] if cut is not None else []
        if len(sizes) < 2:
            continue
        counters = tuple(ex.var(f"g{k}", n) for k, n in enumerate(sizes))
        env = {row: ex.flatten(sizes, [ex.ix(v) for v in counters])}
        counted = [replace(m, index=ex.substitute(m.index, env), value=m.value.substitute(env)) for m in mapped]
        if not _divides(counted):
            return counted, counters
    return mapped, ()


def _divides(mapped: Sequence[MappedNode]) -> bool:
    """Return whether an index has a quotient or remainder by a symbol."""
    return any(ex.syms_of(a.args[1]) for q in mapped for index in _indices(q) for a in _divisions(index))


def _indices(q: MappedNode) -> list[Index]:
    values = [v for tree in (q.value, *ex.lookups(q.index)) for v in va.walk(tree)]
    loads = (v.attr[1] for v in values if v.op == "load")
    return [q.index, *loads, *(v.attr for v in values if v.op == "index")]


def _divisions(index: Index) -> Iterator[Atom]:
    if isinstance(index, int):
        return
    for m, _ in index.terms:
        for a in m:
            if isinstance(a, (ex.FloorDiv, ex.Mod)):
                yield a
                for part in a.args:
                    yield from _divisions(part)
