"""Equal calls of a functional graph made once (value numbering: Cocke and Schwartz, 1970)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

from . import cost


def merge_repeats(graph: Graph) -> int:
    """Replace each call by an equal one before it, in place; gives how many are gone.

    Two calls stay apart if either draws random numbers or leaves memory uninitialised, if a write stands between them,
    or if the second's memory is among the results: results that eager keeps apart must not share.
    """
    known: dict[Hashable, Node] = {}
    results = {s for n in graph.output_node().all_input_nodes if (s := _storage(n)) is not None}
    gone = 0
    for n in list(graph.nodes):
        if n.op != "call_function":
            continue
        if _writes(n):
            known.clear()
            continue
        if cost.is_random(n) or "empty" in cost.name_of(n) or n.meta.get("unbacked_bindings") or _storage(n) in results:
            continue
        try:
            first = known.setdefault((n.target, _numbered(n.args), _numbered(n.kwargs)), n)
        except TypeError:  # an argument that cannot be compared
            continue
        if first is not n:
            n.replace_all_uses_with(first)
            graph.erase_node(n)
            gone += 1
    return gone


def _numbered(x: Any) -> Hashable:
    """A value under which equal arguments are found; 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(x, Node):
        return x
    if isinstance(x, (tuple, list)):
        return (type(x), *map(_numbered, x))
    if isinstance(x, dict):
        return tuple((k, _numbered(v)) for k, v in x.items())
    if isinstance(x, slice):
        return (slice, _numbered(x.start), _numbered(x.stop), _numbered(x.step))
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(x), x.node.expr)
    if isinstance(x, (float, complex)):
        return (type(x), repr(x))
    hash(x)
    return (type(x), x)


def _storage(n: Node) -> Any:
    """What tells a tensor's memory from others', None for what has none."""
    held = n.meta.get("val")
    if not isinstance(held, torch.Tensor) or held.layout != torch.strided:
        return None
    return held.untyped_storage()._cdata


def _writes(n: Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable
