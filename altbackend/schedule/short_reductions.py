"""Write reductions of few terms as pointwise values: sum of x[i, 0..2] -> x[i, 0] + x[i, 1] + x[i, 2].

Distances between points, areas of boxes and norms of quaternions reduce 2 to 4 numbers. As rows of a kernel, these
reductions keep pointwise values and reductions over other dimensions out of it. TorchInductor also writes out up to 8
terms (`unroll_reductions_threshold`).
"""

from __future__ import annotations

from dataclasses import replace

from ..ir import expr as ex
from ..ir import value as va
from ..ir.expr import Atom, Index
from ..ir.loops import (
    COMBINE,
    MOST_WRITTEN_OUT,
    Extern,
    Loop,
    Node,
    Pointwise,
    Program,
    Reduction,
    reads,
    writes,
    written_out,
)
from .device import Device, Gpu
from .rows import estimate

MOST_FLOPS = 256  # float additions of all terms


def write_out_short_reductions(p: Program, device: Device) -> Program:
    """Return `p` for a GPU with its short reductions as pointwise nodes, where no reader shares their rows.

    A reduction of what another loop computes stays a reduction: it runs in the kernel that computes its terms.
    """
    if not isinstance(device, Gpu) or not any(_is_short(n) for n in p.nodes):
        return p
    computed = {b for n in p.nodes if not isinstance(n, Extern) for b in writes(n)}
    readers: dict[str, list[Node]] = {}
    for n in p.nodes:
        for b in reads(n):
            readers.setdefault(b, []).append(n)

    def suits(n: Reduction) -> bool:
        direct = readers.get(n.out, [])
        functions = [b for r in direct if isinstance(r, Pointwise) and _points(r) == _results(n) for b in writes(r)]
        users = [*direct, *(r for b in functions for r in readers.get(b, ()))]
        return computed.isdisjoint(_large(p, n)) and not any(_repeats(p, r, n) for r in users)

    nodes = [_written_out(p, n) if isinstance(n, Reduction) and _is_short(n) and suits(n) else n for n in p.nodes]
    return replace(p, nodes=tuple(nodes))


def _is_short(n: Node) -> bool:
    if not isinstance(n, Reduction) or not n.dims or n.op not in COMBINE:
        return False
    terms = ex.prod(ex.size_of(v) for v in n.rdims)
    return isinstance(terms, int) and 0 < terms <= MOST_WRITTEN_OUT and va.flops(n.value) * terms <= MOST_FLOPS


def _large(p: Program, n: Reduction) -> frozenset[str]:
    """Return the operands that have at least as many elements as `n` has results."""
    results = estimate(_results(n))
    return frozenset(b for b in reads(n) if estimate(p.buffers[b].numel) >= results)


def _repeats(p: Program, reader: Node, n: Reduction) -> bool:
    """Return whether `reader` uses results of `n` more than once beside large operands of `n`, as normalisations do.

    It may use functions of the results instead. One kernel of rows then reads the operands once for both.
    """
    if isinstance(reader, Extern) or _points(reader) == _results(n):
        return False
    return not _large(p, n).isdisjoint(reads(reader))


def _results(n: Reduction) -> Index:
    return ex.prod(ex.size_of(v) for v in n.dims)


def _points(n: Loop) -> Index:
    rdims: tuple[Atom, ...] = () if isinstance(n, Pointwise) else getattr(n, "rdims", ())
    return ex.prod(ex.size_of(v) for v in (*n.dims, *rdims))


def _written_out(p: Program, n: Reduction) -> Pointwise:
    total = written_out(n.op, n.value, n.rdims)
    dims = sorted(n.dims, key=lambda v: -_stride(n.index, v))
    return Pointwise(n.out, tuple(dims), n.index, va.cast(total, p.buffers[n.out].dtype), n.origins)


def _stride(index: Index, v: Atom) -> int:
    stride = ex.coefficient(index, v)
    return stride if isinstance(stride, int) else ex.bounds(stride)[1] if stride is not None else 0
