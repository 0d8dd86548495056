"""Dependencies between the nodes of a program, by buffer."""

from __future__ import annotations

from dataclasses import field

from altbackend.lazy_dataclass import dataclass

from ..aten.collective import is_start, is_wait
from ..aten.errors import may_raise
from ..ir import expr as ex
from ..ir import value as va
from ..ir.loops import Extern, Loop, Node, Pointwise, Program, View, reads, symbols_of, writes
from ..runtime.checks import require


@dataclass(frozen=True)
class Deps:
    """Dependencies of a program.

    `before`: for each node the numbers of the nodes that must run earlier. `writers`, `readers`: for each buffer the
    numbers of the nodes that write or read it. `escaping`: buffers that live longer than the program runs. `raising`:
    nodes that raise errors of the data. Eager raises them before later writes of inputs.
    """

    before: tuple[frozenset[int], ...]
    writers: dict[str, tuple[int, ...]]
    readers: dict[str, tuple[int, ...]]
    escaping: frozenset[str]
    raising: frozenset[int]


@dataclass
class _Analysis:
    """Reads, writes, aliases and definitions of the nodes so far.

    `last_effect`: the latest node with an effect, `last_start`: the latest that starts a collective. `under_way`: the
    operands of a collective by its results. `raising`: nodes that raise errors of the data.
    """

    program: Program
    writers: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    definer: dict[str, int] = field(default_factory=dict)
    last_effect: int = -1
    last_start: int = -1
    under_way: dict[str, tuple[str, ...]] = field(default_factory=dict)
    raising: list[int] = field(default_factory=list)

    def add(self, k: int, node: Node) -> frozenset[int]:
        """Enter node number `k` and return the numbers of the nodes that must run before it."""
        edges = self._definers(node)
        for name in reads(node):
            for buffer in (name, *self.aliases.get(name, ())):
                edges.update(self.writers.get(buffer, ()))
                self.readers.setdefault(buffer, []).append(k)
        for name in writes(node):
            disjoint = isinstance(node, Pointwise) and self.program.buffers[name].kind == "temp"
            if not disjoint:
                edges.update(self.writers.get(name, ()))
            edges.update(self.readers.get(name, ()))
            if self.program.buffers[name].kind == "input":  # eager writes nothing after an error
                edges |= {self.last_effect, *self.raising} - {-1}
            self.writers.setdefault(name, []).append(k)
        if isinstance(node, Extern):
            edges |= self._add_call(k, node)
        elif self._reports(node):
            self.raising.append(k)
        return frozenset(edges - {k})

    def _reports(self, node: Loop) -> bool:
        """Return whether the host raises an error that the node's kernel may report: kernels of a CPU report them."""
        on_cpu = self.program.buffers[node.out].device.type == "cpu"
        return on_cpu and (va.may_raise(node.value) or any(map(va.may_raise, ex.lookups(node.index))))

    def _definers(self, node: Node) -> set[int]:
        """Return the calls that define the symbols of `node`."""
        if not self.definer:
            return set()
        return {self.definer[s] for s in symbols_of(self.program, node) if s in self.definer}

    def _add_call(self, k: int, node: Extern) -> set[int]:
        self.definer.update(dict.fromkeys(node.defines, k))
        if node.target is require:  # later nodes rely on the check
            checked = (s for s in symbols_of(self.program, node) if s in self.definer)
            self.definer.update(dict.fromkeys(checked, k))
        for out in node.outs:
            if out and node.aliases:
                origins = (b for a in node.aliases for b in (a, *self.aliases.get(a, ())))
                self.aliases[out] = tuple(dict.fromkeys(origins))
        edges: set[int] = set()
        if is_start(node.target):  # all processes start collectives in one order
            edges |= {self.last_start} - {-1}
            self.last_start = k
            self.under_way.update({o: tuple(reads(node)) for o in node.outs if o})
        if is_wait(node.target):  # the collective has read its operands only when the wait returns
            for buffer in (b for result in reads(node) for b in self.under_way.get(result, ())):
                self.readers.setdefault(buffer, []).append(k)
        if may_raise(node.target):
            self.raising.append(k)
        if not has_effect(node):
            return edges
        edges |= {self.last_effect} - {-1}
        self.last_effect = k
        return edges


def analyse(p: Program) -> Deps:
    """Return the read-after-write, write-after-read and write-after-write dependencies of a program.

    Several writers of one temporary fill disjoint regions (a concatenation), so that they need no order among
    themselves. A library call that aliases a buffer extends every read of its result to the aliased buffer.
    """
    analysis = _Analysis(p)
    before = tuple([analysis.add(k, node) for k, node in enumerate(p.nodes)])
    escaping = {o.buffer for o in p.outputs if isinstance(o, View)}
    escaping |= {b.name for b in p.buffers.values() if b.kind != "temp"}
    for b in list(escaping):
        escaping.update(analysis.aliases.get(b, ()))
    writers = {name: tuple(numbers) for name, numbers in analysis.writers.items()}
    readers = {name: tuple(numbers) for name, numbers in analysis.readers.items()}
    return Deps(before, writers, readers, frozenset(escaping), frozenset(analysis.raising))


def has_effect(node: Extern) -> bool:
    """Return whether the call's order matters beyond its buffers: random numbers, in-place and unknown operators."""
    tags = getattr(node.target, "tags", None)
    if tags is None or node.mutates or not any(node.outs):
        return True
    return "nondeterministic_seeded" in str(tags)
