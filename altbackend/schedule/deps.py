"""Dependencies between the nodes of a program, by buffer."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.loops import Extern, Pointwise, Program, View, reads, symbols_of, writes
from ..runtime.checks import require


@dataclass(frozen=True)
class Deps:
    """Per node number: numbers of the nodes that must run earlier; per buffer: writers and readers."""

    before: tuple[frozenset[int], ...]
    writers: dict[str, tuple[int, ...]]
    readers: dict[str, tuple[int, ...]]
    escaping: frozenset[str]


def analyse(p: Program) -> Deps:
    """Read-after-write, write-after-read and write-after-write edges.

    Several writers of one temporary fill disjoint regions (a concatenation), so they are not ordered among
    themselves. A library call that aliases a buffer extends every read of its result to the aliased buffer.
    """
    writers: dict[str, list[int]] = {}
    readers: dict[str, list[int]] = {}
    before: list[frozenset[int]] = []
    alias: dict[str, tuple[str, ...]] = {}
    defined: dict[str, int] = {}
    last_effect = -1
    for k, node in enumerate(p.nodes):
        edges = {defined[s] for s in symbols_of(p, node) if s in defined} if defined else set()
        read = [r for name in reads(node) for r in (name, *alias.get(name, ()))]
        for name in read:
            edges.update(writers.get(name, ()))
            readers.setdefault(name, []).append(k)
        for name in writes(node):
            disjoint = isinstance(node, Pointwise) and p.buffers[name].kind == "temp"
            if not disjoint:
                edges.update(writers.get(name, ()))
            edges.update(readers.get(name, ()))
            if last_effect >= 0 and p.buffers[name].kind == "input":
                edges.add(last_effect)  # it may be a check that raises
            writers.setdefault(name, []).append(k)
        if isinstance(node, Extern):
            defined.update(dict.fromkeys(node.defines, k))
            if node.target is require:  # what comes later counts on it
                defined.update(dict.fromkeys((s for s in symbols_of(p, node) if s in defined), k))
            for out in node.outs:
                if out and node.aliases:
                    alias[out] = tuple(dict.fromkeys(b for a in node.aliases for b in (a, *alias.get(a, ()))))
            if has_effect(node):
                if last_effect >= 0:
                    edges.add(last_effect)
                last_effect = k
        before.append(frozenset(edges - {k}))
    escaping = {o.buffer for o in p.outputs if isinstance(o, View)}
    escaping |= {b.name for b in p.buffers.values() if b.kind != "temp"}
    for b in list(escaping):
        escaping.update(alias.get(b, ()))
    return Deps(
        tuple(before),
        {k: tuple(v) for k, v in writers.items()},
        {k: tuple(v) for k, v in readers.items()},
        frozenset(escaping),
    )


def has_effect(node: Extern) -> bool:
    """Calls whose order matters beyond their buffers: random numbers, in-place and unknown operators."""
    import_safe = getattr(node.target, "tags", None)
    if import_safe is None or node.mutates or not any(node.outs):
        return True
    return "nondeterministic_seeded" in str(import_safe)
