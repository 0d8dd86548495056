"""Find the values of a graph that may share memory, and those whose memory the graph writes or returns.

The answer is for graphs of ATen operators and of Python functions alike: a call whose schema is unknown may return any
of its arguments, and may keep them in its result.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ..aten.mutates import is_mutable
from ..aten.view import declares_alias, is_view_operator, returns_new_memory
from . import attention_mask


class Aliases:
    """Groups of values that may share memory, as they were when this object was made."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Node, Node] = {}
        self._written: set[Node] = set()
        self._returned: set[Node] = set()
        for n in graph.nodes:
            if n.op != "output" and _shares(n):
                for source in n.all_input_nodes:
                    self._parent[self._root(source)] = self._root(n)
        for n in graph.nodes:
            if n.op == "output":
                self._returned |= {self._root(a) for a in n.all_input_nodes}
            else:
                self._written |= {self._root(a) for a in written_by(n)}

    def _root(self, n: Node) -> Node:
        while n in self._parent and self._parent[n] is not n:
            n = self._parent[n]
        return n

    def written(self, n: Node) -> bool:
        """Return whether the graph may write to the memory of a value."""
        return self._root(n) in self._written

    def returned(self, n: Node) -> bool:
        """Return whether the graph may return the memory of a value."""
        return self._root(n) in self._returned

    def may_become(self, fresh: Node, source: Node) -> bool:
        """Return whether a value with memory of its own may share that of another value with equal elements."""
        return not (self.written(fresh) or self.written(source) or self.returned(fresh))


def is_guard(n: Node) -> bool:
    """Return whether a node is the call that checks the inputs of an exported program."""
    return n.op == "call_module" and n.target == "_guards_fn"


def _shares(n: Node) -> bool:
    """Return whether the result of a node may share memory with an argument."""
    if is_guard(n) or returns_new_memory(n.target):
        return False
    if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
        return declares_alias(n.target) or is_view_operator(n.target)
    return n.op in ("call_function", "call_method", "call_module")


def written_by(n: Node) -> list[Node]:
    """Return the arguments that a node may write to; all of them for a module or a higher-order operator."""
    if is_guard(n):
        return []
    if n.op == "call_module" or isinstance(n.target, torch._ops.HigherOrderOperator):
        return list(n.all_input_nodes)
    if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
        return _annotated(n) if is_mutable(n.target) else []
    called = n.op in ("call_function", "call_method") and n.target is not operator.getitem
    return list(n.all_input_nodes) if called and (attention_mask.writes_in_place(n) or n.target is setattr) else []


def _annotated(n: Node) -> list[Node]:
    """Return the arguments that the schema of a call says it writes."""
    assert isinstance(n.target, torch._ops.OpOverload)
    written: list[Node] = []
    for k, a in enumerate(n.target._schema.arguments):
        value = n.args[k] if k < len(n.args) else n.kwargs.get(a.name)
        if a.alias_info is not None and a.alias_info.is_write:
            written += [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Node)]
    return written
