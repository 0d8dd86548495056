"""Operators that compare tensors for equality."""

from __future__ import annotations

import torch
from torch.fx import Node

from .view import passes_storage_on

aten = torch.ops.aten
EQUALITIES = frozenset({aten.eq.Tensor, aten.ne.Tensor})
EXTREMA = frozenset({aten.amax.default, aten.amin.default})


def is_compared_exactly(node: Node) -> bool:
    """Return whether an equality of two tensors reads the floating-point result of `node`, itself or through a view.

    Two computations of one value may differ in the last bit, because kernels round and contract differently. The
    gradient of `amax` counts the elements that equal the maximum and divides by their number. Such a value is
    therefore computed once, stored, and read by all.
    """
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and _reads(node, EQUALITIES)


def is_searched(node: Node) -> bool:
    """Return whether an extremum reads the floating-point result of `node`, itself or through a view."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and _reads(node, EXTREMA)


def _reads(node: Node, operators: frozenset[object]) -> bool:
    for user in node.users:
        if user.target in operators:
            return True
        if user.op == "call_function" and passes_storage_on(user) and _reads(user, operators):
            return True
    return False
