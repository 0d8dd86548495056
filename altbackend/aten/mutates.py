"""Operators that write to their arguments, by their schemas."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node


def is_mutable(target: Any) -> bool:
    """Return whether an operator writes to an argument; False for a target without a schema."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def writes(n: Node) -> bool:
    """Return whether a node is a call that writes to an argument."""
    return n.op == "call_function" and is_mutable(n.target)


def is_write_back(n: Node) -> bool:
    """Return whether a node is the `copy_` with which a functional graph writes a result to an input."""
    return n.target is torch.ops.aten.copy_.default
