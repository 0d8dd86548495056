"""What a pass must leave as it is: results, their storage, and what is written. Checked under the option `verify_ir`.

Storage is followed through the views that operators' schemas declare: a result shares memory with the inputs and the
results that it shared memory with as traced, and with no other.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..ir.verify import InvalidIR
from .graph import val


@dataclass(frozen=True)
class Facts:
    """`results`: shape, dtype and device of each. `shared`: per result the input it lies in, by name, or the first
    result that it shares memory with, by number. `written`: names of inputs that the graph writes."""

    results: tuple[str, ...]
    shared: tuple[str | int | None, ...]
    written: frozenset[str]


def facts(gm: GraphModule) -> Facts:
    """Of a graph as it is. Raises InvalidIR for a call before its arguments, or a read of an input after its write."""
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


def check(before: Facts, gm: GraphModule, after_what: str) -> None:
    """Raises InvalidIR, naming the pass and what differs."""
    try:
        now = facts(gm)
    except (InvalidIR, RuntimeError) as cause:
        raise InvalidIR(f"after {after_what}: {cause}") from cause
    for name in ("results", "shared", "written"):
        was, is_ = getattr(before, name), getattr(now, name)
        if was != is_:
            raise InvalidIR(f"after {after_what}: {name} of the graph were {was}, are {is_}")


def _roots(gm: GraphModule) -> dict[Node, Node]:
    """Per node that whose storage its value lies in: itself, unless its operator gives a view."""
    root: dict[Node, Node] = {}
    for n in gm.graph.nodes:
        viewed = _viewed(n)
        root[n] = n if viewed is None else root[viewed]
    return root


def _viewed(n: Node) -> Node | None:
    """The argument that a call's result is a view of, or that it writes and returns."""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node):
        return None
    if n.target is operator.getitem:
        return n.args[0] if _viewed(n.args[0]) is not None else None
    schema = getattr(n.target, "_schema", None)
    if schema is None or not any(r.alias_info for r in schema.returns):
        return None
    return n.args[0]


def _written(gm: GraphModule, root: Mapping[Node, Node]) -> frozenset[str]:
    written: dict[Node, Node] = {}
    for n in gm.graph.nodes:
        late = [a for a in n.all_input_nodes if root[a] in written and a is not written[root[a]]]
        if late and n.op != "output":
            raise InvalidIR(f"{n} reads {root[late[0]]} after {written[root[late[0]]]} has written it")
        schema = getattr(n.target, "_schema", None)
        if n.op == "call_function" and schema is not None and schema.is_mutable and isinstance(n.args[0], Node):
            written[root[n.args[0]]] = n
    return frozenset(str(n.target) for n in written if n.op == "placeholder")


def _described(n: Node | None) -> str:
    v = val(n) if n is not None else None
    return f"{v.dtype}{list(v.shape)} on {v.device}" if isinstance(v, torch.Tensor) else type(v).__name__
