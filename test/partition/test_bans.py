"""Bans on recomputation: each holds by default, and is lifted by an option or by torch's setting of its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch
from torch.fx import GraphModule

from altbackend import partition
from altbackend.aten.name import operator_name
from altbackend.config.resolve import resolve
from altbackend.partition import roofline
from altbackend.partition.cost import Speed
from altbackend.partition.rules import LIFTED, Bans, Rules
from test.partition.joints import Joint, joint_of

T = torch.Tensor
EMPTY = GraphModule(torch.nn.Module(), torch.fx.Graph())
BANS = {
    "ban_recompute_used_far_apart": "far_apart",
    "ban_recompute_long_fusible_chains": "long_chains",
    "ban_recompute_materialized_backward": "read_by_calls",
    "ban_recompute_not_in_allowlist": "calls",
    "ban_recompute_reductions": "totals",
}


def stream(x: T, w: T) -> T:
    for _ in range(3):
        x = x + torch.tanh((x * 2).sin() @ w)
    return x


def chain(x: T, w: T) -> T:
    for _ in range(120):
        x = x * x
    return x * w


def small_products(x: T, w: T) -> T:
    """Products of an inner length of 2: reading them takes as long as computing them."""
    for _ in range(3):
        x = torch.sin(x[:, :2].exp() @ w[:2] * 3)
    return x


def totals(x: T, w: T) -> T:
    return (x @ w).exp().sum(1, keepdim=True).sin().expand_as(x) * x.cos()


def saved(joint: Joint, bans: Bans) -> list[str]:
    """Return the operators whose results the forward saves."""
    forward, _ = joint.check(lambda gm: partition.split(gm, joint.results, rules=Rules(bans)))
    nodes: Any = forward.graph.output_node().args[0]
    return [operator_name(n.target) for n in nodes[joint.results :] if n.op == "call_function"]


def inputs() -> tuple[T, T]:
    torch.manual_seed(1)
    return torch.randn(32, 32), torch.randn(32, 32) / 8


@pytest.mark.parametrize(
    ("fn", "ban", "operator"),
    [(stream, "far_apart", "add"), (chain, "long_chains", "mul"), (totals, "totals", "sum")],
)
def test_a_ban_saves_what_is_recomputed_without_it(fn: Callable[..., Any], ban: str, operator: str) -> None:
    joint = joint_of(fn, *inputs())
    others = dict.fromkeys(("far_apart", "long_chains", "read_by_calls", "totals"), False)
    assert operator in saved(joint, Bans(**{**others, ban: True}))
    assert operator not in saved(joint, Bans(**others))


def test_values_that_a_library_call_of_the_backward_reads() -> None:
    joint = joint_of(lambda x, w: (x.sin() * 2) @ w @ w, *inputs())
    assert "mul" in saved(joint, Bans())
    assert "mul" not in saved(joint, Bans(read_by_calls=False))


def test_cheap_library_calls_are_recomputed_without_their_ban_and_costly_ones_are_not() -> None:
    joint = joint_of(small_products, *inputs())
    assert "mm" in saved(joint, Bans())
    assert "mm" not in saved(joint, Bans(calls=False, read_by_calls=False))
    torch.manual_seed(1)
    long = joint_of(lambda x, w: torch.sin(x @ w).exp(), torch.randn(16, 4096), torch.randn(4096, 16))
    assert "mm" in saved(long, Bans(calls=False, read_by_calls=False))


@pytest.mark.parametrize("name", BANS)
def test_an_option_or_torchs_setting_lifts_a_ban(name: str) -> None:
    expected = Bans(**{BANS[name]: False})
    assert partition.rules_of(resolve(), EMPTY).bans == Bans()
    assert partition.rules_of(resolve(options={name: False}), EMPTY).bans == expected
    with functorch.patch({name: False}):
        assert partition.rules_of(resolve(), EMPTY).bans == expected


def test_aggressive_recomputation_lifts_all_but_that_on_reductions() -> None:
    assert partition.rules_of(resolve(options={"aggressive_recomputation": True}), EMPTY).bans == LIFTED
    with functorch.patch(aggressive_recomputation=True):
        assert partition.rules_of(resolve(), EMPTY).bans == LIFTED


def test_the_speed_of_a_machine_is_measured_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = resolve(options={"cache_dir": str(tmp_path)})
    first = roofline.speed_of(torch.device("cpu"), cfg)
    assert 0 < first.wide < 10
    monkeypatch.setattr(roofline, "_measured", None)  # another process reads what this one has measured
    assert roofline.speed_of(torch.device("cpu"), cfg) == first
    (file,) = (tmp_path / "roofline").glob("*.json")
    file.write_bytes(b"damaged")
    monkeypatch.setattr(roofline, "_measured", lambda *a: Speed(2.0, 1.0))
    assert roofline.speed_of(torch.device("cpu"), cfg) == Speed(2.0, 1.0)


def test_tables_without_inputs_are_computed_again() -> None:
    def f(x: T) -> T:
        at = (torch.arange(40) * 0.5).floor().long()
        return x[:, at].sin().sum(1)

    names = saved(joint_of(f, torch.randn(6, 40, requires_grad=True)), Bans())
    assert not [name for name in names if any(part in name for part in ("arange", "iota", "floor", "_to_copy"))]
