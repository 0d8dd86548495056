"""The memory budget: less memory for more time, correct gradients at every budget, and the knapsack behind it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch._functorch.config as functorch
from hypothesis import given, settings
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from altbackend import partition
from altbackend.cli import memory_curve
from altbackend.compat import aot_autograd
from altbackend.config.resolve import resolve
from altbackend.errors import BadOptionValue
from altbackend.examples.gpt import GPT
from altbackend.partition import budget, cost, knapsack
from altbackend.partition.choose import Chooser
from altbackend.partition.liveness import Liveness, classify
from altbackend.partition.rules import DEFAULT, LIFTED, Rules
from altbackend.partition.segments import boundaries
from test.compare import compiled
from test.partition.joints import Halves, Joint, joint_of
from test.test_partition import SplitGraphs, gradients, programs
from test.test_partition import compiled as split_only

T = torch.Tensor
SAVEABLE = 1 << 50  # a price below is one that a value can be saved for
BUDGETS = [1.0, 0.9, 0.75, 0.6, 0.4, 0.2, 0.1, 0.0]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def inputs(side: int = 8) -> tuple[T, T, T]:
    torch.manual_seed(3)
    return torch.randn(4, side), torch.randn(side, side) / 3, torch.randn(side)


def under(joint: Joint, rules: Rules) -> Callable[[GraphModule], Halves]:
    return lambda gm: partition.split(gm, joint.results, rules=rules)


# --- the knapsack -----------------------------------------------------------------------------------------------------

ITEMS = st.lists(st.builds(knapsack.Item, st.integers(1, 30), st.integers(0, 20).map(float)), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(ITEMS, st.lists(st.integers(0, 120), min_size=1, max_size=4))
def test_the_knapsack_is_as_worthy_as_the_best_of_all_sets(items: list[knapsack.Item], capacities: list[int]) -> None:
    def weight(chosen: Any) -> int:
        return sum(items[k].weight for k in chosen)

    def worth(chosen: Any) -> float:
        return sum(items[k].worth for k in chosen)

    sets = [c for r in range(len(items) + 1) for c in itertools.combinations(range(len(items)), r)]
    for greedy in (False, True):
        for capacity, chosen in zip(capacities, knapsack.solve(items, capacities, greedy), strict=True):
            best = max(worth(c) for c in sets if weight(c) <= capacity)
            assert weight(chosen) <= capacity
            assert worth(chosen) >= best / 2 if greedy else worth(chosen) == best


def test_a_large_knapsack_is_solved_greedily() -> None:
    items = [knapsack.Item(1_000_003 + k, 1.0 + k % 7) for k in range(3_000)]
    total = sum(item.weight for item in items)
    (chosen,) = knapsack.solve(items, [total // 2])
    assert total // 2 - 1_100_000 < sum(items[k].weight for k in chosen) <= total // 2
    assert sum(items[k].worth for k in chosen) > 0.6 * sum(item.worth for item in items)


# --- plans ------------------------------------------------------------------------------------------------------------


def blocks(x: T, w: T, b: T, count: int = 8) -> T:
    for _ in range(count):
        h = torch.nn.functional.layer_norm(x, (x.shape[-1],), b, b)
        x = x + torch.tanh((torch.sin(h @ w) * 2) @ w) @ w
    return x


def test_a_smaller_budget_saves_fewer_bytes() -> None:
    joint = joint_of(blocks, *inputs(32))
    saved, products = [], []
    for b in BUDGETS:
        forward, backward = joint.check(under(joint, Rules(budget=b)))
        saved.append(partition.saved_bytes(forward, joint.results))
        products.append(len(backward.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)))
    assert saved == sorted(saved, reverse=True)
    assert products == sorted(products)
    assert len(set(saved)) > 5
    assert saved[-1] < 0.35 * saved[0]


@settings(max_examples=12, deadline=None)
@given(programs(), st.booleans())
def test_gradients_are_eagers_at_every_budget_and_no_plan_takes_more_than_the_one_before(
    fn: Callable[..., Any], greedy: bool
) -> None:
    joint = joint_of(fn, *inputs())
    saved = []
    for b in (1.0, 0.6, 0.3, 0.0):
        forward, _ = joint.check(under(joint, Rules(budget=b, greedy=greedy)))
        saved.append(partition.saved_bytes(forward, joint.results))
    assert saved == sorted(saved, reverse=True)
    chooser, gradients = joint.chooser(Rules(budget=0.5))
    for before, after in itertools.pairwise(budget.plans(chooser, chooser.choose(), gradients)):
        assert after.memory < before.memory
        assert after.peak <= before.peak


def test_the_one_hot_gradient_of_a_loss_takes_no_memory() -> None:
    x, weight, _ = inputs()
    joint = joint_of(lambda x, w: torch.nn.functional.cross_entropy(x @ w, torch.tensor([1, 7, 0, 3])), x, weight)
    (scattered,) = (n for n in joint.graph.graph.nodes if n.target is torch.ops.aten.scatter.value)
    assert cost.kind_of(scattered) == "point"


def test_a_scatter_of_several_numbers_a_row_is_a_call() -> None:
    joint = joint_of(lambda x: (x * torch.zeros_like(x).scatter(1, x.argsort(1)[:, :2], 2.0)).sin(), inputs()[0])
    (scattered,) = (n for n in joint.graph.graph.nodes if n.target is torch.ops.aten.scatter.value)
    assert cost.kind_of(scattered) == "call"


def test_kinds_of_values_set_no_conditions_on_sizes() -> None:
    """Fewer positions than rows, then as many, in one graph."""

    def fn(x: T, at: T) -> T:
        return (x * torch.zeros_like(x).scatter(1, at, 2.0)).sin()

    f = compiled(fn, dynamic=True)
    for rows, positions in ((6, 4), (5, 5)):
        x, at = torch.randn(rows, 8, requires_grad=True), torch.zeros(positions, 1, dtype=torch.int64)
        with torch._dynamo.config.patch(error_on_recompile=rows == positions):
            torch.testing.assert_close(f(x, at), fn(x, at))


def test_a_residual_stream_is_where_a_network_is_narrow() -> None:
    chooser, _ = joint_of(blocks, *inputs(32)).chooser(DEFAULT)
    found = boundaries(chooser.liveness)
    assert len(found) >= 7
    assert {str(n.target) for n in found} == {"aten.add.Tensor"}


# --- the cut itself ---------------------------------------------------------------------------------------------------


def cheapest(chooser: Chooser, fixed: set[Node], prices: dict[Node, int]) -> int:
    """Return the least cost over all sets of values to save, by trying each."""
    h: Liveness = chooser.liveness
    choices = [n for n in chooser.nodes if n not in fixed and prices[n] < SAVEABLE]
    subsets = (kept for r in range(len(choices) + 1) for kept in itertools.combinations(choices, r))
    costs = [cost_of(chooser, fixed, prices, frozenset(kept), list(h.read)) for kept in subsets]
    return min(c for c in costs if c is not None)


def cost_of(
    chooser: Chooser, fixed: set[Node], prices: dict[Node, int], kept: frozenset[Node], read: list[Node]
) -> int | None:
    """Return what saving `kept` and the values that cannot be recomputed costs; None if a value cannot be had."""
    total, pending, seen = 0, list(read), set(read)
    while pending:
        n = pending.pop()
        if n in kept or n in fixed:
            total += prices[n]
            continue
        total += chooser.recompute_cost(n) if n in chooser.liveness.forward else 0
        new = [a for a in n.all_input_nodes if a not in seen]
        seen.update(new)
        pending.extend(new)
    return total if total < SAVEABLE else None


@settings(max_examples=16, deadline=None)
@given(programs(), st.booleans())
def test_the_cut_costs_as_little_as_the_best_of_all_saved_sets(fn: Callable[..., Any], lifted: bool) -> None:
    chooser, _ = joint_of(fn, *inputs()).chooser(Rules(LIFTED) if lifted else DEFAULT)
    fixed = set(chooser.fixed(chooser.bans))
    if sum(n not in fixed and chooser.prices[n] < SAVEABLE for n in chooser.nodes) > 11:
        return
    choice = chooser.choose()
    got = sum(chooser.prices[n] for n in choice.saved) + sum(map(chooser.recompute_cost, choice.recomputed))
    assert got == cheapest(chooser, fixed, chooser.prices)


@settings(max_examples=12, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_any_values_may_be_kept(fn: Callable[..., Any], random: Any) -> None:
    """Whatever values are saved, the gradients are eager's."""
    joint = joint_of(fn, *inputs())

    def split(gm: GraphModule) -> Halves:
        chooser = Chooser(classify(gm, joint.results), DEFAULT)
        kept = {n: "drawn" for n in chooser.nodes if chooser.prices[n] < SAVEABLE and random.random() < 0.4}
        saved = chooser.choose_with(kept, LIFTED).saved
        taken.append(set(kept) & set(saved))
        return aot_autograd.extract_halves(gm, saved, joint.results)

    taken: list[set[Node]] = []
    for _ in range(4):
        joint.check(split)
    assert len(taken) == 4


# --- the whole backend ------------------------------------------------------------------------------------------------


def test_measured_memory_falls_with_the_budget_and_gradients_stay() -> None:
    torch.manual_seed(0)
    model = GPT(layers=3, width=16, heads=2, vocabulary=16, length=64)
    points = [*memory_curve.curve(model, (torch.randint(0, 16, (4, 64)),), [1.0, 0.0], 1)]
    for larger, smaller in itertools.pairwise(points):
        assert smaller.peak < larger.peak
        assert smaller.saved < larger.saved
    assert all(p.difference < 1e-5 for p in points)
    assert points[-1].peak < 0.6 * points[0].peak


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), True, "half", None])
def test_a_budget_outside_its_range_is_an_error_that_names_the_range(value: Any) -> None:
    with pytest.raises(BadOptionValue, match="from 0 to 1"):
        resolve(options={"activation_memory_budget": value})
    named = r"torch\._functorch\.config\.activation_memory_budget.*from 0 to 1"
    with functorch.patch(activation_memory_budget=value), pytest.raises(BadOptionValue, match=named):
        partition.rules_of(resolve(), GraphModule(torch.nn.Module(), torch.fx.Graph()))


def test_a_wrong_budget_reaches_the_user() -> None:
    with functorch.patch(activation_memory_budget=2.0), pytest.raises(Exception, match="from 0 to 1"):
        compiled(lambda x: x.sin().exp(), strict=False)(torch.ones(3, requires_grad=True))


def test_torchs_setting_is_honoured_and_an_option_overrides_it() -> None:
    empty = GraphModule(torch.nn.Module(), torch.fx.Graph())
    with functorch.patch(activation_memory_budget=0.25):
        assert partition.rules_of(resolve(), empty).budget == 0.25
        assert partition.rules_of(resolve(options={"activation_memory_budget": 0.5}), empty).budget == 0.5


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="newer torch")
def test_a_region_sets_the_budget_of_its_graph(tmp_path: Any) -> None:
    def fn(x: T, w: T, b: T) -> T:
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return blocks(x, w, b)

    given = [x.requires_grad_() for x in inputs(32)]
    compiled(fn, debug_dir=str(tmp_path))(*given)
    texts = [f.read_text() for f in tmp_path.rglob("decisions.txt")]
    assert any("memory budget 0" in text for text in texts)


def test_a_budget_over_symbolic_sizes_and_checkpoints() -> None:
    def fn(x: T, w: T, b: T) -> T:
        return checkpoint(blocks, blocks(x, w, b, 2), w, b, 1, use_reentrant=False)

    def splitter(joint: GraphModule, inputs: Any, got: SplitGraphs, **kwargs: Any) -> Halves:
        return partition.split(joint, kwargs["num_fwd_outputs"], rules=Rules(budget=0.2))

    run, got = split_only(fn, splitter, dynamic=True)
    for rows in (4, 7):
        given = [torch.randn(rows, 8, dtype=torch.float64), *(x.double() for x in inputs()[1:])]
        for mine, theirs in zip(gradients(run, *given), gradients(fn, *given), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert "mm" in got.recomputed()
