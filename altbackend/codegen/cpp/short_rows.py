"""Give reductions along rows of unknown length a second form for short rows, whose vectors run across rows.

A loop over 8 elements fills no vector, and reducing a vector costs more than the elements. Where only the call knows
the length, the kernel has both forms.
"""

from __future__ import annotations

from dataclasses import replace

from .ast import BlockRead, BlockRow, BlockWrite, Declare, Function, Let, Loop, Stmt, Store, Transpose, Update

SHORT = 32  # elements from which vectors along a row are faster


def with_short_rows(f: Function) -> Function:
    """Return `f` with a second body for rows below SHORT, if its rows are one reduction of symbolic length."""
    loops = [s for s in f.body if isinstance(s, Loop)]
    if f.flat is not None or f.rows == 1 or f.scratch or f.partials or f.checks or f.row_counters or len(loops) != 1:
        return f
    (loop,) = loops
    inner = next((s for s in loop.body if isinstance(s, Loop)), loop)
    if isinstance(inner.var.args[1], int) or not (inner.simd and inner.sums) or inner.limit is not None:
        return f
    if any(isinstance(s, Loop) for s in inner.body) or (loop is not inner and loop.step == 1):
        return f
    body = [part for s in f.body for part in (_serial(loop, inner) if s is loop else (s,))]
    return replace(f, short=tuple(body)) if all(map(_plain, body)) else f


def _serial(loop: Loop, inner: Loop) -> list[Stmt]:
    """Return the loop over a row without blocks and in one lane; statements around a block run once."""
    plain = Loop(inner.var, "0", "", inner.body)
    return [plain if s is inner else s for s in loop.body] if loop is not inner else [plain]


def _plain(s: Stmt) -> bool:
    """Return whether a statement of one row touches no memory of other rows."""
    match s:
        case Let() | Store():
            return True
        case Declare():
            return s.numel is None
        case Update():
            return s.index is None
        case Loop():
            return all(map(_plain, s.body))
        case BlockRow() | BlockRead() | BlockWrite() | Transpose():
            return False
