"""Check that a pass preserves the results of a graph, their storage and the written inputs (option `verify_ir`).

Storage is followed through the views that operator schemas declare. A result must share memory with exactly the inputs
and results with which it shared memory in the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..aten.mutates import is_write_back, writes
from ..aten.view import declares_alias
from ..ir.verify import InvalidIR
from .graph import val


@dataclass(frozen=True)
class Facts:
    """Facts of a graph that passes must preserve.

    `results`: shape, dtype and device of each. `shared`: per result the name of the input, or the number of the first
    result, with which it shares memory. `written`: names of inputs that the graph writes.
    """

    results: tuple[str, ...]
    shared: tuple[str | int | None, ...]
    written: frozenset[str]


def facts(gm: GraphModule) -> Facts:
    """Return the facts of a graph. Raises InvalidIR for a call before its arguments or a read of a written input."""
    gm.graph.lint()
    root = _roots(gm)
    returned = gm.graph.output_node().args[0]
    results = [n if isinstance(n, Node) else None for n in returned] if isinstance(returned, (tuple, list)) else []
    shared: list[str | int | None] = []
    first: dict[Node, int] = {}
    for k, n in enumerate(results):
        at = root.get(n) if n is not None else None
        if at is None or not isinstance(val(n), torch.Tensor):
            shared.append(None)
        elif at.op in ("placeholder", "get_attr"):
            shared.append(str(at.target))
        else:
            shared.append(first.setdefault(at, k))
    return Facts(tuple(map(_described, results)), tuple(shared), _written(gm, root))


def check(before: Facts, gm: GraphModule, pass_name: str) -> None:
    """Raise InvalidIR, with the name of the pass and the difference, if the facts of the graph have changed."""
    try:
        now = facts(gm)
    except (InvalidIR, RuntimeError) as cause:
        raise InvalidIR(f"after {pass_name}: {cause}") from cause
    for name in ("results", "shared", "written"):
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            raise InvalidIR(f"after {pass_name}: {name} of the graph were {old}, are {new}")


def _roots(gm: GraphModule) -> dict[Node, Node]:
    """Return for each node the node that owns its storage: itself, unless its operator returns a view."""
    root: dict[Node, Node] = {}
    for n in gm.graph.nodes:
        viewed = _viewed(n)
        root[n] = n if viewed is None else root[viewed]
    return root


def _viewed(n: Node) -> Node | None:
    """Return the argument of which a call returns a view, or that it writes and returns, or None."""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node):
        return None
    if n.target is operator.getitem:
        return n.args[0] if _viewed(n.args[0]) is not None else None
    return n.args[0] if declares_alias(n.target) else None


def _written(gm: GraphModule, root: Mapping[Node, Node]) -> frozenset[str]:
    written: dict[Node, Node] = {}
    for n in gm.graph.nodes:
        # a joint graph may write an input in the forward and again in the backward
        read = [a for a in n.all_input_nodes if not (is_write_back(n) and a is n.args[0] and a.op == "placeholder")]
        stale = [a for a in read if root[a] in written and a is not written[root[a]]]
        if stale and n.op != "output":
            raise InvalidIR(f"{n} reads {root[stale[0]]} after {written[root[stale[0]]]} has written it")
        if writes(n) and isinstance(n.args[0], Node):
            written[root[n.args[0]]] = n
    return frozenset(str(n.target) for n in written if n.op == "placeholder")


def _described(n: Node | None) -> str:
    v = val(n) if n is not None else None
    return f"{v.dtype}{list(v.shape)} on {v.device}" if isinstance(v, torch.Tensor) else type(v).__name__
