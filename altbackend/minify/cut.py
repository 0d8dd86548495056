"""Parts of a graph: which results are kept, which calls become inputs, which give one of their operands instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..fx_passes.graph import layout
from ..runtime.cuda_graphs import ALL


@dataclass(frozen=True)
class Part:
    """A part of a graph, by names of nodes.

    `roots`: what must be computed. `given`: calls whose results come as inputs. `passed`: calls that are left out,
    with the operand that stands for each.
    """

    roots: tuple[str, ...]
    given: frozenset[str] = frozenset()
    passed: Mapping[str, str] = field(default_factory=dict)

    def giving(self, names: Sequence[str]) -> Part:
        return replace(self, given=self.given | set(names))

    def passing(self, name: str, operand: str) -> Part:
        return replace(self, passed={**self.passed, name: operand})


def whole(gm: GraphModule) -> Part:
    """All results, and all calls that change something."""
    returned = _results(gm)
    roots = [n.name for n in gm.graph.nodes if n in returned or (n.op == "call_function" and n.is_impure())]
    return Part(tuple(roots))


def _results(gm: GraphModule) -> set[Node]:
    return set(gm.graph.output_node().all_input_nodes)


def calls(gm: GraphModule, part: Part) -> list[Node]:
    """The calls that a part makes, in order."""
    needed = _needed(gm, part)
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.name in needed and n.name not in part.given]


def can_be_input(n: Node) -> bool:
    """Whether a call's result can come as an input: a tensor, or a number of known symbols."""
    value = n.meta.get("val")
    plain = isinstance(value, (torch.Tensor, torch.SymInt)) and not n.is_impure()
    return plain and not torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(value)


def operands_like(n: Node) -> list[Node]:
    """Operands of the same geometry as the result."""
    return [a for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor) and _like(a, n)]


def _like(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta.get("val")
    return isinstance(y, torch.Tensor) and (layout(x), x.device) == (layout(y), y.device)


def graph_of(gm: GraphModule, part: Part, job: Mapping[str, Any]) -> tuple[GraphModule, dict[str, Any]]:
    """The part as a graph, and what it is compiled for. Inputs that nothing needs are left out."""
    needed, out = _needed(gm, part), Graph()
    made: dict[str, Node] = {}
    names = {n.name: n for n in gm.graph.nodes}
    inputs = [n for n in gm.graph.nodes if n.name in needed and (n.op == "placeholder" or n.name in part.given)]
    for n in inputs:
        made[n.name] = out.placeholder(n.name)
        made[n.name].meta = {k: n.meta[k] for k in ("val", "content") if k in n.meta}
    for n in gm.graph.nodes:
        if n.name in needed and n.name not in made and n.op in ("call_function", "get_attr"):
            made[n.name] = out.node_copy(n, lambda a: made[_end(a.name, part)])
    results = [_end(r, part) for r in part.roots if not names[r].is_impure() or names[r] in _results(gm)]
    out.output(tuple(made[r] for r in dict.fromkeys(results)))
    old = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    static = {old[k] for k in job["static_inputs"] if k < len(old)}
    kept = tuple(k for k, n in enumerate(inputs) if n.name in static)
    users = job["user_outputs"] if part.roots == whole(gm).roots else ALL
    return GraphModule(gm, out), {**job, "static_inputs": kept, "user_outputs": users}


def _end(name: str, part: Part) -> str:
    """The node that stands for another after calls have been passed."""
    while name in part.passed and name not in part.given:
        name = part.passed[name]
    return name


def _needed(gm: GraphModule, part: Part) -> set[str]:
    names = {n.name: n for n in gm.graph.nodes}
    found: set[str] = set()
    waiting = [_end(r, part) for r in part.roots]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name not in part.given:
            waiting += [_end(a.name, part) for a in names[name].all_input_nodes]
    return found
