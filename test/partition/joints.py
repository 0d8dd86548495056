"""Joint graphs of small functions, split in many ways and run operator by operator beside the joint graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from altbackend import decomp
from altbackend.compat import aot_autograd
from altbackend.fx_passes import cse
from altbackend.fx_passes.graph import drop_dead, snapshot
from altbackend.partition.choose import Chooser
from altbackend.partition.liveness import classify
from altbackend.partition.placement import results_of
from altbackend.partition.rules import Rules

T = torch.Tensor
Halves = tuple[GraphModule, GraphModule]


@dataclass(frozen=True)
class Joint:
    """A joint graph, the number of results of its forward, and values for its inputs."""

    graph: GraphModule
    results: int
    inputs: list[T]

    def copy(self) -> GraphModule:
        """Return a copy of the graph, which a split may change."""
        return GraphModule(self.graph, snapshot(self.graph.graph)())

    def chooser(self, rules: Rules) -> tuple[Chooser, frozenset[Node]]:
        """Return the cuts of the graph under rules, and its gradients."""
        gradients = [n for n in results_of(self.graph)[self.results :] if isinstance(n, Node)]
        return Chooser(classify(self.graph, self.results), rules), frozenset(gradients)

    def check(self, split: Callable[[GraphModule], Halves]) -> Halves:
        """Split a copy of the graph; assert that forward and backward give what the joint graph gives."""
        forward, backward = split(self.copy())
        want = self.graph(*self.inputs)
        names = [n.name for n in self.graph.graph.find_nodes(op="placeholder")]
        given = dict(zip(names, self.inputs, strict=True))
        got = forward(*(given[n.name] for n in forward.graph.find_nodes(op="placeholder")))
        returned: Any = forward.graph.output_node().args[0]
        nodes = returned[self.results :]
        given.update((n.name, x) for n, x in zip(nodes, got[self.results :], strict=True))
        gradients = backward(*(given[n.name] for n in backward.graph.find_nodes(op="placeholder")))
        for mine, theirs in zip([*got[: self.results], *gradients], want, strict=True):
            torch.testing.assert_close(mine, theirs)
        return forward, backward


def joint_of(fn: Callable[..., Any], *inputs: T) -> Joint:
    """Return the joint graph of a function of float64 inputs, all of which get gradients."""
    leaves = [x.double().requires_grad_() for x in inputs]
    gm = aot_autograd.joint_graph(fn, leaves, decomp.table())
    cse.eliminate(gm.graph)
    drop_dead(gm.graph)
    gm.recompile()
    count = len(aot_autograd.as_tuple(fn(*leaves)))
    tangents = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")[len(leaves) :]]
    given = [*(x.detach() for x in leaves), *(torch.randn(t.shape, dtype=t.dtype) for t in tangents)]
    return Joint(gm, count, given)
