"""Split a graph over several GPUs into parts of one device each, with the copies between them."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..aten.mutates import writes
from .graph import val

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """A part of a graph: `module` takes the values named by `inputs` and returns a tuple of those named by `outputs`.

    `device`: the device for which the part is compiled, or None for a single operator that runs as a library call: a
    copy between devices, or a write to an input of the graph.
    """

    module: GraphModule
    device: torch.device | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def gpus(gm: GraphModule) -> set[torch.device]:
    """Return the GPUs of the graph's tensors."""
    return {t.device for n in gm.graph.nodes for t in _tensors(val(n)) if t.device.type == "cuda"}


def parts(gm: GraphModule) -> list[Part] | str:
    """Return the parts in an order in which they can run, or the reason why the graph cannot be split.

    A part has the operators of one device that depend on the same number of changes of device.
    """
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    for n in gm.graph.nodes:
        if isinstance(val(n), torch.SymInt) or any(
            isinstance(s, torch.SymInt) for t in _tensors(val(n)) for s in t.shape
        ):
            return "its sizes are symbolic"
        if n.op not in ("placeholder", "get_attr", "call_function", "output"):
            return f"it holds a {n.op}"
    groups: dict[tuple[int, torch.device | None, int], list[Node]] = {}
    for n, key in _keys(calls):
        groups.setdefault(key, []).append(n)
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return [_part(gm, nodes, device) for (_, device, _), nodes in ordered]


def _keys(calls: list[Node]) -> Iterator[tuple[Node, tuple[int, torch.device | None, int]]]:
    """Yield every call with the key of its part: level, device, and a number that is unique for a part of one call."""
    level: dict[Node, int] = {}
    device_of: dict[Node, torch.device | None] = {}
    input_writes = []
    for k, n in enumerate(calls):
        operands = [a for a in n.all_input_nodes if a in level]
        if n.target is operator.getitem and operands:
            level[n], device_of[n] = level[operands[0]], device_of[operands[0]]
        elif writes(n):
            input_writes.append((k, n))
            continue
        else:
            device_of[n] = device = _device(n)
            level[n] = max((level[a] + (device is None or device_of[a] != device) for a in operands), default=0)
        yield n, (level[n], device_of[n], -1 if device_of[n] is not None else k)
    end = max(level.values(), default=0) + 1
    for k, n in input_writes:
        yield n, (end + k, None, k)


def _device(n: Node) -> torch.device | None:
    """Return the device that computes a call, or None if several GPUs take part."""
    gpus_used = {t.device for x in (n, *n.all_input_nodes) for t in _tensors(val(x)) if t.device.type == "cuda"}
    return CPU if not gpus_used else next(iter(gpus_used)) if len(gpus_used) == 1 else None


def _part(gm: GraphModule, nodes: list[Node], device: torch.device | None) -> Part:
    """Return the part of some calls: operands from outside become inputs, values with users outside become outputs."""
    graph, copies, inside = Graph(), dict[Node, Node](), set(nodes)
    taken = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside)
    inputs = [a for a in taken if a.op != "get_attr"]
    for a in inputs:
        copies[a] = graph.placeholder(a.name)
        copies[a].meta = dict(a.meta)
    for a in taken:
        if a.op == "get_attr":
            copies[a] = graph.node_copy(a)
    for n in nodes:
        copies[n] = graph.node_copy(n, copies.__getitem__)
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    graph.output(tuple(copies[n] for n in outputs))
    return Part(GraphModule(gm, graph), device, tuple(a.name for a in inputs), tuple(n.name for n in outputs))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for v in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(v, torch.Tensor):
            yield v
