"""Parts of a graph: the results to compute, the calls that become inputs, the calls replaced by an operand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import torch
from torch.fx import Graph, GraphModule, Node

from altbackend.lazy_dataclass import dataclass

from ..fx_passes.graph import layout
from ..repro.rebuild import JobFields
from ..runtime.cuda_graphs import ALL


@dataclass(frozen=True)
class Part:
    """A part of a graph, by names of nodes.

    `roots`: values to compute. `as_inputs`: calls whose results become inputs. `bypassed`: calls that are left out,
    with the operand that replaces each.
    """

    roots: tuple[str, ...]
    as_inputs: frozenset[str] = frozenset()
    bypassed: Mapping[str, str] = field(default_factory=dict)

    def with_inputs(self, names: Sequence[str]) -> Part:
        return replace(self, as_inputs=self.as_inputs | set(names))

    def bypassing(self, name: str, operand: str) -> Part:
        return replace(self, bypassed={**self.bypassed, name: operand})


def entire(gm: GraphModule) -> Part:
    """Return the part with all results and all calls with side effects."""
    returned = _results(gm)
    roots = [n.name for n in gm.graph.nodes if n in returned or (n.op == "call_function" and n.is_impure())]
    return Part(tuple(roots))


def _results(gm: GraphModule) -> set[Node]:
    return set(gm.graph.output_node().all_input_nodes)


def calls(gm: GraphModule, part: Part) -> list[Node]:
    """Return the calls that a part makes, in order."""
    needed = _needed(gm, part)
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.name in needed and n.name not in part.as_inputs]


def can_be_input(n: Node) -> bool:
    """Return whether a call's result can become an input: a tensor, or a number of known symbols."""
    value = n.meta.get("val")
    plain = isinstance(value, (torch.Tensor, torch.SymInt)) and not n.is_impure()
    return plain and not torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(value)


def operands_like(n: Node) -> list[Node]:
    """Return the operands with the geometry of the result."""
    return [a for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor) and _like(a, n)]


def _like(a: Node, b: Node) -> bool:
    x, y = a.meta["val"], b.meta.get("val")
    return isinstance(y, torch.Tensor) and (layout(x), x.device) == (layout(y), y.device)


def graph_of(gm: GraphModule, part: Part, job: JobFields) -> tuple[GraphModule, dict[str, object]]:
    """Return the part as a graph, and its compilation job. Inputs that nothing reads are left out."""
    needed, out = _needed(gm, part), Graph()
    copies: dict[str, Node] = {}
    names = {n.name: n for n in gm.graph.nodes}
    inputs = [n for n in gm.graph.nodes if n.name in needed and (n.op == "placeholder" or n.name in part.as_inputs)]
    for n in inputs:
        copies[n.name] = out.placeholder(n.name)
        copies[n.name].meta = {k: n.meta[k] for k in ("val", "content") if k in n.meta}
    for n in gm.graph.nodes:
        if n.name in needed and n.name not in copies and n.op in ("call_function", "get_attr"):
            copies[n.name] = out.node_copy(n, lambda a: copies[_end(a.name, part)])
    results = [_end(r, part) for r in part.roots if not names[r].is_impure() or names[r] in _results(gm)]
    out.output(tuple(copies[r] for r in dict.fromkeys(results)))
    old_inputs = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    static = {old_inputs[k] for k in job["static_inputs"] if k < len(old_inputs)}
    static_inputs = tuple(k for k, n in enumerate(inputs) if n.name in static)
    user_outputs = job["user_outputs"] if part.roots == entire(gm).roots else ALL
    return GraphModule(gm, out), {**job, "static_inputs": static_inputs, "user_outputs": user_outputs}


def _end(name: str, part: Part) -> str:
    """Return the node that replaces another one after bypassing calls."""
    while name in part.bypassed and name not in part.as_inputs:
        name = part.bypassed[name]
    return name


def _needed(gm: GraphModule, part: Part) -> set[str]:
    names = {n.name: n for n in gm.graph.nodes}
    needed: set[str] = set()
    waiting = [_end(r, part) for r in part.roots]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        if name not in part.as_inputs:
            waiting += [_end(a.name, part) for a in names[name].all_input_nodes]
    return needed
