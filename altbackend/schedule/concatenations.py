"""Keep values in the concatenations that copy them.

Each layer of a dense block concatenates all results before it, so that copies grow with the square of its layers.
Some values are stored only to be copied into their region of a concatenation. Such a value is stored in that region at
once, and all its readers read it there. A value that fusion hands on to its readers stays as it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..ir import expr as ex
from ..ir.expr import Index
from ..ir.loops import Extern, Loop, Node, Pointwise, Program, View, loop_vars, reads, writes
from .concatenation_regions import Region, moved_loop, region_of


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
        region = region_of(sharing.buffers, copy)
        if region is None or sharing.buffers[region.part].kind != "temp":
            continue
        if sharing.is_free(k, region) and not sharing.is_forwarded(k, region):
            sharing.share(k, region)
    return sharing.program()


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

    def is_free(self, copy: int, region: Region) -> bool:
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

    def is_forwarded(self, copy: int, region: Region) -> bool:
        """Return whether fusion may forward the value: one node writes it, and others read each element once.

        Fusion refuses readers of a buffer that several nodes write: values would pass through memory.
        """
        users = [n for k in self.touching[region.part] if k != copy and (n := self.nodes[k]) is not None]
        if sum(region.part in writes(n) for n in users) > 1:
            return False
        readers = (n for n in users if region.part in reads(n) and not isinstance(n, Extern))
        numel = self.buffers[region.part].numel
        return any(ex.prod(map(ex.size_of, loop_vars(n))) == numel for n in readers)

    def share(self, copy: int, region: Region) -> None:
        """Let all nodes that use the value use its region, without the copy; change nothing if one cannot."""
        users = [k for k in self.touching[region.part] if k != copy]
        moved: dict[int, Loop] = {}
        for k in users:
            node = self.nodes[k]
            new = moved_loop(node, region) if node is not None and not isinstance(node, Extern) else None
            if new is None:
                return
            moved[k] = new
        for k, new in moved.items():
            self.nodes[k] = new
        self.nodes[copy] = None
        del self.buffers[region.part], self.touching[region.part]
        self.touching[region.whole] = sorted({*self.touching[region.whole], *users} - {copy})
