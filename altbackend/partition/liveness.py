"""Liveness over a joint graph: nodes that the forward or the backward needs, and the owner of each value's storage."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..aten.mutates import is_write_back
from . import cost
from .placement import half_of, is_given_to_backward, producer, results_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Liveness:
    """Sets of nodes of a joint graph.

    `early`: nodes that depend on no gradient, in graph order. `forward`: nodes that the results of the forward need.
    `kinds`: the kind of every node. `read`: early nodes that nodes after a gradient read, or that are gradients.
    `needed`: `read` and all nodes on which they depend. `storage`: the node that owns the storage of a value.
    `written`: inputs that the forward, or its caller after it, overwrites. `targets`: inputs that the backward writes.
    `results`: results of the forward. `backward`: nodes that depend on a gradient or that only the backward may run.
    """

    early: dict[Node, None]
    forward: frozenset[Node]
    kinds: dict[Node, cost.Kind]
    needed: frozenset[Node]
    read: frozenset[Node]
    storage: dict[Node, Node]
    written: frozenset[Node]
    targets: frozenset[Node]
    results: frozenset[Node]
    backward: frozenset[Node]

    def readers(self, n: Node) -> list[Node]:
        """Return the nodes that read the values of `n`; the readers of a view replace the view."""
        nodes: list[Node] = []
        pending = list(n.users)
        while pending:
            u = pending.pop()
            if self.kinds.get(u) == "view" and self.storage[u] is not u:
                pending.extend(u.users)
            else:
                nodes.append(u)
        return nodes


def classify(joint: GraphModule, num_fwd_outputs: int, replaced: Iterable[Node] = ()) -> Liveness:
    """Return the liveness of a joint graph. `replaced`: inputs that the caller writes after the forward."""
    nodes = [n for n in joint.graph.nodes if n.op != "output"]
    results = results_of(joint)
    after = _descendants(n for n in nodes if is_given_to_backward(n) or half_of(n) == "backward")
    effects = [n for n in nodes if n.op == "call_function" and n not in after and n.is_impure()]
    outputs = [n for n in results[:num_fwd_outputs] if isinstance(n, Node)]
    needed = _ancestors([*outputs, *effects])
    for n in nodes:
        if n not in after and (n.op == "placeholder" or (n.target is operator.getitem and n.args[0] in needed)):
            needed.add(n)
    early = {n: None for n in nodes if n not in after}
    gradients = {n for n in results[num_fwd_outputs:] if isinstance(n, Node)}
    read = {n for n in early if n in gradients or any(u in after for u in n.users)}
    kinds = {n: cost.kind_of(n) for n in nodes}
    return Liveness(
        early,
        frozenset(needed),
        kinds,
        frozenset(_ancestors(read)),
        frozenset(read),
        _storages(nodes, kinds),
        frozenset(_written(n for n in effects if n not in after)) | frozenset(replaced),
        frozenset(_written(after)),
        frozenset(outputs),
        frozenset(after),
    )


def _written(nodes: Iterable[Node]) -> list[Node]:
    return [n.args[0] for n in nodes if is_write_back(n) and isinstance(n.args[0], Node)]


def copy_written_inputs(joint: GraphModule, replaced: Iterable[Node]) -> None:
    """Let the readers of a written input read a copy of it, since the input itself cannot be saved.

    `replaced`: inputs that the caller writes after the forward, in addition to those that the graph writes. A copy that
    is not saved costs nothing.
    """
    writes = joint.graph.find_nodes(op="call_function", target=aten.copy_.default)
    writes = [w for w in writes if half_of(w) != "backward"]
    for n in dict.fromkeys([*replaced, *(w.args[0] for w in writes if w.args[0].op == "placeholder")]):
        readers = [u for u in n.users if u.op != "output" and not (is_write_back(u) and u.args[0] is n)]
        if not readers or not isinstance(n.meta.get("val"), torch.Tensor):
            continue
        with joint.graph.inserting_before(min(readers)):
            copy = _copy(n)
        for u in readers:
            u.replace_input_with(n, copy)


def _copy(n: Node) -> Node:
    """Insert a copy of a value with its negative and conjugate bits, which its readers were traced with."""
    val = n.meta["val"]
    steps = [aten.clone.default]
    steps += [aten.neg.default, aten._neg_view.default] if val.is_neg() else []
    steps += [aten._conj_physical.default, aten._conj.default] if val.is_conj() else []
    for op in steps:
        call = n.graph.call_function(op, (n,))
        call.meta["val"] = op(n.meta["val"])
        n = call
    return n


def _descendants(start: Iterable[Node]) -> set[Node]:
    nodes, pending = set[Node](), list(start)
    while pending:
        n = pending.pop()
        if n not in nodes and n.op != "output":
            nodes.add(n)
            pending.extend(n.users)
    return nodes


def _ancestors(start: Iterable[Node]) -> set[Node]:
    nodes, pending = set[Node](), list(start)
    while pending:
        n = pending.pop()
        if n not in nodes:
            nodes.add(n)
            pending.extend(n.all_input_nodes)
    return nodes


def _storages(nodes: list[Node], kinds: dict[Node, cost.Kind]) -> dict[Node, Node]:
    owner: dict[Node, Node] = {}
    for n in nodes:
        source = n.args[0] if n.args and isinstance(n.args[0], Node) else None
        shares = source is not None and kinds[n] == "view"
        if shares and n.target is operator.getitem:  # an element of a tuple owns its storage, if a call has made it
            shares = kinds[producer(n)] == "view"
        owner[n] = owner.get(source, source) if shares and source is not None else n
    return owner
