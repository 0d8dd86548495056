"""Find kernels that Triton's tiles cannot express, and split them into kernels of single nodes."""

from __future__ import annotations

from collections.abc import Iterator

from ....debug.trace import DecisionKind
from ....ir import expr as ex
from ....ir import value as va
from ....ir.loops import Extern, Program, Scatter
from ....ir.ops import ATOMIC, OPS, triton_spelling
from ....ir.value import Value
from ...deps import Deps
from ...device import Device
from ...fusion.group import Decision, open_group
from ...kernel import Kernel, build
from ...loop_mapping import MappedNode, Refusal


def expressible_kernels(p: Program, deps: Deps, k: Kernel, device: Device, decide: Decision) -> list[Kernel]:
    """Return the kernel, or a kernel for each of its nodes where tiles cannot express it as a whole.

    A single node that tiles cannot express stays; the printer raises Unsupported for it.
    """
    refusal = inexpressible(k)
    if refusal is None or len(k.members) < 2 or k.matmul is not None:
        return [k]
    outs = [node.out for n in k.members if not isinstance(node := p.nodes[n], Extern)]
    decide(DecisionKind.KERNEL, ", ".join(outs), "one kernel per node", refusal.reason)
    return [build(p, deps, open_group(n, n, p.nodes[n], device), device) for n in k.members]


def inexpressible(k: Kernel) -> Refusal | None:
    """Return a refusal if an operator of the kernel has no Triton form."""
    for q in k.nodes:
        if (refusal := _inexpressible_store(q)) is not None:
            return refusal
        for v in _operators(q):
            dtype = v.dtype if v.op == "where" else v.args[0].dtype
            if not triton_spelling(v.op, dtype):
                return Refusal(f"{v.op} has no Triton form for {str(dtype).removeprefix('torch.')}")
    return None


def _inexpressible_store(q: MappedNode) -> Refusal | None:
    node, dtype = q.node, q.value.dtype
    if not isinstance(node, Scatter) or node.mode == "set" or dtype in ATOMIC.get(node.mode, ()):
        return None
    return Refusal(f"{node.out} needs an atomic {node.mode} of {str(dtype).removeprefix('torch.')}")


def _operators(q: MappedNode) -> Iterator[Value]:
    """Yield the scalar operators of a node, those of positions included."""
    for root in (q.value, *ex.lookups(q.index)):
        yield from (v for v in va.walk(root) if v.op in OPS and v.args)
