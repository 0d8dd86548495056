"""Row numbers as digits: instead of dividing them by sizes that only the call knows, a kernel counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ....ir import expr as ex
from ....ir import value as va
from ....ir.expr import Atom, Index
from ...loop_mapping import MappedNode, cut_rows, ordered_vars


def of_rows(mapped: list[MappedNode]) -> tuple[list[MappedNode], tuple[Atom, ...]]:
    """The members with loop variables of their rows in place of quotients of the row's number, slowest first.

    Without any where it does not rid all indices of division by symbols. A division takes as long as ten elements.
    """
    row = mapped[0].row
    if any(q.kind not in ("point", "inner") for q in mapped) or not any(_divisions(q) for q in mapped):
        return mapped, ()
    for q in mapped:
        cut = cut_rows(ordered_vars(q.node), ex.size_of(row))
        sizes = [ex.size_of(v) for v in cut[0] if ex.size_of(v) != 1] if cut is not None else []
        if len(sizes) < 2:
            continue
        row_counters = tuple(ex.var(f"g{k}", n) for k, n in enumerate(sizes))
        env = {row: ex.flatten(sizes, [ex.ix(v) for v in row_counters])}
        found = [replace(p, index=ex.substitute(p.index, env), value=p.value.substitute(env)) for p in mapped]
        if not any(_divisions(p) for p in found):
            return found, row_counters
    return mapped, ()


def _divisions(q: MappedNode) -> list[Atom]:
    """Quotients and remainders by symbols in a member's indices."""
    trees = [v for tree in (q.value, *ex.lookups(q.index)) for v in va.walk(tree)]
    seen = [q.index, *(v.attr[1] for v in trees if v.op == "load"), *(v.attr for v in trees if v.op == "index")]
    return [a for index in seen for a in _atoms(index) if ex.syms_of(a.args[1])]


def _atoms(index: Index) -> Iterator[Atom]:
    if isinstance(index, int):
        return
    for m, _ in index.terms:
        for a in m:
            if a.kind in ("floordiv", "mod"):
                yield a
                for part in a.args:
                    yield from _atoms(part)
