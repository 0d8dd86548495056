"""Passes of the user over the joint graph, the forward and the backward; they add nodes without fake values."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph

from test.compare import compiled

aten = torch.ops.aten
HOOKS = ("joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")


class Doubler:
    """Rewrites every `sin` to 2 sin by a node without meta; has the `uuid` that torch requires of a pass."""

    def __init__(self) -> None:
        self.ran = 0

    def uuid(self) -> str:
        return "doubler"

    def __call__(self, graph: Graph) -> None:
        self.ran += 1
        for n in graph.find_nodes(op="call_function", target=aten.sin.default):
            with graph.inserting_after(n):
                twice = graph.call_function(aten.mul.Tensor, (n, 2))
            n.replace_all_uses_with(twice, delete_user_cb=lambda user, new=twice: user is not new)


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x).exp()


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_pass_changes_what_is_computed(hook: str, grad: bool) -> None:
    x = torch.randn(6, 5, requires_grad=grad)
    user_pass = Doubler()
    for _ in range(2):  # cold, then as another process with a cache hit
        torch._dynamo.reset()
        run = compiled(f, **{hook: user_pass})
        torch.testing.assert_close(run(x), (2 * torch.sin(x)).exp())
    assert user_pass.ran


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_passes_over_the_joint_graph_run_where_nothing_is_split(context: Any) -> None:
    seen: list[str] = []

    def first(graph: Graph) -> None:
        seen.append("pre")

    def second(graph: Graph) -> None:
        seen.append("post")

    with context():
        x = torch.randn(3)
        run = compiled(f, joint_custom_pre_pass=first, joint_custom_post_pass=second)
        torch.testing.assert_close(run(x), f(x))
    assert seen == ["pre", "post"]


def test_several_results_of_a_call_that_a_pass_adds() -> None:
    def split_the_sum(graph: Graph) -> None:
        for n in graph.find_nodes(op="call_function", target=aten.exp.default):
            with graph.inserting_before(n):
                both = graph.call_function(aten.max.dim, (n.args[0], 0, True))
                top = graph.call_function(operator.getitem, (both, 0))
                less = graph.call_function(aten.sub.Tensor, (n.args[0], top))
            n.args = (less,)

    x = torch.randn(4, 3)
    y = torch.sin(x)
    run = compiled(f, joint_custom_post_pass=split_the_sum)
    torch.testing.assert_close(run(x), (y - y.max(0, keepdim=True).values).exp())
