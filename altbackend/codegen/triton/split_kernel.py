"""A fused kernel that tiles cannot express becomes one kernel for each of its nodes."""

from __future__ import annotations

from ...debug.trace import DecisionKind
from ...errors import Unsupported
from ...ir.loops import Program
from ...schedule import kernel
from ...schedule.deps import Deps
from ...schedule.device import Target
from ...schedule.fusion import fuse
from ...schedule.fusion.fuse import Decision
from ...schedule.kernel import Kernel
from . import print_triton
from .print_triton import TritonKernel

Emitted = tuple[Kernel, TritonKernel, tuple[str, ...]]


def emit(p: Program, deps: Deps, k: Kernel, target: Target, decision: Decision) -> list[Emitted]:
    """The Triton kernels of a scheduled kernel in the order of their launches, with the buffers that they take.

    Raises Unsupported where a single node has no kernel.
    """
    try:
        return [(k, *print_triton.emit(p, k, target))]
    except Unsupported as why:
        if len(k.members) < 2 or k.matmul is not None:
            raise
        decision(DecisionKind.KERNEL, ", ".join(p.nodes[n].out for n in k.members), "one kernel per node", str(why))  # type: ignore[union-attr]
    parts = [kernel.build(p, deps, g, target) for g in fuse.apart(p, k.members, target)]
    return [(part, *print_triton.emit(p, part, target)) for part in parts]
