"""Keep values in the concatenations that copy them.

Each layer of a dense block concatenates all results before it, so that copies grow with the square of its layers.
Some values are stored only to be copied into their region of a concatenation. Such a value is stored in that region at
once, and all its readers read it there. A value that fusion hands on to its readers stays as it is. In memory, a value
of blocks of `inner` elements becomes every block of a larger stride:

    position inner * o + r  ->  outer * o + r + offset,   0 <= r < inner
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Buffer, Extern, Loop, Node, Pointwise, Program, View, loop_vars, reads, writes
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
    sharing = _Sharing(p)
    for k in range(len(p.nodes) - 1, -1, -1):
        copy = sharing.nodes[k]
        if not isinstance(copy, Pointwise) or writers[copy.out] < 2:
            continue
        region = _region(sharing.buffers, copy)
        if region is not None and sharing.is_free(k, region) and not sharing.is_forwarded(k, region):
            sharing.share(k, region)
    return sharing.program()


# --- which copies ----------------------------------------------------------------------------------------------------


def _region(buffers: Mapping[str, Buffer], copy: Pointwise) -> _Region | None:
    """Return the region that a node copies a whole temporary into, one block after the other."""
    if copy.value.op != "load" or ex.lookups(copy.index):
        return None
    name, index = copy.value.attr
    part, whole = buffers[name], buffers[copy.out]
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


# --- the program with regions in place of values ---------------------------------------------------------------------


class _Sharing:
    """A program whose nodes change in place. `touching`: the numbers of the nodes that use each buffer, in order."""

    def __init__(self, p: Program) -> None:
        self.source, self.nodes, self.buffers = p, list[Node | None](p.nodes), dict(p.buffers)
        self.returned = {o.buffer for o in p.outputs if isinstance(o, View)}
        self.touching: dict[str, list[int]] = {}
        for k, node in enumerate(p.nodes):
            aliases = node.aliases if isinstance(node, Extern) else ()
            for name in dict.fromkeys((*reads(node), *writes(node), *aliases)):
                self.touching.setdefault(name, []).append(k)

    def program(self) -> Program:
        """Return the program as it is now."""
        nodes = tuple(n for n in self.nodes if n is not None)
        if len(nodes) == len(self.nodes):
            return self.source
        return replace(self.source, buffers=self.buffers, nodes=nodes)

    def is_free(self, copy: int, region: _Region) -> bool:
        """Return whether nothing but node number `copy` writes the region, and no library call touches the value.

        Loops fill both buffers, each element once, and the value is complete when it is copied. A library call would
        copy a region, which has gaps.
        """
        if region.part in self.returned or any(isinstance(self.nodes[k], Extern) for k in self.touching[region.part]):
            return False
        for name in (region.part, region.whole):
            filled: Index = 0
            for k in self.touching[name]:
                node = self.nodes[k]
                if node is None or name not in writes(node):
                    continue
                if not isinstance(node, Pointwise) or (name == region.part and k > copy):
                    return False
                filled = ex.add(filled, ex.prod(ex.size_of(v) for v in node.dims))
            if filled != self.buffers[name].numel:
                return False
        return True

    def is_forwarded(self, copy: int, region: _Region) -> bool:
        """Return whether fusion may forward the value: one node writes it, and others read each element once.

        Fusion refuses readers of a buffer that several nodes write: values would pass through memory.
        """
        users = [n for k in self.touching[region.part] if k != copy and (n := self.nodes[k]) is not None]
        if sum(region.part in writes(n) for n in users) > 1:
            return False
        readers = (n for n in users if region.part in reads(n) and not isinstance(n, Extern))
        numel = self.buffers[region.part].numel
        return any(ex.prod(map(ex.size_of, loop_vars(n))) == numel for n in readers)

    def share(self, copy: int, region: _Region) -> None:
        """Let all nodes that use the value use its region, without the copy; change nothing if one cannot."""
        users = [k for k in self.touching[region.part] if k != copy]
        moved: dict[int, Loop] = {}
        for k in users:
            node = self.nodes[k]
            new = _moved(node, region) if node is not None and not isinstance(node, Extern) else None
            if new is None:
                return
            moved[k] = new
        for k, new in moved.items():
            self.nodes[k] = new
        self.nodes[copy] = None
        del self.buffers[region.part], self.touching[region.part]
        self.touching[region.whole] = sorted({*self.touching[region.whole], *users} - {copy})


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
