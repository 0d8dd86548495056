"""Write updated inputs as early as the graph allows, so that an update shares a kernel with what else reads the input.

AOTAutograd puts the write-backs of all inputs at the end of a graph. The step of an optimizer reads its averages where
it updates a parameter, hundreds of operators before it writes them. This pass moves a write-back behind the last reader
of its input and behind the new value. It moves it across pointwise operators and views only: these raise no errors, so
that an input is never written before a check that comes first in the program.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..aten.errors import DIVISIONS
from ..aten.mutates import is_write_back
from ..aten.name import operator_name
from ..aten.pointwise import FILLS, UNTAGGED, is_tagged
from ..aten.view import is_view, may_alias
from .context import Context


def run(gm: GraphModule, ctx: Context) -> int:
    """Move write-backs up, in place; return the number of those that moved."""
    nodes = list(gm.graph.nodes)
    position = {n: k for k, n in enumerate(nodes)}
    last_loud = max((k for k, n in enumerate(nodes) if n.op == "call_function" and not _is_quiet(n)), default=-1)
    count = 0
    for n in nodes:
        into = n.args[0] if is_write_back(n) else None
        if not isinstance(into, Node) or into.op != "placeholder" or n.users:
            continue
        readers = _readers(into, n)
        if readers is None:
            continue
        after = max([last_loud, *(position[m] for m in (*n.all_input_nodes, *readers))])
        if after < position[n] and any(not is_write_back(m) for m in nodes[after + 1 : position[n]]):
            nodes[after].append(n)
            count += 1
    return count


def _is_quiet(n: Node) -> bool:
    """Return whether a call raises no error and writes nothing but its result, or is the write-back of an input."""
    if is_write_back(n) or is_view(n):
        return True
    name = operator_name(n.target)
    if name in DIVISIONS and not _is_float(n):
        return False
    return is_tagged(n.target) or name in UNTAGGED | FILLS


def _is_float(n: Node) -> bool:
    value = n.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _readers(into: Node, write_back: Node) -> list[Node] | None:
    """Return the calls that read an input or a view of it; None if another call may write it or return it."""
    readers: list[Node] = []
    stack = [into]
    seen = {into}
    while stack:
        for u in stack.pop().users:
            if u is write_back or u in seen:
                continue
            seen.add(u)
            if u.op == "output" or (is_write_back(u) and u.args[0] in seen):
                return None
            readers.append(u)
            if is_view(u):
                stack.append(u)
            elif may_alias(u):
                return None
    return readers
