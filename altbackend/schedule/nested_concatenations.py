"""Read a concatenation inside of a later one that has the same parts.

Layer k of a dense block reads the concatenation of all results before it, and the next layer reads the same ones and
one more. Each of these is a range of the last, which is filled while the layers run: one copy stores each result in the
last concatenation, before the first layer reads it, and all layers read their range there. So bytes grow with the
number of layers and not with its square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir.expr import Index
from ..ir.loops import Buffer, Extern, Loop, Node, Pointwise, Program, View, loop_vars, reads, writes
from .concatenation_regions import Region, is_aligned, moved_loop, region_of

MOST_GROWTH = 2  # size of the last concatenation over that of the largest in it: parts and one copy took that before


@dataclass(frozen=True)
class _Concatenation:
    """A buffer, and for each buffer that is copied into it whole the number of that node and the region it fills."""

    buffer: Buffer
    copies: Mapping[str, tuple[int, Region]]


@dataclass(frozen=True)
class _Uses:
    """The numbers of the nodes that write and read each buffer. `aliased`: buffers that share storage with others."""

    writers: Mapping[str, Sequence[int]]
    readers: Mapping[str, Sequence[int]]
    returned: frozenset[str]
    aliased: frozenset[str]


def nest_concatenations(p: Program) -> Program:
    """Return `p` in which concatenations that are ranges of a later one are read there."""
    remaining = _concatenations(p)
    if len(remaining) < 2:
        return p
    nesting = _Nesting(p)
    while remaining:
        nested = nesting.nest(outer=remaining.pop(), candidates=remaining)
        remaining = [c for c in remaining if c.buffer.name not in nested]
    return nesting.program()


def _concatenations(p: Program) -> list[_Concatenation]:
    """Return the buffers that copies of whole buffers fill, those that are complete last at the end."""
    copies: dict[str, dict[str, tuple[int, Region]]] = {}
    for k, node in enumerate(p.nodes):
        region = region_of(p.buffers, node) if isinstance(node, Pointwise) else None
        if region is not None:
            copies.setdefault(region.whole, {}).setdefault(region.part, (k, region))
    filled = [_Concatenation(p.buffers[name], of) for name, of in copies.items() if len(of) > 1]
    return sorted(filled, key=lambda c: max(k for k, _ in c.copies.values()))


def _uses(p: Program) -> _Uses:
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    aliased: set[str] = set()
    for k, node in enumerate(p.nodes):
        for name in writes(node):
            writers.setdefault(name, []).append(k)
        for name in reads(node):
            readers.setdefault(name, []).append(k)
        if isinstance(node, Extern) and node.aliases:
            aliased.update(node.aliases, writes(node))
    return _Uses(writers, readers, frozenset(o.buffer for o in p.outputs if isinstance(o, View)), frozenset(aliased))


def _range_in(inner: _Concatenation, outer: _Concatenation) -> Region | None:
    """Return the region of `outer` with the values of `inner`: the same parts in the same order, without gaps."""
    if not inner.copies.keys() <= outer.copies.keys():
        return None
    pairs = [(region, outer.copies[part][1]) for part, (_, region) in inner.copies.items()]
    offsets = {b.offset - a.offset for a, b in pairs}
    strides: set[tuple[Index, Index]] = {(a.outer, b.outer) for a, b in pairs}
    if all(a.is_one_block and b.is_one_block for a, b in pairs):
        strides = {(inner.buffer.numel, inner.buffer.numel)}
    if len(offsets) != 1 or len(strides) != 1 or any(a.inner != b.inner for a, b in pairs):
        return None
    ((block, stride),) = strides
    if not isinstance(block, int) or not isinstance(stride, int):
        return None
    region = Region(inner.buffer.name, outer.buffer.name, block, stride, offsets.pop())
    return region if is_aligned(region, outer.buffer) else None


class _Nesting:
    """A program whose nodes change in place."""

    def __init__(self, p: Program) -> None:
        self.source, self.uses = p, _uses(p)
        self.nodes, self.buffers = list[Node | None](p.nodes), dict(p.buffers)

    def program(self) -> Program:
        """Return the program as it is now."""
        nodes = tuple(n for n in self.nodes if n is not None)
        unchanged = len(nodes) == len(self.source.nodes)
        return self.source if unchanged else replace(self.source, buffers=self.buffers, nodes=nodes)

    def nest(self, outer: _Concatenation, candidates: Sequence[_Concatenation]) -> set[str]:
        """Let `outer` hold those of `candidates` that are ranges of it; return their names."""
        if not self._is_filled_once(outer):
            return set()
        ranges = [
            (c, r) for c in candidates if (r := _range_in(c, outer)) is not None and self._is_copied_alone(c, outer)
        ]
        if not any(_is_large_part(c, r, outer) for c, r in ranges):
            return set()
        nested = [c for c, r in ranges if self._redirect(r)]
        firsts: dict[str, int] = {}
        for c in nested:
            for part, (k, _) in c.copies.items():
                firsts[part] = min(k, firsts.get(part, k))
                self.nodes[k] = None
            del self.buffers[c.buffer.name]
        for part, k in firsts.items():
            at, _ = outer.copies[part]
            if k < at:
                self.nodes[k], self.nodes[at] = self.nodes[at], None
        return {c.buffer.name for c in nested}

    def _is_filled_once(self, c: _Concatenation) -> bool:
        """Return whether loops alone write the buffer, each element once."""
        name = c.buffer.name
        if name in self.uses.aliased:
            return False
        loops = [n for k in self.uses.writers[name] if isinstance(n := self.source.nodes[k], Pointwise)]
        points = ex.add(0, *(ex.prod(ex.size_of(v) for v in loop_vars(n)) for n in loops))
        return len(loops) == len(self.uses.writers[name]) and points == c.buffer.numel

    def _is_copied_alone(self, c: _Concatenation, outer: _Concatenation) -> bool:
        """Return whether copies alone fill the buffer, and their parts do not change from the first copy on."""
        if c.buffer.name in self.uses.returned or not self._is_filled_once(c):
            return False
        if len(c.copies) != len(self.uses.writers[c.buffer.name]):
            return False
        for part, (k, _) in c.copies.items():
            first = min(k, outer.copies[part][0])
            changed = any(w >= first for w in self.uses.writers.get(part, ()))
            if changed or part in self.uses.aliased or part not in self.buffers:
                return False
        return True

    def _redirect(self, region: Region) -> bool:
        """Let all readers of a buffer read its region; change nothing if one cannot, as library calls cannot."""
        moved: dict[int, Loop] = {}
        for k in self.uses.readers.get(region.part, ()):
            node = self.nodes[k]
            new = None if node is None or isinstance(node, Extern) else moved_loop(node, region)
            if new is None:
                return False
            moved[k] = new
        for k, new in moved.items():
            self.nodes[k] = new
        return True


def _is_large_part(c: _Concatenation, region: Region, outer: _Concatenation) -> bool:
    if not region.is_one_block:
        return region.outer <= MOST_GROWTH * region.inner
    return isinstance(n := outer.buffer.numel, int) and n <= MOST_GROWTH * region.inner
