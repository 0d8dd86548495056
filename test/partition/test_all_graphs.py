"""Joint graphs beyond pure tensors: subgraphs, effects, writes in the backward, collectives, replayed random calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from altbackend import partition
from altbackend.aten.name import operator_name
from test.compare import compiled
from test.test_partition import SplitGraphs, agree, gradients
from test.test_partition import compiled as split_only

T = torch.Tensor
aten = torch.ops.aten
CALLS: list[str] = []


@torch.library.custom_op("altpartition::note", mutates_args=())
def note(x: T, word: str) -> T:
    CALLS.append(word)
    return x.clone()


note.register_fake(lambda x, word: x.clone())
torch.library.register_autograd(
    "altpartition::note",
    lambda ctx, grad: (note(grad, "backward"), None),
    setup_context=lambda ctx, inputs, output: None,
)
note.register_effect(torch._library.effects.EffectType.ORDERED)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    CALLS.clear()


def operators(got: SplitGraphs, half: str) -> list[str]:
    graph = got.forward.graph if half == "forward" else got.backward.graph
    return [
        operator_name(n.target) or getattr(n.target, "__name__", "") for n in graph.nodes if n.op == "call_function"
    ]


def test_a_branch_of_the_forward_is_not_run_again_by_the_backward() -> None:
    def fn(x: T, w: T) -> T:
        y = torch.cond(x.sum() > 0, lambda a, b: torch.relu(a @ b), lambda a, b: (a @ b).cos(), (x.sin(), w))
        return torch.tanh(torch.exp(y) * 2)

    got = agree(fn, torch.randn(8, 8), torch.randn(8, 8))
    assert "cond" in operators(got, "forward")
    assert "cond" not in got.recomputed()
    assert any(n.name.startswith("getitem") for n in got.saved)


def test_a_layer_that_is_compiled_once_is_split_by_the_same_rules() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: T, w: T) -> T:
        return torch.sin(torch.exp(x @ w) * 2) + x

    splits: list[SplitGraphs] = []

    def ours(joint: Any, inputs: Any, got: SplitGraphs, **kwargs: Any) -> Any:
        own = SplitGraphs()
        own.results = kwargs["num_fwd_outputs"]
        own.forward, own.backward = partition.split(joint, own.results)
        splits.append(own)
        return own.forward, own.backward

    agree(lambda x, w: layer(layer(x, w), w), torch.randn(8, 8) / 4, torch.randn(8, 8) / 4, splitter=ours)
    body = splits[0]
    assert "mm" not in body.recomputed()
    assert {"exp", "mul"} <= set(body.recomputed())
    assert len(splits) == 2  # the body and the graph around it


def test_effects_run_once_each_and_in_order() -> None:
    def fn(x: T) -> T:
        return note(note(x.sin(), "first").exp() * 3, "second").cos()

    x = torch.randn(16)
    want = gradients(fn, x)
    eager, CALLS[:] = CALLS[:], []
    got = gradients(compiled(fn), x)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    assert CALLS == eager == ["first", "second", "backward", "backward"]


class Counting(torch.autograd.Function):
    """Multiply by 2; count the backward in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: T, count: T) -> T:
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        ctx.count.add_(1)
        return grad * 2, None


@pytest.mark.parametrize("forward_writes_too", [False, True])
def test_a_buffer_that_the_backward_writes(forward_writes_too: bool) -> None:
    def fn(x: T, count: T) -> T:
        if forward_writes_too:
            count.add_(10)
        return Counting.apply(x.sin(), count).exp()

    results = []
    for run in (fn, compiled(fn)):
        x, count = torch.linspace(-1, 1, 8, requires_grad=True), torch.zeros(3)
        seen = []
        for _ in range(2):
            y = run(x, count)
            seen.append(count.clone())
            y.sum().backward()
            seen.append(count.clone())
        results.append([*seen, x.grad])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


# --- collectives ------------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Any]:
    """Processes that exist in name only: their collectives have shapes and no effect."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def reduced(x: T, group: Any) -> T:
    return collectives.all_reduce(x, "sum", group)  # its first reader waits


def split_of(fn: Callable[..., Any], *inputs: T) -> SplitGraphs:
    run, got = split_only(fn)
    gradients(run, *inputs)
    return got


def test_collectives_are_run_once_and_in_order(group: Any) -> None:
    def fn(x: T, w: T) -> T:
        first = reduced(torch.exp(x) @ w, group)
        second = reduced(torch.sin(first) * 3 @ w, group)
        return torch.tanh(second.exp())

    got = split_of(fn, torch.randn(8, 8), torch.randn(8, 8))
    calls = [n for n in operators(got, "forward") if n in ("all_reduce", "wait_tensor")]
    assert calls == ["all_reduce", "wait_tensor"] * 2
    assert not {"all_reduce", "wait_tensor"} & set(got.recomputed())
    kept = {operator_name(n.target) for n in got.saved}
    assert "wait_tensor" in kept
    assert "all_reduce" not in kept  # it may not be finished when the forward ends


def test_a_checkpoint_recomputes_its_collectives_in_their_order(group: Any) -> None:
    def block(x: T, w: T) -> T:
        gathered = collectives.all_gather_tensor(x.exp(), 0, group)
        return torch.sin(gathered[:8] @ w) * reduced(x * 2, group)

    def fn(x: T, w: T) -> T:
        return checkpoint(block, checkpoint(block, x, w, use_reentrant=False), w, use_reentrant=False)

    got = split_of(fn, torch.randn(8, 8), torch.randn(8, 8))
    recomputed = [n for n in got.recomputed() if n in ("all_gather_into_tensor", "all_reduce")]
    assert recomputed.count("all_gather_into_tensor") == 2
    assert "wait_tensor" not in {operator_name(n.target) for n in got.saved}


# --- random calls with eager's generator ------------------------------------------------------------------------------


def test_a_replayed_random_call_saves_the_state_and_not_the_numbers() -> None:
    def fn(x: T) -> T:
        return checkpoint(lambda v: torch.sin(v) * torch.rand_like(v) * torch.randn_like(v), x, use_reentrant=False)

    got = agree(fn, torch.randn(512, 64))
    assert {n.meta["val"].dtype for n in got.saved if n.op != "placeholder"} == {torch.uint8}
    assert operators(got, "forward").count("run_and_save_rng_state") == 2
    assert operators(got, "backward").count("run_with_rng_state") == 2


def test_the_generator_is_left_as_eager_leaves_it() -> None:
    def fn(x: T) -> T:
        y = checkpoint(lambda v: torch.nn.functional.dropout(v.exp(), 0.5), x, use_reentrant=False)
        return y + torch.rand_like(y)

    run, got = split_only(fn)
    after = []
    for call in (fn, run):
        torch.manual_seed(3)
        x = torch.ones(64, requires_grad=True)
        y = call(x)
        middle = torch.get_rng_state()
        y.sum().backward()
        after.append((y.detach(), x.grad, middle, torch.get_rng_state()))
    for want, mine in zip(*after, strict=True):
        assert torch.equal(want, mine)
    assert operators(got, "backward").count("run_with_rng_state") == 1
