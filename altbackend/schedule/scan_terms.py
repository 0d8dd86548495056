"""Compute the terms of a scan along neighbours in a loop of their own, which a CPU runs in vectors.

A scan runs element by element. If its loop also computes the elements, it computes them one by one too. On a CPU with
vectors of 8 numbers, `cumsum(x * sigmoid(x))` over rows of 192 elements then takes 3.8 times as long.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.loops import Buffer, Node, Pointwise, Program, Scan
from ..ir.value import Value
from .device import Cpu, Device
from .loop_mapping import has_columns

LEAST_FLOPS = 8  # float additions of an element from which on a loop more pays


def separate_terms(p: Program, device: Device) -> Program:
    """Return `p` with the costly terms of scans along neighbours in buffers. On a GPU, tiles hold them: no change."""
    if not isinstance(device, Cpu) or not any(isinstance(n, Scan) and runs_one_by_one(n, n.value) for n in p.nodes):
        return p
    buffers = dict(p.buffers)
    nodes: list[Node] = []
    for node in p.nodes:
        nodes += _separated(node, buffers) if isinstance(node, Scan) and runs_one_by_one(node, node.value) else [node]
    return replace(p, buffers=buffers, nodes=tuple(nodes))


def runs_one_by_one(scan: Scan, terms: Value) -> bool:
    """Return whether a scan along neighbours would compute costly `terms` element by element."""
    return not has_columns(scan) and va.flops(terms) >= LEAST_FLOPS


def _separated(node: Scan, buffers: dict[str, Buffer]) -> list[Node]:
    """Return the terms and their scan; enters the buffer of the terms in `buffers`."""
    loops = tuple(sorted((*node.dims, *node.rdims), key=ex.rank_of))
    sizes = tuple(ex.size_of(v) for v in loops)
    index, name = ex.flatten(sizes, tuple(map(ex.ix, loops))), f"{node.out}_terms"
    strides = tuple(ex.prod(sizes[k + 1 :]) for k in range(len(sizes)))
    buffers[name] = Buffer(name, node.value.dtype, sizes, strides, buffers[node.out].device)
    terms = Pointwise(name, loops, index, node.value, node.origins)
    return [terms, replace(node, value=va.load(name, index, node.value.dtype))]
