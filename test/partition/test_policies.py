"""Selective activation checkpointing: each policy binds the cut, and dropout keeps its mask when it is recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from altbackend.aten.name import operator_name
from test.compare import compiled
from test.test_partition import SplitGraphs, agree

T = torch.Tensor
aten = torch.ops.aten
CHOSEN = (aten.mm.default, aten.exp.default)
POLICIES: list[CheckpointPolicy | None] = [None, *CheckpointPolicy]


def with_policy(policy: CheckpointPolicy | None) -> dict[str, Any]:
    """Arguments of `checkpoint` that give matrix products and exponentials a policy, and others PREFER_RECOMPUTE."""
    if policy is None:
        return {"use_reentrant": False}

    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op in CHOSEN else CheckpointPolicy.PREFER_RECOMPUTE

    return {"use_reentrant": False, "context_fn": functools.partial(create_selective_checkpoint_contexts, choose)}


def region(x: T, w: T) -> T:
    return torch.sin(F.dropout(torch.exp(x @ w), 0.25) * 2) @ w


def model(policy: CheckpointPolicy | None) -> Callable[[T, T], T]:
    def fn(x: T, w: T) -> T:
        for _ in range(2):
            x = checkpoint(region, x, w, **with_policy(policy))
        return x

    return fn


def inputs() -> tuple[T, T]:
    return torch.randn(16, 16) / 4, torch.randn(16, 16) / 8


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name if p else "no policy")
@pytest.mark.parametrize("eagers", [False, True], ids=["own numbers", "eager's numbers"])
def test_the_recomputed_mask_is_that_of_the_forward(policy: CheckpointPolicy | None, eagers: bool) -> None:
    """A dropout of a linear region is linear in x, so that its gradient shows the mask that the backward has used."""

    def linear(x: T, w: T) -> T:
        return checkpoint(lambda v: F.dropout(v * 3, 0.5) * (v.detach() @ w).exp(), x, **with_policy(policy))

    x, w = inputs()
    x.requires_grad_()
    y = compiled(linear, fallback_random=eagers)(x, w)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad * x.detach(), y.detach())
    assert 0.2 < float((y == 0).float().mean()) < 0.8


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name if p else "no policy")
def test_results_and_gradients_are_eagers(policy: CheckpointPolicy | None) -> None:
    assert agree(model(policy), *inputs()).saved


def operators(nodes: Any) -> set[str]:
    return {operator_name(n.target) for n in nodes}


def split(policy: CheckpointPolicy | None) -> SplitGraphs:
    def fn(x: T, w: T) -> T:
        for _ in range(2):
            x = checkpoint(lambda x, w: torch.sin(torch.exp(x @ w) * 2) @ w, x, w, **with_policy(policy))
        return x

    return agree(fn, *inputs())


@pytest.mark.parametrize("name", ["no policy", "MUST_RECOMPUTE", "PREFER_RECOMPUTE"])
def test_recomputed_values_are_not_saved(name: str) -> None:
    got = split(None if name == "no policy" else CheckpointPolicy[name])
    assert got.recomputed().count("exp") == 2
    assert got.recomputed().count("mm") >= 2
    assert "exp" not in operators(got.saved)


@pytest.mark.parametrize("name", [p.name for p in CheckpointPolicy if p.name in ("MUST_SAVE", "MUST_CPU_OFFLOAD")])
def test_saved_values_are_not_recomputed(name: str) -> None:
    got = split(CheckpointPolicy[name])
    assert not {"mm", "exp"} & set(got.recomputed())
    assert {"mul", "sin"} <= set(got.recomputed())
    assert {"mm", "exp"} <= operators(got.saved)


@pytest.mark.parametrize("name", [p.name for p in CheckpointPolicy if p.name in ("PREFER_SAVE", "PREFER_CPU_OFFLOAD")])
def test_a_preference_to_save_leaves_pointwise_values_to_the_cut(name: str) -> None:
    got = split(CheckpointPolicy[name])
    assert "mm" not in got.recomputed()
    assert "exp" in got.recomputed()
    assert "exp" not in operators(got.saved)
