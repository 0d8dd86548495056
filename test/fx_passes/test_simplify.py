"""Every rule fires on its example, does not fire a second time, and preserves eager's result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import alt
from altbackend.fx_passes import simplify

X = torch.randn(4, 6)

EXAMPLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x - 0 -> x": lambda x: torch.exp(torch.sub(x, 0)),
    "x * 1 -> x": lambda x: torch.exp(x * 1.0),
    "x / 1 -> x": lambda x: torch.exp(x / 1),
    "x ** 1 -> x": lambda x: torch.exp(x**1),
    "cast to own dtype -> x": lambda x: torch.exp(torch.ops.aten._to_copy.default(x, dtype=torch.float32)),
    "same shape -> x": lambda x: torch.exp(torch.ops.aten.view.default(x, [4, 6])),
    "identity permutation -> x": lambda x: torch.exp(x.permute(0, 1)),
    "whole slice -> x": lambda x: torch.exp(torch.ops.aten.slice.Tensor(x, 0, 0, 4)),
    "cat of one -> x": lambda x: torch.exp(torch.cat([x], 1)),
    "copy -> x": lambda x: torch.exp(x.clone()),
    "common subexpressions": lambda x: torch.exp(x) * 2 + torch.exp(x) * 3,
    "uniform values": lambda x: x * (torch.full((4, 6), 3.0) * 3 + torch.full((4, 6), 2.0)),
}


def trace(fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(X)


@pytest.mark.parametrize("rule", EXAMPLES)
def test_rule(rule: str) -> None:
    gm = trace(EXAMPLES[rule])
    nodes = len(gm.graph.nodes)
    assert simplify.apply_rules(gm).get(rule, 0) >= 1
    assert len(gm.graph.nodes) < nodes
    assert simplify.apply_rules(gm) == {}
    gm.recompile()
    torch.testing.assert_close(gm(X), EXAMPLES[rule](X), rtol=0, atol=0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rule", EXAMPLES)
def test_rule_where_the_backend_runs_it(rule: str, training: bool) -> None:
    """The backend runs rules under the fake mode of a tracer, in which numbers cannot be computed."""
    torch._dynamo.reset()
    compiled = torch.compile(EXAMPLES[rule], backend=alt, options={"strict": True}, fullgraph=True)
    x = X.clone().requires_grad_(training)
    torch.testing.assert_close(compiled(x), EXAMPLES[rule](x))


def test_every_rule_has_an_example() -> None:
    assert {r.name for r in simplify.RULES} <= set(EXAMPLES)


@pytest.mark.parametrize(
    "fn", [lambda x: x * 1.0, lambda x: x.clone(), lambda x: x.clone().view(6, 4)], ids=["mul", "clone", "view"]
)
def test_an_output_never_becomes_an_alias_of_an_input(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled = torch.compile(fn, backend="alt", options={"strict": True})
    x = torch.randn(4, 6)
    before = x.clone()
    compiled(x).zero_()
    assert torch.equal(x, before)


def test_minus_zero_survives_adding_zero() -> None:
    compiled = torch.compile(lambda x: x + 0.0, backend="alt", options={"strict": True})
    assert not torch.signbit(compiled(torch.tensor([-0.0]))).item()


def test_random_calls_are_not_merged() -> None:
    gm = trace(lambda x: torch.rand_like(x) + torch.rand_like(x))
    assert "common subexpressions" not in simplify.apply_rules(gm)
