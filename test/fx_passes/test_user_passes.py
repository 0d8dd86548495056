"""Passes of the user over the joint graph, the forward and the backward; they add nodes without fake values."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.pattern_matcher import (
    Arg,
    CallFunction,
    Match,
    PatternMatcherPass,
    fwd_only,
    joint_fwd_bwd,
    register_graph_pattern,
    register_replacement,
)
from torch.fx import Graph

from altbackend.fx_passes.pattern import register as pattern
from altbackend.fx_passes.pattern import trace as pattern_trace
from altbackend.fx_passes.pattern.rules import Rules
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
        run = compiled(f, **dict[str, Any]({hook: user_pass}))
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


# --- order, subgraphs, other forms of passes ---


def out_of_order(graph: Graph) -> None:
    """Put a call that `exp` reads behind it."""
    for n in graph.find_nodes(op="call_function", target=aten.exp.default):
        with graph.inserting_after(n):
            twice = graph.call_function(aten.mul.Tensor, (n.args[0], 2))
        n.args = (twice,)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("hook", HOOKS)
def test_nodes_out_of_order_are_sorted(hook: str, grad: bool) -> None:
    x = torch.randn(6, 5, requires_grad=grad)
    torch.testing.assert_close(compiled(f, **dict[str, Any]({hook: out_of_order}))(x), torch.exp(2 * torch.sin(x)))


@pytest.mark.parametrize("hook", ["pre_grad_custom_pass", *HOOKS])
def test_passes_run_over_the_branches_of_a_condition(hook: str) -> None:
    sines: list[int] = []

    def count(graph: Graph) -> None:
        sines.append(sum("sin" in str(n.target) for n in graph.nodes if n.op != "placeholder"))

    def branches(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))
        return result

    x = torch.ones(3)
    with torch.no_grad():
        torch.testing.assert_close(compiled(branches, **dict[str, Any]({hook: count}))(x), branches(x))
    assert len(sines) >= 3
    assert sum(sines) >= 1


class OfModules(CustomGraphModulePass):
    """A pass of torch's class that takes a module."""

    def __init__(self) -> None:
        self.seen: list[type] = []

    def __call__(self, gm: Any) -> None:
        self.seen.append(type(gm))

    def uuid(self) -> str:
        return "modules"


def test_a_pass_that_takes_a_module() -> None:
    torch._dynamo.reset()
    user_pass = OfModules()
    compiled(f, joint_custom_pre_pass=user_pass)(torch.randn(3))
    assert all(issubclass(t, torch.fx.GraphModule) for t in user_pass.seen)
    assert user_pass.seen


# --- passes of torch's own pattern matcher ---


def torch_passes(trace_fn: Any, example: torch.Tensor) -> PatternMatcherPass:
    """Replace sin(x) * 0.5 by sin(x) / 2 with torch's own matcher."""
    passes = PatternMatcherPass()
    register_replacement(halves_of_sine, halved_sine, [example], trace_fn, passes)
    return passes


@pytest.mark.parametrize("hook", HOOKS)
def test_replacements_of_torchs_matcher_in_inference(hook: str) -> None:
    passes = torch_passes(fwd_only, torch.empty(4, 4))
    matched: list[int] = []

    def user_pass(graph: Graph) -> None:
        matched.append(passes.apply(graph))

    x = torch.randn(6, 5)
    with torch.no_grad():
        run = compiled(lambda x: halves_of_sine(x).exp(), **dict[str, Any]({hook: user_pass}))
        torch.testing.assert_close(run(x), halves_of_sine(x).exp())
    assert matched == [1]


def test_replacements_of_torchs_matcher_in_a_joint_graph() -> None:
    passes = torch_passes(joint_fwd_bwd, torch.empty(4, 4, requires_grad=True))
    matched: list[int] = []

    def user_pass(graph: Graph) -> None:
        matched.append(passes.apply(graph))

    x = torch.randn(6, 5, requires_grad=True)
    compiled(lambda x: halves_of_sine(x).exp(), joint_custom_pre_pass=user_pass)(x).sum().backward()
    (gradient,) = torch.autograd.grad(halves_of_sine(x).exp().sum(), x)
    torch.testing.assert_close(x.grad, gradient)
    assert matched == [1]


def test_handlers_of_torchs_matcher() -> None:
    passes = PatternMatcherPass()

    @register_graph_pattern(CallFunction(aten.relu.default, CallFunction(aten.neg.default, Arg())), pass_dict=passes)
    def clamped(match: Match, x: Any) -> None:
        match.replace_by_example(lambda x: -torch.clamp_max(x, 0), [x])

    x = torch.randn(6, 5)
    with torch.no_grad():
        run = compiled(lambda x: torch.relu(-x) + 1, post_grad_custom_pre_pass=lambda graph: passes.apply(graph))
        torch.testing.assert_close(run(x), torch.relu(-x) + 1)


# --- rules as passes: the log, and the cache ---


def test_the_log_names_rules_with_the_nodes_before_and_after(tmp_path: Path) -> None:
    rules = Rules()
    pattern.register_replacement(halves_of_sine, halved_sine, [torch.empty(4)], pattern_trace.fwd_only, rules)
    with torch.no_grad():
        compiled(lambda x: halves_of_sine(x) + 1, post_grad_custom_pre_pass=rules, debug_dir=str(tmp_path))(
            torch.ones(5)
        )
    text = "".join(path.read_text() for path in tmp_path.rglob("decisions.txt"))
    assert "halves_of_sine: applied (sin: aten.sin.default, mul: aten.mul.Tensor -> " in text
    assert "div_tensor: aten.div.Tensor" in text


def halves_of_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 0.5


def halved_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) / 2


def test_rules_tell_their_version() -> None:
    def rules_with(replacement: Any) -> Rules:
        rules = Rules()
        pattern.register_replacement(halves_of_sine, replacement, [torch.empty(4)], pattern_trace.fwd_only, rules)
        return rules

    def closing_over(value: Any) -> Any:
        return lambda x: torch.sin(x) * value

    assert rules_with(halved_sine).uuid() == rules_with(halved_sine).uuid() != rules_with(halves_of_sine).uuid()
    assert rules_with(closing_over(0.5)).uuid() != rules_with(closing_over(1.5)).uuid()
    assert rules_with(closing_over(object())).uuid() is None
