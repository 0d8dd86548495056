"""Constant folding over parameters: calls that depend only on parameters move into a prologue that runs once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..aten.mutates import writes
from ..aten.view import aliased_arguments, declares_alias
from .graph import Purity, ancestors, drop_dead, val


@dataclass(frozen=True)
class Split:
    """A graph split in two: `main` takes the inputs numbered `inputs`, then the results of `prologue`.

    `prologue` takes the inputs numbered `watched`; if one of them changes, the prologue runs again.
    """

    main: GraphModule
    prologue: GraphModule
    inputs: tuple[int, ...]
    watched: tuple[int, ...]


def constant_nodes(gm: GraphModule, static: Sequence[int], attributes: Collection[str] = ()) -> set[Node]:
    """Return the placeholders numbered in `static` that the graph does not write, and all pure calls on only those.

    `attributes`: targets of `get_attr` nodes that are constant too.
    Calls that widen whole numbers or 8-bit floats are left out: such weights are packed to save memory.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    written = {a for n in gm.graph.nodes if writes(n) for a in aliased_arguments(n, written=True)}
    constant = {
        placeholders[k]
        for k in static
        if k < len(placeholders) and isinstance(val(placeholders[k]), torch.Tensor) and placeholders[k] not in written
    }
    constant |= {n for n in gm.graph.find_nodes(op="get_attr") if n.target in attributes and n not in written}
    pure = Purity()
    for n in gm.graph.nodes:
        if n.op != "call_function" or not n.all_input_nodes or not all(a in constant for a in n.all_input_nodes):
            continue
        if pure(n) and not _widens_bytes(n):
            constant.add(n)
    return constant


_SMALL = 1 << 16  # bytes of a table that may grow: masks and positions


def _widens_bytes(n: Node) -> bool:
    """Return whether a call makes wider numbers of whole numbers or 8-bit floats, such as a weight's dequantisation."""
    source, result = val(n.all_input_nodes[0]), val(n)
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor) or source.dtype == torch.bool:
        return False
    if source.element_size() == 1 < result.element_size() and source.numel() == result.numel():
        return True
    packed = not source.dtype.is_floating_point and not source.dtype.is_complex
    grown = [x.numel() * x.element_size() for x in (source, result)]
    return packed and grown[1] > max(grown[0], _SMALL)


def move_up(gm: GraphModule, constant: set[Node]) -> None:
    """Move constant calls directly behind the placeholders, so that any other call may use them."""
    if not any(n.op == "call_function" for n in constant):
        return
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
    for n in list(gm.graph.nodes):
        if n in constant and n.op == "call_function":
            last.append(n)
            last = n


def move_down(gm: GraphModule, constant: set[Node]) -> None:
    """Move constant calls directly in front of the first call that needs them, so that their results live shortly."""
    number = {n: k for k, n in enumerate(gm.graph.nodes)}
    waiting = {n for n in constant if n.op == "call_function"}
    for user in [n for n in gm.graph.nodes if n not in waiting]:
        needed, stack = set[Node](), [user]
        while stack:
            arguments = [a for a in stack.pop().all_input_nodes if a in waiting]
            waiting.difference_update(arguments)
            needed.update(arguments)
            stack += arguments
        for n in sorted(needed, key=number.__getitem__):
            user.prepend(n)


def worth(n: Node) -> bool:
    """Return whether a call is worth a prologue; a view of a parameter costs nothing and would only add an input."""
    return n.op == "call_function" and not declares_alias(n.target)


def split(gm: GraphModule, static: Sequence[int]) -> Split | None:
    """Move constant calls into a prologue; return None if none is worth it."""
    # results are computed by every call, since the user may write into them
    constant = constant_nodes(gm, static) - _returned(gm)
    border = [
        n
        for n in gm.graph.nodes
        if n in constant and n.op == "call_function" and any(u not in constant for u in n.users) and _heavy(n, constant)
    ]
    if not border:
        return None
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    prologue = Graph()
    copies: dict[Node, Node] = {}
    needed = ancestors(*border)
    for n in gm.graph.nodes:
        if n in needed:
            copies[n] = prologue.node_copy(n, lambda a: copies[a])
    prologue.output(tuple(copies[n] for n in border))
    watched = tuple(k for k, n in enumerate(placeholders) if n in needed)
    for n in border:
        with gm.graph.inserting_after(placeholders[-1]):
            new = gm.graph.placeholder(f"folded_{n.name}")
        new.meta = dict(n.meta)
        placeholders.append(new)
        n.replace_all_uses_with(new)
    drop_dead(gm.graph)
    folded = placeholders[-len(border) :]
    remaining, fixed = [], frozenset(static)
    for k, n in enumerate(placeholders[: -len(border)]):
        if k in fixed and not n.users:
            gm.graph.erase_node(n)
        else:
            remaining.append(k)
    assert [n for n in gm.graph.nodes if n.op == "placeholder"][-len(folded) :] == folded
    return Split(gm, GraphModule(gm, prologue), tuple(remaining), watched)


def _returned(gm: GraphModule) -> set[Node]:
    """Return the calls whose storage the graph returns: its results, and the calls of which these are views."""
    stack, calls = list(gm.graph.output_node().all_input_nodes), set[Node]()
    while stack:
        n = stack.pop()
        if n.op == "call_function" and n not in calls:
            calls.add(n)
            stack.extend(aliased_arguments(n))
    return calls


def _heavy(n: Node, constant: set[Node]) -> bool:
    """Return whether any call between the parameters and `n` computes, i.e. is not a view."""
    return worth(n) or any(_heavy(a, constant) for a in n.all_input_nodes if a.op == "call_function")
