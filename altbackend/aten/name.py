"""Names of operators."""

from __future__ import annotations

import torch


def words(*lines: str) -> frozenset[str]:
    """Return the set of the words in `lines`, for tables of operator names."""
    return frozenset(" ".join(lines).split())


def operator_name(target: object) -> str:
    """Return the name of an operator without namespace and overload, or "" for a target that is not an operator."""
    return str(target._schema.name.split("::")[-1]) if isinstance(target, torch._ops.OpOverload) else ""
