"""A graph over several GPUs as parts of one GPU each, with the copies between them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .graph import val

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """`module` takes the values named by `inputs` and returns a tuple of those named by `outputs`.

    `device` is where it is compiled for; None for one operator that runs as it is: a copy between devices, or one that
    writes an input of the graph.
    """

    module: GraphModule
    device: torch.device | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def gpus(gm: GraphModule) -> set[torch.device]:
    """The GPUs that the graph's tensors are on."""
    return {t.device for n in gm.graph.nodes for t in _tensors(val(n)) if t.device.type == "cuda"}


def parts(gm: GraphModule) -> list[Part] | str:
    """The parts in an order in which they can run, or why the graph cannot be taken apart.

    A part holds the operators of one device that depend on equally many changes of device.
    """
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    for n in gm.graph.nodes:
        if isinstance(val(n), torch.SymInt) or any(
            isinstance(s, torch.SymInt) for t in _tensors(val(n)) for s in t.shape
        ):
            return "its sizes are symbolic"
        if n.op not in ("placeholder", "get_attr", "call_function", "output"):
            return f"it holds a {n.op}"
    groups: dict[Any, list[Node]] = {}
    for n, place in _places(calls):
        groups.setdefault(place, []).append(n)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [_part(gm, nodes, device) for (_, device, _), nodes in ordered]


def _places(calls: list[Node]) -> Iterator[tuple[Node, tuple[int, torch.device | None, int]]]:
    """Every call with its level, its device, and a number where it is a part of its own."""
    level: dict[Node, int] = {}
    home: dict[Node, torch.device | None] = {}
    last = []
    for k, n in enumerate(calls):
        made = [a for a in n.all_input_nodes if a in level]
        if n.target is operator.getitem and made:
            level[n], home[n] = level[made[0]], home[made[0]]
        elif _writes_an_input(n):
            last.append((k, n))
            continue
        else:
            home[n] = device = _device(n)
            level[n] = max((level[a] + (device is None or home[a] != device) for a in made), default=0)
        yield n, (level[n], home[n], -1 if home[n] is not None else k)
    end = max(level.values(), default=0) + 1
    for k, n in last:
        yield n, (end + k, None, k)


def _device(n: Node) -> torch.device | None:
    """Where a call is computed; None where several GPUs take part."""
    found = {t.device for x in (n, *n.all_input_nodes) for t in _tensors(val(x)) if t.device.type == "cuda"}
    return CPU if not found else next(iter(found)) if len(found) == 1 else None


def _writes_an_input(n: Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


def _part(gm: GraphModule, nodes: list[Node], device: torch.device | None) -> Part:
    """A graph of some calls: what they take from outside becomes inputs, what others take becomes outputs."""
    graph, made, inside = Graph(), dict[Node, Node](), set(nodes)
    taken = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
    inputs = [a for a in taken if a.op != "get_attr"]
    for a in inputs:
        made[a] = graph.placeholder(a.name)
        made[a].meta = dict(a.meta)
    for a in taken:
        if a.op == "get_attr":
            made[a] = graph.node_copy(a)
    for n in nodes:
        made[n] = graph.node_copy(n, made.__getitem__)
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    graph.output(tuple(made[n] for n in outputs))
    return Part(GraphModule(gm, graph), device, tuple(a.name for a in inputs), tuple(n.name for n in outputs))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    for v in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(v, torch.Tensor):
            yield v
