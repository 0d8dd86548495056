"""The costs of saving a value of the forward and of recomputing it in the backward."""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch.fx import Node

from ..runtime import philox

# "view": shares its argument's storage. "point": pointwise, fuses into its readers. "row": a normalisation over rows,
# which fuses too. "total": a reduction. "size": a number. "call": a library call, which is never recomputed.
Kind = Literal["view", "point", "row", "total", "size", "call"]

OPERATIONS_PER_BYTE = 16  # operations that cost as much as saving one byte
SMALL = 4  # a value that is this many times smaller than its operands is saved


def _words(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


_ROWS = _words("_softmax _log_softmax native_layer_norm native_group_norm logsumexp native_batch_norm_backward")
_TOTALS = _words(
    "sum mean amax amin max min argmax argmin prod any all var var_mean std std_mean linalg_vector_norm count_nonzero"
)
# Pointwise operators that lack torch's tag, and operators that only move elements.
_POINTS = _words(
    "_to_copy cat hardswish hardswish_backward hardsigmoid hardsigmoid_backward leaky_relu_backward tril triu full",
    "full_like zeros_like ones_like new_zeros zeros ones scalar_tensor arange iota fill copy constant_pad_nd clone",
    "select_backward slice_backward select_scatter slice_scatter lift_fresh_copy repeat roll flip empty empty_like",
    "empty_strided",
)
_LOOKUPS = _words("index _unsafe_index gather embedding index_select")
_COSTLY = _words(
    "exp expm1 log log1p log2 tanh sigmoid erf erfc gelu gelu_backward silu silu_backward pow sin cos tan softplus",
    "mish tanh_backward sigmoid_backward rsqrt sqrt div",
)
# Random draws that are functions of a seed.
_DRAWS: frozenset[Any] = frozenset(
    {philox.philox_uniform, philox.philox_normal, philox.philox_integers}
)  # functions of a seed
_UNTAGGED_VIEWS = _words("_unsafe_view reshape")


def name_of(n: Node) -> str:
    """Return the name of an operator without its overload, or "" for a target that is not an operator."""
    return str(n.target._schema.name.split("::")[-1]) if isinstance(n.target, torch._ops.OpOverload) else ""


def is_random(n: Node) -> bool:
    """Return whether a call draws random numbers."""
    return isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in n.target.tags


def kind_of(n: Node) -> Kind:
    """Return the kind of a node; an element of a tuple counts as a view of it."""
    if isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
        return "size"
    if n.target is operator.getitem or n.op == "get_attr":
        return "view"
    target, name = n.target, name_of(n)
    if target in _DRAWS:
        return "point"
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or is_random(n):
        return "call"
    if name in _UNTAGGED_VIEWS or any(r.alias_info is not None for r in target._schema.returns):
        return "call" if target._schema.is_mutable else "view"
    if name in _ROWS:
        return "row"
    if name in _TOTALS and not (name in ("max", "min") and target._overloadname == "other"):
        return "total"
    return "point" if torch.Tag.pointwise in target.tags or name in _POINTS | _LOOKUPS else "call"


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
    name = name_of(n)
    operand_numel = max((numel(a) for a in n.all_input_nodes), default=0)
    steps = {"row": 12, "total": 2}.get(kind, 4 if name in _COSTLY or name in _LOOKUPS else 1)
    steps = 60 if n.target in _DRAWS else steps
    elements = max(numel(n), operand_numel) if kind in ("row", "total") else numel(n)
    return elements * steps // OPERATIONS_PER_BYTE
