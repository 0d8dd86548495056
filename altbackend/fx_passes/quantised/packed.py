"""Packed weights in graphs that others have lowered: operands of oneDNN's quantised operators, and nothing else.

A packed weight has oneDNN's own layout. Tracing sees a strided tensor of the same sizes, so only the calls that take
packed weights may see it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

_PACKED_OPERAND = 3  # of `onednn::qlinear_pointwise` and `onednn::q*conv*_pointwise`
_PACKS = ("qlinear_prepack", "qconv_prepack")


def _name(n: Node) -> str:
    """Return the name of a call of oneDNN's quantised operators, in a captured or a traced graph; else ""."""
    target = n.target if n.op == "call_function" else None
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "onednn":
        return target._opname
    if isinstance(target, torch._ops.OpOverloadPacket) and target._qualified_op_name.startswith("onednn::"):
        return target.__name__
    return ""


def _takes_packed(user: Node, n: Node) -> bool:
    name = _name(user)
    others = [a for k, a in enumerate(user.args) if k != _PACKED_OPERAND]
    at_weight = len(user.args) > _PACKED_OPERAND and user.args[_PACKED_OPERAND] is n and n not in others
    return name.endswith("_pointwise") and name.startswith("q") and at_weight and n not in user.kwargs.values()


def is_packed(n: Node) -> bool:
    """Return whether every use of a node is that of a packed weight of a quantised operator."""
    return bool(n.users) and all(_takes_packed(u, n) for u in n.users)


def mark(gm: GraphModule) -> None:
    """Mark packed weights among the inputs and calls of a traced graph as values that only library calls understand."""
    for n in gm.graph.nodes:
        packs = n.op == "call_function" and _name(n) in _PACKS
        if (n.op == "placeholder" or packs) and is_packed(n):
            n.meta["opaque"] = True
