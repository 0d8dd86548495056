"""Which nodes of a joint graph the forward needs, which only the backward, and what each value's storage is."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from . import cost

aten = torch.ops.aten


@dataclass(frozen=True)
class Halves:
    """`early`: nodes that wait for no gradient, in graph order. `forward`: those that the forward's results need.

    `kinds`: of every node. `read`: early nodes that late ones or gradients take. `wanted`: what those are made from.
    `storage`: the node that made a value's storage; for what shares none, the node itself.
    `written`: inputs that the graph overwrites at its end, and those that are `replaced` after it. `results`: of the
    forward.
    """

    early: dict[Node, None]
    forward: frozenset[Node]
    kinds: dict[Node, cost.Kind]
    wanted: frozenset[Node]
    read: frozenset[Node]
    storage: dict[Node, Node]
    written: frozenset[Node]
    results: frozenset[Node]

    def readers(self, n: Node) -> list[Node]:
        """Who reads the values of `n`: a view's readers in place of the view."""
        found: list[Node] = []
        waiting = list(n.users)
        while waiting:
            u = waiting.pop()
            if self.kinds.get(u) == "view" and self.storage[u] is not u:
                waiting.extend(u.users)
            else:
                found.append(u)
        return found


def is_tangent(n: Node) -> bool:
    return n.op == "placeholder" and "tangents" in str(n.target)


def results_of(joint: GraphModule) -> list[object]:
    return pytree.tree_leaves(joint.graph.output_node().args)


def classify(joint: GraphModule, num_fwd_outputs: int, replaced: Iterable[Node] = ()) -> Halves:
    nodes = [n for n in joint.graph.nodes if n.op != "output"]
    results = results_of(joint)
    after = _descendants(n for n in nodes if is_tangent(n))
    effects = [n for n in nodes if n.op == "call_function" and n.is_impure() and n not in after]
    outputs = [n for n in results[:num_fwd_outputs] if isinstance(n, Node)]
    needed = _ancestors([*outputs, *effects])
    for n in nodes:
        if n.op == "placeholder" or (n.target is operator.getitem and n.args[0] in needed):
            needed.add(n)
    early = {n: None for n in nodes if n not in after}
    gradients = {n for n in results[num_fwd_outputs:] if isinstance(n, Node)}
    read = {n for n in early if n in gradients or any(u in after for u in n.users)}
    return Halves(
        early,
        frozenset(needed),
        {n: cost.kind_of(n) for n in nodes},
        frozenset(_ancestors(read)),
        frozenset(read),
        _storages(nodes),
        frozenset(n.args[0] for n in effects if n.target is aten.copy_.default and isinstance(n.args[0], Node))
        | frozenset(replaced),
        frozenset(outputs),
    )


def as_given(joint: GraphModule, replaced: Iterable[Node]) -> None:
    """Let what reads an input that is written read a copy of it, which can be saved as the input cannot.

    `replaced`: inputs that are written when the forward has run; those that the graph writes are found. Where nothing
    saves the copy, it costs nothing.
    """
    writes = joint.graph.find_nodes(op="call_function", target=aten.copy_.default)
    for n in dict.fromkeys([*replaced, *(w.args[0] for w in writes if w.args[0].op == "placeholder")]):
        readers = [u for u in n.users if u.op != "output" and not (u.target is aten.copy_.default and u.args[0] is n)]
        if not readers or not isinstance(n.meta.get("val"), torch.Tensor):
            continue
        with joint.graph.inserting_before(min(readers)):
            copy = _copy(n)
        for u in readers:
            u.replace_input_with(n, copy)


def _copy(n: Node) -> Node:
    """A copy of a value, with the bits that it was traced with: its readers were traced as reading such a tensor."""
    val = n.meta["val"]
    steps = [aten.clone.default]
    steps += [aten.neg.default, aten._neg_view.default] if val.is_neg() else []
    steps += [aten._conj_physical.default, aten._conj.default] if val.is_conj() else []
    for op in steps:
        made = n.graph.call_function(op, (n,))
        made.meta["val"] = op(n.meta["val"])
        n = made
    return n


def _descendants(start: Iterable[Node]) -> set[Node]:
    found, waiting = set[Node](), list(start)
    while waiting:
        n = waiting.pop()
        if n not in found and n.op != "output":
            found.add(n)
            waiting.extend(n.users)
    return found


def _ancestors(start: Iterable[Node]) -> set[Node]:
    found, waiting = set[Node](), list(start)
    while waiting:
        n = waiting.pop()
        if n not in found:
            found.add(n)
            waiting.extend(n.all_input_nodes)
    return found


def _storages(nodes: list[Node]) -> dict[Node, Node]:
    found: dict[Node, Node] = {}
    for n in nodes:
        source = n.args[0] if n.args and isinstance(n.args[0], Node) else None
        shares = source is not None and cost.kind_of(n) == "view"
        if shares and n.target is operator.getitem:
            assert source is not None
            shares = cost.kind_of(source) == "view"  # one of several results is a value of its own
        found[n] = found.get(source, source) if shares and source is not None else n
    return found
