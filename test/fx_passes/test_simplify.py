"""Every rule fires on its example, does not fire a second time, and preserves eager's result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import alt
from altbackend.fx_passes import simplify
from altbackend.fx_passes.graph import val

X = torch.randn(4, 6)

EXAMPLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{rule.name: rule.example for rule in simplify.RULES},
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


def normalised(x: torch.Tensor) -> torch.Tensor:
    mean, variance = x.amin(0), x.amax(0).abs()
    y: torch.Tensor = torch.ops.aten._native_batch_norm_legit_no_training(x, None, None, mean, variance, 0.1, 1e-5)[0]
    return y


POSITIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "one element": (lambda x: x.exp().amax(1, keepdim=True).argmax(1), True),
    "kept dimension": (lambda x: x.sum(0, keepdim=True).argmin(0, keepdim=True), True),
    "of all": (lambda x: x.exp().sum().argmax(), True),
    "behind a division": (lambda x: (x / (x + 9)).amax(1, keepdim=True).argmax(1), True),
    "behind a batch norm": (lambda x: normalised(x).amax(1, keepdim=True).argmax(1), True),
    "behind a division of integers": (lambda x: (x.long() // (x.long() + 9)).amax(1, True).argmax(1), False),
    "two elements": (lambda x: x[:2].exp().argmax(0), False),
    "behind a check": (lambda x: x[x[:, 0].long().clamp(0, 3)].amax(1, keepdim=True).argmax(1), False),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_position_among_one_element_is_0_and_drops_what_it_was_computed_from(name: str) -> None:
    fn, folded = POSITIONS[name]
    gm = trace(fn)
    simplify.apply_rules(gm)
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    assert (targets == [torch.ops.aten.full.default]) == folded
    gm.recompile()
    assert torch.equal(gm(X), fn(X))
    assert torch.equal(torch.compile(fn, backend=alt, dynamic=False)(X), fn(X))


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_copy_to_another_device_stays(device: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().to(device) * 2).to("cuda:0") + 1

    with FakeTensorMode(allow_non_fake_inputs=True):
        gm = make_fx(fn, tracing_mode="fake")(torch.empty(4, 6, device="cuda:0"))
    simplify.normalise(gm)
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    assert [val(n).device for n in copies] == [torch.device(device), torch.device("cuda:0")]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rule", EXAMPLES)
def test_rule_where_the_backend_runs_it(rule: str, training: bool) -> None:
    """The backend runs rules under the fake mode of a tracer, in which numbers cannot be computed."""
    torch._dynamo.reset()
    compiled = torch.compile(EXAMPLES[rule], backend=alt, options={"strict": True}, fullgraph=True)
    x = X.clone().requires_grad_(training)
    torch.testing.assert_close(compiled(x), EXAMPLES[rule](x))


def test_a_detached_copy_is_removed() -> None:
    (rule,) = simplify.DETACHED
    assert isinstance(rule, simplify.Rule)
    gm = trace(rule.example)
    (detached,) = (n for n in gm.graph.nodes if n.target in rule.targets)  # an alias from torch 2.15 on
    before = f"{detached.name}: {detached.target} -> x_1"
    assert [str(rewrite) for rewrite in simplify.normalise(gm)] == [before]
    assert simplify.normalise(gm) == []
    assert not any(n.target in rule.targets for n in gm.graph.nodes)


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
