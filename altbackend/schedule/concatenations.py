"""Keep values in the concatenations that copy them.

Each layer of a dense block concatenates all results before it, so that copies grow with the square of its layers.
A value that is only stored to be copied into its region of a concatenation is stored in that region at once, and all
its readers read it there. In memory, a value of blocks of `inner` elements becomes every block of a larger stride:

    position inner * o + r  ->  outer * o + r + offset,   0 <= r < inner
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..aten.collective import is_start
from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Buffer, Extern, Loop, Node, Pointwise, Program, View, reads, writes
from ..ir.value import Value

ALIGNED = 16  # bytes of the widest load: regions begin at multiples of it where the values did


@dataclass(frozen=True)
class _Region:
    """The region of a buffer `whole` in which the value of buffer `part` lives; see the head of this file."""

    part: str
    whole: str
    inner: int
    outer: int
    offset: int

    def moved(self, index: Index) -> Index | None:
        """Return the position in `whole` of a position in `part`; None where it has no such form."""
        o, r = ex.floordiv(index, self.inner), ex.mod(index, self.inner)
        if not (_divisions(o) | _divisions(r)) <= _divisions(index):
            return None
        return ex.add(ex.mul(self.outer, o), r, self.offset)


def share_concatenations(p: Program) -> Program:
    """Return `p` with values stored in the concatenations that copy them, the last concatenation first."""
    writers = Counter(b for n in p.nodes for b in writes(n))
    if not any(count > 1 for count in writers.values()):
        return p
    for k in range(len(p.nodes) - 1, -1, -1):
        copy = p.nodes[k]
        if not isinstance(copy, Pointwise) or writers[copy.out] < 2:
            continue
        region = _region(p, copy)
        if region is not None and _is_free(p, k, region):
            p = _with_region(p, copy, region) or p
    return p


# --- which copies ----------------------------------------------------------------------------------------------------


def _region(p: Program, copy: Pointwise) -> _Region | None:
    """Return the region that a node copies a whole temporary into, one block after the other."""
    if copy.value.op != "load" or ex.lookups(copy.index):
        return None
    name, index = copy.value.attr
    part, whole = p.buffers[name], p.buffers[copy.out]
    if part.kind != "temp" or whole.kind != "temp" or name == copy.out or part.dtype != whole.dtype:
        return None
    points = ex.prod(ex.size_of(v) for v in copy.dims)
    if part.numel != part.extent or points != part.numel:
        return None
    blocks = (ex.mul(n, s) for n, s in zip(part.sizes, part.strides, strict=True))
    for inner in sorted({n for n in blocks if isinstance(n, int) and n > 1}, reverse=True):
        if (region := _with_inner(copy, name, index, inner)) is not None:
            return region if _is_aligned(region, whole) else None
    return None


def _with_inner(copy: Pointwise, name: str, index: Index, inner: int) -> _Region | None:
    o, r = ex.floordiv(index, inner), ex.mod(index, inner)
    if _divisions(o) | _divisions(r):
        return None
    outer = next((_ratio(copy.index, o, v) for v in copy.dims if v in ex.vars_of(o)), inner)
    if not isinstance(outer, int) or outer < inner:
        return None
    offset = ex.sub(copy.index, ex.add(ex.mul(outer, o), r))
    return _Region(name, copy.out, inner, outer, offset) if isinstance(offset, int) else None


def _ratio(a: Index, b: Index, v: Atom) -> Index | None:
    numerator, denominator = ex.coefficient(a, v), ex.coefficient(b, v)
    if numerator is None or denominator is None or denominator == 0:
        return None
    return ex.exact_div(numerator, denominator)


def _is_aligned(region: _Region, whole: Buffer) -> bool:
    """Return whether wide loads take the blocks of a region as they took those of the value."""
    size = whole.dtype.itemsize
    widest = next(n for n in (ALIGNED, 8, 4, 2, 1) if region.inner * size % n == 0)
    return all(n * size % widest == 0 for n in (region.outer, region.offset))


def _is_free(p: Program, copy: int, region: _Region) -> bool:
    """Return whether nothing but node number `copy` writes the region, and no library call touches the value.

    Loops fill both buffers, each element once, and the value is complete when it is copied.
    """
    views = {o.buffer for o in p.outputs if isinstance(o, View)}
    if region.part in views:
        return False
    for name in (region.part, region.whole):
        filled: Index = 0
        for k, node in enumerate(p.nodes):
            if name not in writes(node):
                continue
            if not isinstance(node, Pointwise) or (name == region.part and k > copy):
                return False
            filled = ex.add(filled, ex.prod(ex.size_of(v) for v in node.dims))
        if filled != p.buffers[name].numel:
            return False
    return not any(isinstance(n, Extern) and _holds(n, region.part) for n in p.nodes)


def _holds(call: Extern, name: str) -> bool:
    """Return whether a call reads a buffer; it would copy a region, which has gaps, or start with it."""
    return name in reads(call) or name in call.aliases or (is_start(call.target) and name in call.mutates)


# --- the program with a region in place of a value -------------------------------------------------------------------


def _with_region(p: Program, copy: Pointwise, region: _Region) -> Program | None:
    nodes: list[Node] = []
    for node in p.nodes:
        if node is copy:
            continue
        if isinstance(node, Extern) or region.part not in (*reads(node), *writes(node)):
            nodes.append(node)
            continue
        moved = _moved(node, region)
        if moved is None:
            return None
        nodes.append(moved)
    buffers = {name: b for name, b in p.buffers.items() if name != region.part}
    return replace(p, buffers=buffers, nodes=tuple(nodes))


def _moved(node: Loop, region: _Region) -> Loop | None:
    """Return a loop that reads and stores the value in its region; None where a position has no such form."""
    if any(v.attr[0] == region.part for e in ex.lookups(node.index) for v in va.walk(e) if v.op == "load"):
        return None
    index = region.moved(node.index) if node.out == region.part else node.index
    failed = False

    def on_load(x: Value) -> Value | None:
        nonlocal failed
        name, position = x.attr
        if name != region.part:
            return None
        place = region.moved(position)
        failed = failed or place is None
        return None if place is None else va.load(region.whole, place, x.dtype)

    value = va.rewrite(node.value, on_load=on_load)
    if failed or index is None:
        return None
    return replace(node, out=region.whole if node.out == region.part else node.out, index=index, value=value)


def _divisions(index: Index) -> frozenset[Atom]:
    return frozenset(_division_atoms(index))


def _division_atoms(index: Index) -> Iterator[Atom]:
    if isinstance(index, int):
        return
    for monomial, _ in index.terms:
        for atom in monomial:
            if isinstance(atom, (ex.FloorDiv, ex.Mod)):
                yield atom
                yield from _division_atoms(atom.dividend)
