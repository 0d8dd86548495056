"""The split of a joint graph: correct gradients, few saved bytes, checkpoint policies, and the minimum cut itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import networkx
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import altbackend
from altbackend import decomp, partition
from altbackend.aten.name import operator_name
from altbackend.aten.random import is_random
from altbackend.compat import aot_autograd
from altbackend.errors import FallbackWarning
from altbackend.partition import cost
from altbackend.partition.flow import INFINITE, Network, Unbounded
from altbackend.partition.liveness import classify

T = torch.Tensor
aten = torch.ops.aten
Splitter = Callable[..., tuple[GraphModule, GraphModule]]
Edges = tuple[int, list[tuple[int, int, int]]]  # vertices; from, to, capacity


class SplitGraphs:
    """The forward and backward of one compilation."""

    def __init__(self) -> None:
        self.forward = self.backward = GraphModule(torch.nn.Module(), torch.fx.Graph())
        self.results = 0
        self.decisions: list[tuple[str, str, str, str]] = []

    @property
    def saved(self) -> list[Node]:
        return [n for n in self.forward.graph.output_node().args[0][self.results :] if isinstance(n, Node)]  # type: ignore[index]

    @property
    def bytes(self) -> int:
        return partition.saved_bytes(self.forward, self.results)

    def recomputed(self) -> list[str]:
        """Return the recomputed operators, in the order of the backward, without views and sizes."""
        early = {n.name for n in self.forward.graph.nodes if n.op == "call_function"}
        return [
            operator_name(n.target)
            for n in self.backward.graph.nodes
            if n.op == "call_function" and n.name in early and cost.kind_of(n) not in ("view", "size")
        ]


def ours(joint: GraphModule, inputs: Any, got: SplitGraphs, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    return partition.split(joint, kwargs["num_fwd_outputs"], lambda *d: got.decisions.append(d))


def everything(joint: GraphModule, inputs: Any, got: SplitGraphs, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """Save every value that the backward reads."""
    halves: tuple[GraphModule, GraphModule] = torch._functorch.partitioners.default_partition(joint, inputs, **kwargs)
    return halves


def compiled(
    fn: Callable[..., Any], splitter: Splitter = ours, dynamic: bool = False
) -> tuple[Callable[..., Any], SplitGraphs]:
    """Trace `fn` as the backend does and split it; forward and backward run operator by operator."""
    got = SplitGraphs()

    def split(joint: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        got.results = kwargs["num_fwd_outputs"]
        got.forward, got.backward = splitter(joint, inputs, got, **kwargs)
        return got.forward, got.backward

    def compile_(gm: GraphModule, inputs: Any) -> Any:
        build = aot_autograd.aot_autograd(
            fw_compiler=lambda g, _: make_boxed_func(g.forward),
            bw_compiler=lambda g, _: make_boxed_func(g.forward),
            decompositions=decomp.table(),
            partition_fn=split,
            keep_inference_input_mutations=True,
        )
        with aot_autograd.functorch_settings():
            return build(gm, inputs)

    return torch.compile(fn, backend=compile_, dynamic=dynamic, fullgraph=True), got


def gradients(fn: Callable[..., Any], *inputs: T, seed: int = 0) -> list[T]:
    """Return (results, gradients of sum(results) for the floating-point inputs)."""
    torch.manual_seed(seed)
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = fn(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    torch.stack([o.double().sum() for o in outs if o.requires_grad]).sum().backward()
    return [o.detach() for o in outs] + [x.grad for x in leaves if x.grad is not None]


def agree(fn: Callable[..., Any], *inputs: T, splitter: Splitter = ours, dynamic: bool = False) -> SplitGraphs:
    """Compare with eager; in float64, except for 16-bit inputs, so that the order of sums does not matter."""
    inputs = tuple(x.double() if x.dtype == torch.float32 else x for x in inputs)
    run, got = compiled(fn, splitter, dynamic)
    for g, w in zip(gradients(run, *inputs), gradients(fn, *inputs), strict=True):
        torch.testing.assert_close(g, w)
    return got


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


# --- the minimum cut ---


@st.composite
def networks(draw: st.DrawFn) -> Edges:
    n = draw(st.integers(2, 9))
    vertex = st.integers(0, n - 1)
    capacity = st.one_of(st.integers(0, 12), st.just(INFINITE))
    return n, draw(st.lists(st.tuples(vertex, vertex, capacity).filter(lambda e: e[0] != e[1]), max_size=30))


@settings(max_examples=300, deadline=None)
@given(networks())
def test_a_cut_is_as_cheap_as_networkx_finds_it_and_nearest_to_the_sink(
    network: tuple[int, list[tuple[int, int, int]]],
) -> None:
    n, edges = network
    reference = networkx.DiGraph()
    reference.add_nodes_from(range(n))
    net = Network(n)
    for a, b, c in edges:
        net.edge(a, b, c)
        capacity = reference[a][b]["capacity"] if reference.has_edge(a, b) else 0
        reference.add_edge(a, b, capacity=capacity + c)
    want = networkx.minimum_cut_value(reference, 0, n - 1)
    if want >= INFINITE:
        with pytest.raises(Unbounded):
            net.cut(0, n - 1)
        return
    value, on_sink_side = net.cut(0, n - 1)
    assert value == want == sum(c for a, b, c in edges if on_sink_side[b] and not on_sink_side[a])
    assert on_sink_side[n - 1]
    assert not on_sink_side[0]
    for v in (v for v in range(n - 1) if on_sink_side[v]):  # no minimum cut has a smaller sink side
        bound = reference.copy()
        bound.add_edge(0, v, capacity=INFINITE)
        assert networkx.minimum_cut_value(bound, 0, n - 1) > want


def test_a_long_network_takes_no_recursion() -> None:
    net = Network(20_002)
    for k in range(20_001):
        net.edge(k, k + 1, 3 if k != 12_345 else 2)
    value, on_sink_side = net.cut(0, 20_001)
    assert value == 2
    assert on_sink_side.index(True) == 12_346


# --- gradients and bytes ---


STEPS: list[Callable[[T, T, T, T], T]] = [
    lambda p, q, w, b: p @ w,
    lambda p, q, w, b: p + q,
    lambda p, q, w, b: p * q.sigmoid(),
    lambda p, q, w, b: F.gelu(p) + b,
    lambda p, q, w, b: F.layer_norm(p, (8,), b, b),
    lambda p, q, w, b: torch.softmax(p, -1),
    lambda p, q, w, b: p.t().reshape(8, 4).t() * 2,
    lambda p, q, w, b: torch.cat([p[:, :4], q[:, 4:]], 1),
    lambda p, q, w, b: p - q.mean(0),
    lambda p, q, w, b: p.relu() * (q > 0),
    lambda p, q, w, b: (p.tanh() @ q.t()) @ p,
    lambda p, q, w, b: p.view(4, 2, 4).sum(1).repeat(1, 2).exp().clamp(max=3),
]


@st.composite
def programs(draw: st.DrawFn) -> Callable[[T, T, T], Any]:
    """Draw functions of (x [4, 8], w [8, 8], b [8]) of a few steps, each on earlier values."""
    steps = draw(
        st.lists(
            st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=9
        )
    )

    def run(x: T, w: T, b: T) -> Any:
        values = [x, x * b]
        for op, i, j in steps:
            values.append(STEPS[op](values[i % len(values)], values[j % len(values)], w, b))
        return values[-1], values[-2].detach()

    return run


@settings(max_examples=20, deadline=None)
@given(programs())
def test_gradients_are_eagers_and_no_more_is_saved_than_by_saving_all(fn: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(3)
    inputs = torch.randn(4, 8), torch.randn(8, 8) / 3, torch.randn(8)
    got = agree(fn, *inputs)
    storages = classify(got.forward, got.results).storage
    owners = [storages[n] for n in got.saved if isinstance(n.meta["val"], T)]
    assert len(owners) == len(set(owners))  # never two views of one storage
    torch._dynamo.reset()
    assert got.bytes <= agree(fn, *inputs, splitter=everything).bytes


def test_low_precision_is_saved_in_place_of_the_cast_from_it() -> None:
    def fn(x: T, w: T) -> T:
        return (F.linear(x, w).float().exp() * 3).sin().to(torch.bfloat16).relu()

    x, w = torch.randn(64, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    got = agree(fn, x, w)
    assert {n.meta["val"].dtype for n in got.saved} == {torch.bfloat16}
    assert got.bytes == 64 * 32 * 2
    assert {"exp", "_to_copy"} <= set(got.recomputed())
    assert "mm" not in got.recomputed()


def test_library_calls_and_random_numbers_are_never_run_twice() -> None:
    def fn(x: T, w: T) -> T:
        h = F.dropout(x @ w, 0.5)
        h = F.conv1d(h[None], w[:, :, None]).squeeze(0)
        return F.max_pool1d(h[None], 2).squeeze(0).exp()

    got = agree(fn, torch.randn(8, 8), torch.randn(8, 8))
    assert not {"mm", "convolution", "max_pool2d_with_indices", "native_dropout", "bernoulli", "rand"} & set(
        got.recomputed()
    )


def test_random_numbers_of_the_forward_are_not_drawn_again_by_the_backward() -> None:
    def fn(x: T) -> T:
        return x * torch.rand(16) + torch.rand(16)

    run, got = compiled(fn)
    gradients(run, torch.randn(16))
    assert not [n for n in got.backward.graph.nodes if is_random(n.target)]


def test_a_residual_stream_is_saved_layer_by_layer() -> None:
    def fn(x: T, w: T) -> T:
        for _ in range(6):
            x = x + torch.tanh(F.layer_norm(x, (32,)) @ w) * 2
        return x

    got = agree(fn, torch.randn(64, 32), torch.randn(32, 32) / 6)
    sums = [n for n in got.saved if operator_name(n.target) == "add"]
    assert len(sums) == 4  # the first adds to an input, the last is the result
    assert got.recomputed().count("add") == 1


def test_a_mask_made_of_numbers_is_made_again() -> None:
    def fn(x: T) -> T:
        mask = torch.arange(64)[:, None] >= torch.arange(64)
        for _ in range(2):
            x = torch.softmax(torch.where(mask, x @ x, -1e9), -1)
        return x

    got = agree(fn, torch.randn(64, 64))
    assert torch.bool not in {n.meta["val"].dtype for n in got.saved}


def test_what_is_made_again_stands_where_it_is_first_read() -> None:
    def fn(x: T, w: T) -> T:
        for _ in range(4):
            x = torch.sin(torch.exp(x @ w) * 2)
        return x

    got = agree(fn, torch.randn(8, 8) / 4, torch.randn(8, 8) / 8)
    order = [operator_name(n.target) for n in got.backward.graph.nodes if n.op == "call_function"]
    products = [k for k, name in enumerate(order) if name == "mm"]
    exps = [k for k, name in enumerate(order) if name == "exp"]
    assert len(exps) == 4
    assert all(sum(k < p for k in exps) <= n // 2 + 1 for n, p in enumerate(products))


# --- sizes, inputs that change, tags ---


def test_symbolic_sizes_are_saved_as_numbers() -> None:
    def fn(x: T, w: T) -> T:
        return F.gelu(x @ w).sum(0).expand(x.shape[0], -1) * x.shape[0]

    run, got = compiled(fn, dynamic=True)
    for n in (5, 9, 12):
        inputs = torch.randn(n, 8), torch.randn(8, 16)
        for g, w in zip(gradients(run, *inputs), gradients(fn, *inputs), strict=True):
            torch.testing.assert_close(g, w)
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in got.saved)


def test_an_input_that_the_forward_overwrites_is_not_read_by_the_backward() -> None:
    def fn(x: T, b: T) -> T:
        y = x.sin() * b.clone()
        b.add_(1.0)
        return y

    run, got = compiled(fn)
    x, b = torch.randn(8).requires_grad_(), torch.randn(8)
    want = x.detach().cos() * b
    run(x, b).sum().backward()
    torch.testing.assert_close(x.grad, want)
    assert "clone" in {operator_name(n.target) for n in got.saved}


def layers(x: T, w: T, wrap: Callable[..., Any]) -> T:
    for _ in range(3):
        x = wrap(lambda x, w: torch.tanh(torch.exp(x @ w) @ w), x, w)
    return x


def test_checkpointed_regions_are_computed_again() -> None:
    def fn(x: T, w: T) -> T:
        return layers(x, w, lambda f, *a: checkpoint(f, *a, use_reentrant=False))

    inputs = torch.randn(16, 16) / 4, torch.randn(16, 16) / 8
    got = agree(fn, *inputs)
    assert got.recomputed().count("mm") >= 3
    assert got.bytes <= 2 * 16 * 16 * 8  # the values between the regions
    torch._dynamo.reset()
    assert agree(lambda x, w: layers(x, w, lambda f, *a: f(*a)), *inputs).bytes > got.bytes


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_checkpoint_policy_that_saves_products_is_honoured() -> None:
    context = functools.partial(create_selective_checkpoint_contexts, keep_products)

    def fn(x: T, w: T) -> T:
        return layers(x, w, lambda f, *a: checkpoint(f, *a, use_reentrant=False, context_fn=context))

    got = agree(fn, torch.randn(16, 16) / 4, torch.randn(16, 16) / 8)
    assert "mm" not in got.recomputed()
    assert "exp" in got.recomputed()
    assert any("checkpoint policy" in reason for *_, reason in got.decisions)


def test_the_whole_backend_agrees_with_eager_under_a_checkpoint() -> None:
    def fn(x: T, w: T) -> T:
        return layers(x, w, lambda f, *a: checkpoint(f, *a, use_reentrant=False))

    inputs = torch.randn(16, 16) / 4, torch.randn(16, 16) / 8
    run = torch.compile(fn, backend=altbackend.alt, options={"strict": True})
    for g, w in zip(gradients(run, *inputs), gradients(fn, *inputs), strict=True):
        torch.testing.assert_close(g, w)


# --- failure and size ---


def test_a_failure_hands_the_graph_to_torch_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("broken partitioner")

    monkeypatch.setattr(partition, "split", broken)

    def fn(x: T) -> T:
        return x.sin().exp()

    x = torch.randn(8)
    with pytest.warns(FallbackWarning, match="broken partitioner"):
        got = gradients(torch.compile(fn, backend=altbackend.alt), x)
    for g, w in zip(got, gradients(fn, x), strict=True):
        torch.testing.assert_close(g, w)
    torch._dynamo.reset()
    strict = torch.compile(fn, backend=altbackend.alt, options={"strict": True})
    with pytest.raises(Exception, match="broken partitioner"):
        gradients(strict, x)


def test_of_an_overwritten_input_that_a_gradient_reads_a_copy_is_saved() -> None:
    graph = torch.fx.Graph()
    x, w, t = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    product = graph.call_function(aten.mul.Tensor, (x, w))
    more = graph.call_function(aten.add.Tensor, (w, 1))
    grad = graph.call_function(aten.mul.Tensor, (t, w))
    graph.call_function(aten.copy_.default, (w, more))
    graph.output((product, grad, None))
    for n in graph.nodes:
        n.meta["val"] = torch.empty(4, device="meta")
    forward, _ = partition.split(GraphModule(torch.nn.Module(), graph), 1)
    results: Any = forward.graph.output_node().args[0]
    _, saved = results
    assert (saved.target, saved.args[0].name) == (aten.clone.default, "primals_2")


@pytest.mark.timeout(60)
def test_twenty_thousand_nodes() -> None:
    """A deep network of products and pointwise chains, as a joint graph."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("primals_1"), graph.placeholder("primals_2")
    t = graph.placeholder("tangents_1")
    values, gradients = [x], [t]
    chain = [aten.sin.default, aten.exp.default, aten.tanh.default, aten.neg.default]
    for k in range(8_000):
        call = graph.call_function(aten.mm.default, (values[-1], w)) if k % 5 == 0 else None
        values.append(call or graph.call_function(chain[k % 4], (values[-1],)))
    for n in reversed(values[1:]):
        gradients.append(
            graph.call_function(aten.mul.Tensor, (gradients[-1], graph.call_function(aten.cos.default, (n,))))
        )
    graph.output((values[-1], gradients[-1], None))
    for n in graph.nodes:
        n.meta["val"] = torch.empty(16, 16, device="meta")
    assert len(graph.nodes) > 20_000
    forward, backward = partition.split(GraphModule(torch.nn.Module(), graph), 1)
    results: Any = forward.graph.output_node().args[0]
    saved = results[1:]
    assert {operator_name(n.target) for n in saved if n.op != "placeholder" and n.name != values[-1].name} == {"mm"}
    assert len(saved) <= 1_602
    assert len(backward.graph.nodes) > 20_000
