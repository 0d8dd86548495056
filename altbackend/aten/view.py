"""Operators whose result shares storage with an argument.

An operator's schema declares it with an alias annotation of a result: `t(Tensor(a) self) -> Tensor(a)`. In-place
operators have such results too: `copy_(Tensor(a!) self, ...) -> Tensor(a!)`.
"""

from __future__ import annotations

import functools
import operator

import torch
from torch.fx import Node

from .mutates import is_mutable, is_write_back
from .name import CACHED_OPERATORS, operator_name, words

# Operators that return a view if the strides allow it, else a copy, and whose schema declares neither.
UNDECLARED = words("_unsafe_view reshape")


def returns_new_memory(target: object) -> bool:
    """Return whether a function says by an attribute that its results share no memory with its arguments."""
    return bool(getattr(target, "returns_new_memory", False))


def declares_alias(target: object) -> bool:
    """Return whether the schema of a target declares a result that shares storage with an argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info for r in schema.returns)


def is_view_operator(target: object) -> bool:
    """Return whether an operator returns views of an argument and writes nothing."""
    return _is_view_overload(target) if isinstance(target, torch._ops.OpOverload) else _is_view(target)


@functools.lru_cache(maxsize=CACHED_OPERATORS)
def _is_view_overload(op: torch._ops.OpOverload) -> bool:
    return _is_view(op)


def _is_view(target: object) -> bool:
    return (declares_alias(target) and not is_mutable(target)) or operator_name(target) in UNDECLARED


def is_view(n: Node) -> bool:
    """Return whether a node is a view of its first argument, or an element of a tuple."""
    return n.op == "call_function" and (n.target is operator.getitem or is_view_operator(n.target))


def may_alias(n: Node) -> bool:
    """Return whether the result of a call may share storage with an argument; True for targets without a schema."""
    if n.op != "call_function":
        return False
    if returns_new_memory(n.target):
        return False
    return not hasattr(n.target, "_schema") or declares_alias(n.target)


def passes_storage_on(n: Node) -> bool:
    """Return whether a node's result is its first argument's storage: a view, or the write-back to an input."""
    return is_view(n) or is_write_back(n)


def storage_owner(n: Node) -> Node:
    """Return the node that owns the storage of `n`. A tensor among several results of a call owns its storage."""
    while n.op == "call_function" and passes_storage_on(n) and n.args:
        source = n.args[0]
        if not isinstance(source, Node) or (n.target is operator.getitem and not passes_storage_on(source)):
            break
        n = source
    return n


def aliased_arguments(n: Node, written: bool = False) -> list[Node]:
    """Return the argument nodes whose storage the results of a call may share, by its schema.

    `written`: return those that the call writes. A target without a schema may alias all its arguments.
    """
    schema = getattr(n.target, "_schema", None)
    if returns_new_memory(n.target):
        return []
    if schema is None:
        return n.all_input_nodes
    nodes: list[Node] = []
    for k, a in enumerate(schema.arguments):
        if a.alias_info and (a.alias_info.is_write or not written):
            torch.fx.node.map_arg(n.args[k] if k < len(n.args) else n.kwargs.get(a.name), nodes.append)
    return nodes
