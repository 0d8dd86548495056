"""Names of operators."""

from __future__ import annotations

import functools

import torch

OWN_OPERATORS = ("aten", "prims", "mkldnn", "mkl", "quantized", "_c10d_functional", "c10d_functional")
CACHED_OPERATORS = 4096  # schemas are slow to read, and every pass asks about every node


def words(*lines: str) -> frozenset[str]:
    """Return the set of the words in `lines`, for tables of operator names."""
    return frozenset(" ".join(lines).split())


def operator_name(target: object) -> str:
    """Return the name of an operator without namespace and overload, or "" for a target that is not an operator."""
    return _overload_name(target) if isinstance(target, torch._ops.OpOverload) else ""


def is_foreign(target: object) -> bool:
    """Return whether an operator is not torch's own: its fake kernel may be wrong, and it may raise any error."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in OWN_OPERATORS


def operator_of(name: str) -> torch._ops.OpOverload | None:
    """Return the operator "add.Tensor" of `aten`, or with a namespace "prims::iota.default"; None if it is unknown."""
    namespace, _, rest = name.rpartition("::")
    packet, _, which = rest.partition(".")
    op_packet = getattr(getattr(torch.ops, namespace or "aten"), packet, None)
    return getattr(op_packet, which or "default", None)


@functools.lru_cache(maxsize=CACHED_OPERATORS)
def _overload_name(op: torch._ops.OpOverload) -> str:
    return str(op._schema.name.split("::")[-1])
