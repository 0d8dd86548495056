"""Values that AOTAutograd or a policy binds to a half: they are computed there alone, whatever the cut prefers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from altbackend import partition
from altbackend.config.resolve import resolve
from altbackend.partition.placement import results_of
from test.partition.joints import Joint, joint_of

T = torch.Tensor


def block(x: T, w: T, v: T) -> T:
    h = torch.tanh(x @ w) * torch.sigmoid(x)
    h = (h * h).sum(1, keepdim=True) + h.exp()
    return (F.layer_norm(h, (6,)) @ v).sin()


def joint() -> Joint:
    torch.manual_seed(0)
    return joint_of(block, torch.randn(5, 6), torch.randn(6, 6), torch.randn(6, 3))


def split(graph: torch.fx.GraphModule, results: int) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    rules = partition.rules_of(resolve(options={"strict": True}), graph)
    return partition.split(graph, results, lambda *_: None, (), rules)


def free_to_move(j: Joint, graph: torch.fx.GraphModule) -> Iterator[Node]:
    """Calls that need no gradient and on which no result of the forward depends."""
    needed = {n for n in results_of(graph)[: j.results] if isinstance(n, Node)}
    given: set[Node] = set()
    for n in reversed(graph.graph.nodes):
        if n in needed:
            needed.update(n.all_input_nodes)
    for n in graph.graph.nodes:
        if (n.op == "placeholder" and "tangents" in n.name) or given & set(n.all_input_nodes):
            given.add(n)
        elif n.op == "call_function" and n not in needed:
            yield n


def calls(graph: torch.fx.GraphModule) -> set[str]:
    return {n.name for n in graph.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("seed", range(6))
def test_calls_bound_to_the_backward_run_there(seed: int) -> None:
    j, draw, bound = joint(), random.Random(seed), set[str]()

    def bind_and_split(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        for n in free_to_move(j, graph):
            if draw.random() < 0.5:
                n.meta["partitioner_tag"] = "must_be_in_backward"
                bound.add(n.name)
        return split(graph, j.results)

    forward, backward = j.check(bind_and_split)
    assert bound
    assert not bound & calls(forward)
    assert bound <= calls(backward)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [p for p in CheckpointPolicy if "OFFLOAD" in p.name], ids=lambda p: p.name)
def test_any_values_to_offload(policy: CheckpointPolicy, seed: int) -> None:
    """Gradients stay right; a value that must be offloaded is saved, so that the backward does not compute it."""
    j, draw, marked = joint(), random.Random(seed), set[str]()

    def mark_and_split(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        for n in graph.graph.nodes:
            if n.op == "call_function" and n.meta.get("partitioner_tag") != "is_backward" and draw.random() < 0.4:
                n.meta["recompute"] = policy
                marked.add(n.name)
        return split(graph, j.results)

    forward, backward = j.check(mark_and_split)
    assert marked
    if policy.name == "MUST_CPU_OFFLOAD":
        assert not marked & calls(backward) & calls(forward)
