"""Split reductions: few results over much data are reduced in two steps, so that all of the device has work."""

from __future__ import annotations

import math
from dataclasses import replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Buffer, Node, Program, Reduction
from .device import Target
from .fusion.gpu_rules import COLUMNS
from .loop_mapping import ordered_vars

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
SHORTEST_COLUMN = 64  # elements of a piece of it


def _has_columns(node: Reduction) -> bool:
    """Whether results, not what they reduce, are neighbours in memory."""
    return ordered_vars(node)[-1] not in node.rdims


def _cuts_on_gpu(node: Reduction, kept: int, sizes: tuple[int, ...], target: Target) -> tuple[int, ...] | None:
    """Into how many pieces to cut each reduced loop, the first ones whole: one piece for each program.

    A program takes one row, or a block of columns.
    """
    columns, total = _has_columns(node), math.prod(sizes)
    programs = -(-kept // COLUMNS) if columns else kept
    shortest = SHORTEST_COLUMN if columns else 4096
    wanted = -(-target.parallel // programs)
    if programs >= target.parallel // 2 or total < (LONG_COLUMN if columns else LONG):
        return None
    cuts: list[int] = []
    for n in sizes:
        done = math.prod(cuts)
        fits = [c for c in range(1, min(n, 2 * wanted // done) + 1) if n % c == 0 and total // (done * c) >= shortest]
        cuts.append(min(fits, key=lambda c: abs(done * c - wanted), default=1))
        if cuts[-1] != n:  # later loops stay whole
            break
    cuts += [1] * (len(sizes) - len(cuts))
    return tuple(cuts) if math.prod(cuts) > 1 else None


def cuts_of(node: Reduction, target: Target) -> tuple[int, ...] | None:
    """Into how many pieces to cut each reduced loop; None where the reduction stays whole."""
    kept = ex.prod(ex.size_of(v) for v in node.dims)
    sizes = tuple(n for n in map(ex.size_of, node.rdims) if isinstance(n, int))
    if not node.dims or not sizes or not isinstance(kept, int) or node.op.startswith("arg"):
        return None
    if len(sizes) < len(node.rdims):
        return None
    if target.registers:
        return _cuts_on_gpu(node, kept, sizes, target)
    pieces = _pieces(kept, sizes[0], math.prod(sizes), target)
    return None if pieces is None else (pieces, *(1 for _ in sizes[1:]))


def _split(node: Reduction, buffers: dict[str, Buffer], target: Target) -> list[Node] | None:
    cuts = cuts_of(node, target)
    if cuts is None:
        return None
    kept, pieces = ex.prod(ex.size_of(v) for v in node.dims), math.prod(cuts)
    out = buffers[node.out]
    # neighbouring columns stay neighbours where a GPU's program takes a block of them
    across = target.registers and _has_columns(node)
    sizes = (pieces, kept) if across else (kept, pieces)
    part = Buffer(f"{node.out}_parts", out.dtype, sizes, (sizes[1], 1), out.device)
    buffers[part.name] = part
    high = ex.dim(90, pieces)
    env: dict[Atom, Index] = {}
    inner: list[Atom] = []
    piece: Index = ex.ix(high)
    for k, (v, n) in reversed(list(enumerate(zip(node.rdims, cuts, strict=True)))):
        if n == 1:
            inner.insert(0, v)
            continue
        here, piece = (piece, 0) if n == pieces else (ex.mod(piece, n), ex.floordiv(piece, n))
        length = ex.floordiv(ex.size_of(v), n)
        low = ex.dim(91 + k, length)
        env[v] = ex.add(ex.mul(here, length), ex.ix(low))
        inner.insert(0, low)
    row = ex.flatten([ex.size_of(v) for v in node.dims], [ex.ix(v) for v in node.dims])
    slot = ex.flatten(sizes, (ex.ix(high), row) if across else (row, ex.ix(high)))
    first = Reduction(
        part.name,
        (high, *node.dims) if across else (*node.dims, high),
        tuple(inner),
        slot,
        node.op,
        node.value.substitute(env),
        node.origins,
    )
    second = Reduction(
        node.out, node.dims, (high,), node.index, node.op, va.load(part.name, slot, out.dtype), node.origins
    )
    return [first, second]
