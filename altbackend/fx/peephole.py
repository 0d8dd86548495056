"""Local rewrites of a graph, up to a fixed point."""

from __future__ import annotations

from torch.fx import GraphModule

from ..fx_passes import idioms
from .module import Program, drop_unread, graph_module

ROUNDS = 16


def peephole(program: Program, *, addmm_fusion: bool = False, shape_peepholes: bool = True) -> GraphModule:
    """Apply all local rules to a graph and return its module, which is changed in place.

    The rules replace queries that have a known answer: `len` of a literal list, or a tensor's dtype, device or rank.
    They replace elements of literal lists and dictionaries. They remove views that cancel and copies that nobody can
    tell from their source, and join adjacent `cat`s. `shape_peepholes`: also queries of sizes, which are those of the
    traced values. `addmm_fusion`: also `mm(a, b) + c` as `addmm`. Raise TypeError for an object without a graph.
    """
    gm = graph_module(program)
    apply(gm, addmm_fusion, shape_peepholes)
    gm.graph.lint()
    gm.recompile()
    return gm


def apply(gm: GraphModule, addmm_fusion: bool, shape_peepholes: bool) -> int:
    """Apply all local rules up to a fixed point; return the number of rewrites."""
    total = 0
    for _ in range(ROUNDS):
        count = len(idioms.apply(gm.graph, addmm=addmm_fusion, shapes=shape_peepholes))
        drop_unread(gm)
        total += count
        if not count:
            break
    return total
