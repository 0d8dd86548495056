"""All rewrites of a graph together, up to a fixed point."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule

from ..fx_passes import attention_mask, cse
from . import loops, peephole
from .constants import Propagation
from .module import Program, drop_unread, graph_module

ROUNDS = 8


def optimize(
    program: Program, *, unroll_non_constant_loops: bool = False, const_prop_user_classes: bool = False
) -> GraphModule:
    """Remove dead code and equal calls, apply local rules and fold constants, until nothing changes.

    Return the module, which is changed in place. Parameters and buffers are no constants, since they may change;
    `freeze_module` makes them constants. `unroll_non_constant_loops`: unroll each `while_loop` by two.
    `const_prop_user_classes`: also make objects of classes of yours from constants, once; they must not change
    afterwards. Raise TypeError for an object without a graph.
    """
    gm = graph_module(program)
    if unroll_non_constant_loops:
        loops.unroll(gm)
    fixed_point(gm, {}, const_prop_user_classes)
    gm.graph.lint()
    gm.recompile()
    return gm


def fixed_point(gm: GraphModule, constants: Mapping[str, object], user_classes: bool = False) -> int:
    """Apply all rewrites until nothing changes; return their number. `constants`: attributes that never change."""
    total = 0
    for _ in range(ROUNDS):
        count = drop_unread(gm) + merge_equal(gm) + peephole.apply(gm, addmm_fusion=False, shape_peepholes=True)
        count += Propagation(gm, constants, user_classes).run() + drop_unread(gm)
        total += count
        if not count:
            break
    return total


def merge_equal(gm: GraphModule) -> int:
    """Merge equal calls of a graph whose writes all have a schema; return their number."""
    for n in gm.graph.nodes:
        by_name = not isinstance(n.target, torch._ops.OpOverload) and n.op in ("call_function", "call_method")
        if by_name and attention_mask.writes_in_place(n):
            return 0
    return cse.eliminate(gm.graph)
