"""The costs of saving a value of the forward and of recomputing it in the backward."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

from ..aten.mutates import is_mutable
from ..aten.name import operator_name, words
from ..aten.pointwise import COSTLY, LOOKUPS, is_elementwise
from ..aten.random import is_random
from ..aten.reduction import is_normalisation, is_reduction
from ..aten.view import is_view_operator
from ..runtime import philox
from . import flops

# "view": shares its argument's storage. "point": pointwise, fuses into its readers. "row": a normalisation over rows,
# which fuses too. "total": a reduction. "size": a number. "call": a library call, which is never recomputed.
Kind = Literal["view", "point", "row", "total", "size", "call"]

OPERATIONS_PER_BYTE = 16  # operations that cost as much as saving one byte
MOVED_PER_BYTE = 4  # bytes whose movement costs as much as saving one
SMALL = 4  # a value that is this many times smaller than its operands is saved


@dataclass(frozen=True)
class Speed:
    """The bytes that a device moves in the time of one operation of a matrix product, by the width of its numbers."""

    wide: float = 1 / 12
    half: float = 1 / 150

    def bytes_per_flop(self, itemsize: int) -> float:
        """Return the bytes per operation on numbers of `itemsize` bytes."""
        return self.half if itemsize <= 2 else self.wide


SCATTERS = frozenset({torch.ops.aten.scatter.src, torch.ops.aten.scatter.value})
ONE_NUMBER = words("full full_like zeros zeros_like new_zeros ones ones_like new_ones new_full")

# Random draws that are functions of a seed.
DRAWS: frozenset[object] = frozenset({philox.philox_uniform, philox.philox_normal, philox.philox_integers})


def kind_of(n: Node) -> Kind:
    """Return the kind of a node; an element of a tuple counts as a view of it."""
    if isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
        return "size"
    if n.target is operator.getitem or n.op == "get_attr":
        return "view"
    target = n.target
    if target in DRAWS or target is torch.ops.prims.iota.default:
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
    return "point" if is_elementwise(target) or _is_one_hot(n) else "call"


def _is_one_hot(n: Node) -> bool:
    """Return whether a scatter writes one position of every row of a constant: lowering compares positions instead."""
    if n.target not in SCATTERS:
        return False
    base, dim, positions = n.args[:3]
    if not isinstance(base, Node) or not isinstance(positions, Node) or operator_name(base.target) not in ONE_NUMBER:
        return False
    sizes, rows = ([flops.size_hint(s) for s in n.meta["val"].shape] for n in (base, positions))  # hints add no guards
    if sizes:
        sizes[dim] = 1  # type: ignore[index]
    return sizes == rows


def tensors_of(n: Node) -> list[torch.Tensor]:
    """Return the fake tensors of a node, several for a tuple."""
    val = n.meta.get("val")
    return [x for x in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(x, torch.Tensor)]


def numel(n: Node) -> int:
    """Return the number of elements of a node's tensor, the largest of several."""
    return max((flops.size_hint(x.numel()) for x in tensors_of(n)), default=0)


def nbytes(n: Node) -> int:
    """Return the bytes of a node's tensors, the sum of several."""
    return sum(flops.size_hint(x.numel()) * x.dtype.itemsize for x in tensors_of(n))


def widest(n: Node) -> int:
    """Return the bytes of the widest number of a node's tensors."""
    return max((x.dtype.itemsize for x in tensors_of(n)), default=4)


def recompute_cost(n: Node, kind: Kind, speed: Speed) -> int:
    """Return the cost of recomputing a value, in bytes whose saving costs as much.

    Pointwise work is fused into its readers. A library call reads and writes memory, and takes time for its operations.
    """
    if kind in ("view", "size"):
        return 0
    if kind == "call":
        moved = nbytes(n) + sum(map(nbytes, n.all_input_nodes))
        return max(moved, int(flops.of_call(n) * speed.bytes_per_flop(widest(n)))) // MOVED_PER_BYTE
    name = operator_name(n.target)
    operand_numel = max((numel(a) for a in n.all_input_nodes), default=0)
    steps = {"row": 12, "total": 2}.get(kind, 4 if name in COSTLY | LOOKUPS else 1)
    steps = 60 if n.target in DRAWS else steps
    elements = max(numel(n), operand_numel) if kind in ("row", "total") else numel(n)
    return elements * steps // OPERATIONS_PER_BYTE


def is_repeatable(n: Node) -> bool:
    """Return whether a library call may run again with the same result and no effect."""
    return (
        isinstance(n.target, torch._ops.OpOverload)
        and n.target.namespace == "aten"
        and not is_mutable(n.target)
        and not _draws(n)
        and not n.is_impure()
    )


def _draws(n: Node) -> bool:
    """Return whether a call draws random numbers. Fused attention does so only with a dropout."""
    if not is_random(n.target):
        return False
    assert isinstance(n.target, torch._ops.OpOverload)
    names = [a.name for a in n.target._schema.arguments]
    given = {**dict(zip(names, n.args, strict=False)), **n.kwargs}
    return "attention" not in operator_name(n.target) or bool(given.get("dropout_p", 0.0) != 0)
