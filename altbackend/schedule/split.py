"""Split reductions: few results over much data are reduced in two steps, so that all of the device has work."""

from __future__ import annotations

from dataclasses import replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.loops import Buffer, Node, Program, Reduction
from .place import ordered_vars
from .target import Target

LONG = 1 << 16  # elements per result from which a split pays


def split_reductions(p: Program, target: Target, whole: frozenset[str] = frozenset()) -> Program:
    """`p` with every reduction of few, long rows replaced by partial results and their reduction.

    `whole`: buffers whose reductions stay as they are.
    Full reductions need none of it: a flat kernel already runs them on all threads.
    """
    if target.parallel < 2:
        return p
    buffers = dict(p.buffers)
    nodes: list[Node] = []
    for node in p.nodes:
        parts = _split(node, buffers, target) if isinstance(node, Reduction) and node.out not in whole else None
        nodes += parts or [node]
    return replace(p, buffers=buffers, nodes=tuple(nodes))


def _pieces(kept: int, long: int, total: int, target: Target) -> int | None:
    if total < LONG or kept >= 2 * target.parallel:
        return None
    wanted = -(-4 * target.parallel // kept)
    pieces = next((n for n in range(wanted, min(long, 64 * target.parallel) + 1) if long % n == 0), None)
    return None if pieces is None or total // pieces < 4096 else pieces


LONG_COLUMN = 1024  # elements of a column from which a split pays: a program reads it in few, dependent steps
COLUMN_BLOCK = 64  # results of neighbouring columns that one GPU program computes


def _has_columns(node: Reduction) -> bool:
    """Whether results, not what they reduce, are neighbours in memory."""
    return ordered_vars(node)[-1] not in node.rdims


def _pieces_on_gpu(node: Reduction, kept: int, long: int, total: int, target: Target) -> int | None:
    """Enough pieces for one program each: a program takes one row, or a block of columns."""
    columns = _has_columns(node)
    programs = -(-kept // COLUMN_BLOCK) if columns else kept
    shortest = COLUMN_BLOCK if columns else 4096
    wanted = -(-target.parallel // programs)
    if programs >= target.parallel // 2 or total < (LONG_COLUMN if columns else LONG):
        return None
    fits = [n for n in range(2, min(long, 2 * wanted) + 1) if long % n == 0 and total // n >= shortest]
    return min(fits, key=lambda n: abs(n - wanted), default=None)


def _split(node: Reduction, buffers: dict[str, Buffer], target: Target) -> list[Node] | None:
    kept = ex.prod(v.args[1] for v in node.dims)
    long = node.rdims[0].args[1] if node.rdims else 1
    total = ex.prod(v.args[1] for v in node.rdims)
    if not (isinstance(kept, int) and isinstance(total, int) and isinstance(long, int)) or not node.dims:
        return None
    if node.op.startswith("arg"):
        return None
    pieces = _pieces_on_gpu(node, kept, long, total, target) if target.registers else _pieces(kept, long, total, target)
    if pieces is None:
        return None
    out = buffers[node.out]
    # neighbouring columns stay neighbours where a GPU's program takes a block of them
    across = target.registers and _has_columns(node)
    sizes = (pieces, kept) if across else (kept, pieces)
    part = Buffer(f"{node.out}_parts", out.dtype, sizes, (sizes[1], 1), out.device)
    buffers[part.name] = part
    high, low = ex.var("d90", pieces), ex.var("d91", long // pieces)
    env = {node.rdims[0]: ex.add(ex.mul(ex.ix(high), long // pieces), ex.ix(low))}
    row = ex.flatten([v.args[1] for v in node.dims], [ex.ix(v) for v in node.dims])
    slot = ex.flatten(sizes, (ex.ix(high), row) if across else (row, ex.ix(high)))
    first = Reduction(
        part.name,
        (high, *node.dims) if across else (*node.dims, high),
        (low, *node.rdims[1:]),
        slot,
        node.op,
        node.value.substitute(env),
        node.origins,
    )
    second = Reduction(
        node.out, node.dims, (high,), node.index, node.op, va.load(part.name, slot, out.dtype), node.origins
    )
    return [first, second]
