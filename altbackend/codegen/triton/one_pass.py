"""Emit the statements that all passes share which compute two stages of long rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ir.expr import Index
from ...schedule.loop_mapping import MappedNode
from .emitter import Emitter, Scope
from .scope import bind, on_tile, row_points, store
from .tile_ast import Comment, TileLoop
from .totals import provenance


def over_blocks(e: Emitter, scope: Scope, n: Index, turn: Callable[[Scope], None]) -> None:
    """Emit `turn` for every block of a row of `n` points; a last partial block is masked."""
    block = e.blocks.rblocks[n]
    full = n - n % block if isinstance(n, int) else 0
    if full or not isinstance(n, int):
        inner = Scope(scope, "r")
        row_points(e, inner, n, "base", full=bool(full))
        turn(inner)
        e.note(n)
        scope.body.append(TileLoop("base", "0", full or n, e.blocks.name_of(n), tuple(inner.body)))
    if isinstance(n, int) and full < n:
        inner = Scope(scope, "r")
        row_points(e, inner, n, str(full))
        turn(inner)
        scope.body.extend(inner.body)


def emit_points(e: Emitter, inner: Scope, points: Sequence[MappedNode]) -> None:
    """Emit the pointwise nodes of a block: the kernel stores some, and later nodes compute others again."""
    for q in points:
        mapped = e.writers[q.node.out] = on_tile(e, inner, q)
        if q.node.out in e.kernel.stored:
            inner.body.append(Comment(provenance(q)))
            store(e, inner, mapped, bind(e, inner, mapped.value))
