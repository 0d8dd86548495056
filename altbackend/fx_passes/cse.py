"""Common subexpression elimination: equal calls are made once (value numbering: J. Cocke, J. T. Schwartz, 1970)."""

from __future__ import annotations

import operator
from collections.abc import Hashable

import torch
from torch.fx import Graph, Node

from ..aten.mutates import writes
from ..aten.random import is_uninitialised
from ..aten.view import may_alias
from ..compat import torch_api
from ..runtime import philox
from .graph import Purity, val

# Functions of a seed and a shape, so equal calls give equal numbers.
_PURE_FUNCTIONS: frozenset[object] = frozenset({philox.philox_uniform, philox.philox_normal, philox.philox_integers})


def eliminate(graph: Graph) -> int:
    """Replace each call by an equal earlier one, in place; return the number of erased calls.

    A call is not replaced if a result of the graph may share its storage: results that eager keeps apart must not share
    memory. A write clears the table of earlier calls, since it may change what they read.
    """
    earlier: dict[Hashable, Node] = {}
    returned = {s for n in graph.output_node().all_input_nodes if (s := torch_api.storage_of(val(n))) is not None}
    pure, feeding = Purity(), _feeding_output(graph)
    count = 0
    for n in list(graph.nodes):
        if n.op != "call_function":
            continue
        if writes(n):
            earlier.clear()
            continue
        if not _has_equal_results(n, pure) or torch_api.storage_of(val(n)) in returned or n in feeding:
            continue
        try:
            first = earlier.setdefault((n.target, _key(n.args), _key(n.kwargs)), n)
        except TypeError:  # an argument that cannot be hashed
            continue
        if first is not n:
            n.replace_all_uses_with(first)
            graph.erase_node(n)
            count += 1
    return count


def feeds_output(n: Node) -> bool:
    """Return whether the graph may return the storage of a node's result."""
    return any(u.op == "output" or (may_alias(u) and feeds_output(u)) for u in n.users)


def _feeding_output(graph: Graph) -> set[Node]:
    """Return the nodes for which `feeds_output` holds, in one walk from the output."""
    nodes: set[Node] = set()
    stack = list(graph.output_node().all_input_nodes)
    while stack:
        n = stack.pop()
        if n not in nodes:
            nodes.add(n)
            stack.extend(n.all_input_nodes if may_alias(n) else ())
    return nodes


def _has_equal_results(n: Node, pure: Purity) -> bool:
    """Return whether equal calls have equal results and no effect."""
    if not isinstance(n.target, torch._ops.OpOverload):
        symbolic = isinstance(val(n), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
        return n.target is operator.getitem or n.target in _PURE_FUNCTIONS or symbolic
    return pure(n) and not is_uninitialised(n.target) and not n.meta.get("unbacked_bindings")


def _key(x: object) -> Hashable:
    """Return a hashable key of an argument; 1, 1.0 and True have different keys, and so have 0.0 and -0.0."""
    if isinstance(x, Node):
        return x
    if isinstance(x, (tuple, list)):
        return (type(x), *map(_key, x))
    if isinstance(x, dict):
        return tuple((k, _key(v)) for k, v in sorted(x.items()))
    if isinstance(x, slice):
        return (slice, _key(x.start), _key(x.stop), _key(x.step))
    if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(x), x.node.expr)
    if isinstance(x, (float, complex)):
        return (type(x), repr(x))
    hash(x)
    return (type(x), x)
