"""The costs of saving a value of the forward and of recomputing it in the backward."""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch.fx import Node

from ..aten.mutates import is_mutable
from ..aten.name import operator_name
from ..aten.pointwise import COSTLY, LOOKUPS, is_elementwise
from ..aten.random import is_random
from ..aten.reduction import is_normalisation, is_reduction
from ..aten.view import is_view_operator
from ..runtime import philox

# "view": shares its argument's storage. "point": pointwise, fuses into its readers. "row": a normalisation over rows,
# which fuses too. "total": a reduction. "size": a number. "call": a library call, which is never recomputed.
Kind = Literal["view", "point", "row", "total", "size", "call"]

OPERATIONS_PER_BYTE = 16  # operations that cost as much as saving one byte
SMALL = 4  # a value that is this many times smaller than its operands is saved


# Random draws that are functions of a seed.
_DRAWS: frozenset[Any] = frozenset({philox.philox_uniform, philox.philox_normal, philox.philox_integers})


def kind_of(n: Node) -> Kind:
    """Return the kind of a node; an element of a tuple counts as a view of it."""
    if isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
        return "size"
    if n.target is operator.getitem or n.op == "get_attr":
        return "view"
    target = n.target
    if target in _DRAWS:
        return "point"
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or is_random(target):
        return "call"
    if is_view_operator(target):
        return "view"
    if is_mutable(target):
        return "call"
    if is_normalisation(target):
        return "row"
    if is_reduction(target):
        return "total"
    return "point" if is_elementwise(target) else "call"


def hint(x: Any) -> int:
    """Return a size as a number: the hint of a symbolic size, 4096 for an unbacked one."""
    if isinstance(x, int):
        return x
    example = getattr(x.node, "hint", None)
    return int(example) if isinstance(example, int) else 4096


def tensors_of(n: Node) -> list[torch.Tensor]:
    """Return the fake tensors of a node, several for a tuple."""
    val = n.meta.get("val")
    return [x for x in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(x, torch.Tensor)]


def numel(n: Node) -> int:
    """Return the number of elements of a node's tensor, the largest of several."""
    return max((hint(x.numel()) for x in tensors_of(n)), default=0)


def nbytes(n: Node) -> int:
    """Return the bytes of a node's tensors, the sum of several."""
    return sum(hint(x.numel()) * x.dtype.itemsize for x in tensors_of(n))


def recompute_cost(n: Node, kind: Kind) -> int:
    """Return the cost of recomputing a value, fused into its readers, in bytes whose saving costs as much."""
    if kind in ("view", "size"):
        return 0
    name = operator_name(n.target)
    operand_numel = max((numel(a) for a in n.all_input_nodes), default=0)
    steps = {"row": 12, "total": 2}.get(kind, 4 if name in COSTLY | LOOKUPS else 1)
    steps = 60 if n.target in _DRAWS else steps
    elements = max(numel(n), operand_numel) if kind in ("row", "total") else numel(n)
    return elements * steps // OPERATIONS_PER_BYTE
