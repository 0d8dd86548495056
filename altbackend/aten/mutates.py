"""Operators that write to their arguments, by their schemas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch.fx import Node

from .name import CACHED_OPERATORS


def is_mutable(target: object) -> bool:
    """Return whether an operator writes to an argument; False for a target without a schema."""
    if isinstance(target, torch._ops.OpOverload):
        return _is_mutable_overload(target)
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


@functools.lru_cache(maxsize=CACHED_OPERATORS)
def _is_mutable_overload(op: torch._ops.OpOverload) -> bool:
    return bool(op._schema.is_mutable)


def writes(n: Node) -> bool:
    """Return whether a node is a call that writes to an argument."""
    return n.op == "call_function" and is_mutable(n.target)


def is_write_back(n: Node) -> bool:
    """Return whether a node is the `copy_` with which a functional graph writes a result to an input."""
    return n.target is torch.ops.aten.copy_.default


aten = torch.ops.aten

# Operators that return their first argument with some elements replaced, and the operators that write it instead.
IN_PLACE: Mapping[object, torch._ops.OpOverload] = MappingProxyType(
    {
        aten.index_put.default: aten.index_put_.default,
        aten._unsafe_index_put.default: aten.index_put_.default,
        aten.index_copy.default: aten.index_copy_.default,
        aten.index_add.default: aten.index_add_.default,
        aten.scatter.src: aten.scatter_.src,
        aten.scatter.value: aten.scatter_.value,
        aten.scatter_add.default: aten.scatter_add_.default,
        aten.scatter_reduce.two: aten.scatter_reduce_.two,
        aten.index_reduce.default: aten.index_reduce_.default,
    }
)

# Operators that return their first argument with a view replaced by the second argument, and the view.
VIEW_REPLACED: Mapping[object, torch._ops.OpOverload] = MappingProxyType(
    {
        aten.select_scatter.default: aten.select.int,
        aten.slice_scatter.default: aten.slice.Tensor,
        aten.diagonal_scatter.default: aten.diagonal.default,
    }
)
