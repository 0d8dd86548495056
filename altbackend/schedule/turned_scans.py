"""Run loops that read a scan backwards the other way, so that they read it as it runs and share its kernel on a GPU.

The gradient of a cumulative sum is such a scan: `flip(cumsum(flip(g)))`. A loop over independent points runs in any
order. With n - 1 - v in place of its loop v

    y[v] = f(s[n - 1 - v])    becomes    y[n - 1 - v] = f(s[v])

"""

from __future__ import annotations

from dataclasses import replace

from altbackend.lazy_dataclass import dataclass

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import Node, Pointwise, Program, Reduction, Scan
from .device import Device, Gpu


@dataclass(frozen=True)
class _Run:
    """The steps in which a scan fills a buffer: so many, each a stride further."""

    steps: Index
    stride: Index


def turn_readers(p: Program, device: Device) -> Program:
    """Return `p` with loops turned that read a scan backwards. On a CPU, where a scan runs alone, nothing changes."""
    if not isinstance(device, Gpu) or not any(isinstance(n, Scan) for n in p.nodes):
        return p
    runs: dict[str, _Run] = {}
    nodes: list[Node] = []
    for node in p.nodes:
        turned = _turned(node, runs)
        if turned is node and (run := _run_of(node, runs)) is not None:
            runs[run[0]] = run[1]
        nodes.append(turned)
    return replace(p, nodes=tuple(nodes))


def _run_of(node: Node, runs: dict[str, _Run]) -> tuple[str, _Run] | None:
    """Return what a scan fills, or points that read it as it runs: a scan in 16 bits is rounded by such points."""
    if isinstance(node, Scan):
        loops = list(node.rdims)
    elif isinstance(node, Pointwise) and (reads := _reads(node, runs)):
        loops = [v for v in node.dims if all(_step(run, i, v) == run.stride for run, i in reads)]
    else:
        return None
    stride = ex.coefficient(node.index, loops[0]) if loops else None
    return None if stride is None or stride == 0 else (node.out, _Run(ex.size_of(loops[0]), stride))


def _turned(node: Node, runs: dict[str, _Run]) -> Node:
    """Return a node with the loop turned that reads every scan from its end to its beginning."""
    if not isinstance(node, Pointwise | Reduction) or (isinstance(node, Reduction) and node.op.startswith("arg")):
        return node
    reads = _reads(node, runs)
    loops = (*node.dims, *(node.rdims if isinstance(node, Reduction) else ()))
    for v in loops if reads else ():
        if all((step := _step(run, i, v)) is not None and ex.add(step, run.stride) == 0 for run, i in reads):
            env = {v: ex.sub(ex.sub(ex.size_of(v), 1), ex.ix(v))}
            return replace(node, index=ex.substitute(node.index, env), value=node.value.substitute(env))
    return node


def _reads(node: Pointwise | Reduction, runs: dict[str, _Run]) -> list[tuple[_Run, Index]]:
    return [(runs[b], index) for b, index in va.loads(node.value) if b in runs]


def _step(run: _Run, index: Index, loop: Atom) -> Index | None:
    """Return by how much an iteration of `loop` moves an access; None for a loop of other steps than the scan's."""
    return ex.coefficient(index, loop) if ex.size_of(loop) == run.steps else None
