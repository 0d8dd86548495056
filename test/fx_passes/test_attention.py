"""Attention that programs write out: each form is found and fused once, and gives eager's results and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_map_only

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes.attention import rewrite
from altbackend.fx_passes.attention.sink_kernels import attention_with_sink
from altbackend.fx_passes.context import Context
from altbackend.fx_passes.graph import snapshot
from test.compare import compiled, difference, twin

T = torch.Tensor
aten = torch.ops.aten
B, H, L, S, D = 2, 4, 6, 6, 8
SCALE = 1 / math.sqrt(D)


def heads(*shape: int) -> list[T]:
    return [torch.randn(shape or (B, H, L, D)) for _ in range(3)]


def repeat_kv(x: T, n: int) -> T:
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def plain(q: T, k: T, v: T) -> T:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)), dim=-1), v)


def scaled(q: T, k: T, v: T) -> T:
    return F.softmax(q @ k.mT * SCALE, -1) @ v


def divided(q: T, k: T, v: T) -> T:
    return (q.matmul(k.transpose(2, 3)) / math.sqrt(D)).softmax(dim=-1).matmul(v)


def divided_by_tensor(q: T, k: T, v: T) -> T:
    scores = q @ k.transpose(-1, -2)
    return torch.softmax(scores / torch.full([], v.shape[-1] ** 0.5, dtype=scores.dtype), -1) @ v


def by_root_of_features(q: T, k: T, v: T) -> T:
    return (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def causal_for_all_sizes(q: T, k: T, v: T) -> T:
    hidden = torch.triu(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool), 1)
    return (q @ k.transpose(2, 3)).masked_fill(hidden, -math.inf).softmax(-1) @ v


def scaled_before(q: T, k: T, v: T) -> T:
    return torch.softmax((q * SCALE) @ k.transpose(-1, -2), -1) @ v


def additive(q: T, k: T, v: T, mask: T) -> T:
    return F.softmax(q @ k.transpose(2, 3) * SCALE + mask, dim=-1) @ v


def additive_first(q: T, k: T, v: T, mask: T) -> T:
    return F.softmax(mask + q @ k.transpose(2, 3), dim=-1) @ v


def in_place(q: T, k: T, v: T, mask: T) -> T:
    scores = q @ k.transpose(2, 3)
    scores /= math.sqrt(D)
    scores += mask
    return scores.softmax(-1) @ v


def subtracted(q: T, k: T, v: T, mask: T) -> T:
    return F.softmax(q @ k.transpose(2, 3) * SCALE + 0 - mask, dim=-1) @ v


def filled(q: T, k: T, v: T, keep: T) -> T:
    return (q @ k.transpose(2, 3)).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def filled_low(q: T, k: T, v: T, keep: T) -> T:
    return (q @ k.transpose(2, 3)).masked_fill(keep == 0, torch.finfo(q.dtype).min).softmax(-1) @ v


def chosen(q: T, k: T, v: T, keep: T) -> T:
    scores = q @ k.transpose(2, 3)
    return torch.where(keep, scores, torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype)).softmax(-1) @ v


def chosen_number_first(q: T, k: T, v: T, keep: T) -> T:
    return torch.where(~keep, float("-inf"), q @ k.transpose(2, 3)).softmax(-1) @ v


def causal_filled(q: T, k: T, v: T) -> T:
    keep = torch.tril(torch.ones(L, L, dtype=torch.bool))
    return (q @ k.transpose(-2, -1) * SCALE).masked_fill(~keep, float("-inf")).softmax(-1) @ v


def causal_added(q: T, k: T, v: T) -> T:
    mask = torch.triu(torch.full((L, L), float("-inf")), diagonal=1)
    return (q @ k.transpose(-2, -1) * SCALE + mask).softmax(-1) @ v


def causal_positions(q: T, k: T, v: T) -> T:
    at = torch.arange(L)
    mask = torch.where(at[None] <= at[:, None], 0.0, torch.finfo(q.dtype).min)[None, None]
    return (q @ k.transpose(-2, -1) * SCALE + mask).softmax(-1) @ v


def all_visible(q: T, k: T, v: T) -> T:
    return (q @ k.transpose(-2, -1) + torch.zeros(L, L)).softmax(-1) @ v


def window(q: T, k: T, v: T) -> T:
    at = torch.arange(L)
    far = (at[None] - at[:, None]).abs() > 2
    return (q @ k.transpose(-2, -1)).masked_fill(far, float("-inf")).softmax(-1) @ v


def dropout_off(q: T, k: T, v: T) -> T:
    return F.dropout(F.softmax(q @ k.transpose(-1, -2), -1), 0.1, training=False) @ v


def softmax_in_float32(q: T, k: T, v: T, mask: T) -> T:
    weights = F.softmax(q @ k.transpose(2, 3) * SCALE + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, p=0.0, training=True) @ v


def scores_in_float32(q: T, k: T, v: T, mask: T) -> T:
    return F.softmax((q @ k.transpose(2, 3)).float() + mask, dim=-1).type_as(q) @ v


def viewed_heads(x: T, w: T) -> T:
    q, k, v = (y.view(B, L, H, D).transpose(1, 2) for y in (x @ w).chunk(3, -1))
    mixed = F.softmax(q @ k.transpose(-1, -2) * SCALE, -1) @ v
    return mixed.transpose(1, 2).reshape(B, L, H * D)


def split_qkv(x: T, w: T) -> T:
    q, k, v = F.linear(x, w.t()).reshape(B, L, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
    q = q * SCALE
    attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
    return (attn @ v).transpose(1, 2).reshape(B, L, H * D)


def three_dimensions(q: T, k: T, v: T) -> T:
    return torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)


def two_dimensions(q: T, k: T, v: T) -> T:
    return torch.mm(torch.softmax(torch.mm(q, k.t()) * SCALE, 1), v)


def alibi(q: T, k: T, v: T, bias: T) -> T:
    scores = bias.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=SCALE).view(B, H, L, S)
    weights = F.softmax(scores, dim=-1).view(B * H, L, S)
    return torch.bmm(weights, v).view(B, H, L, D)


def grouped(q: T, k: T, v: T) -> T:
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    return F.softmax(q @ k.transpose(2, 3) * SCALE, dim=-1) @ v


def grouped_by_repeat(q: T, k: T, v: T) -> T:
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    return F.softmax(q @ k.transpose(2, 3) * SCALE, dim=-1) @ v


def one_key_head(q: T, k: T, v: T) -> T:
    return F.softmax(q @ k.sin().transpose(2, 3) * SCALE, dim=-1) @ v.cos()


def relative_bias(q: T, k: T, v: T, table: T, mask: T) -> T:
    at = torch.arange(L)
    bias = F.embedding((at[None] - at[:, None]).abs(), table).permute(2, 0, 1).unsqueeze(0)
    return F.softmax(q @ k.transpose(3, 2) + (bias + mask), dim=-1) @ v


def shifted_windows(q: T, k: T, v: T, bias: T, mask: T) -> T:
    scores = q @ k.transpose(-2, -1) * SCALE + bias.unsqueeze(0)
    scores = scores.view(2, 2, H, L, L) + mask.unsqueeze(1).unsqueeze(0)
    return scores.view(-1, H, L, L).softmax(-1) @ v


def equations(q: T, k: T, v: T) -> T:
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE, -1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def two_masks(q: T, k: T, v: T, bias: T, keep: T) -> T:
    scores = q @ k.transpose(-1, -2) * SCALE + bias
    return scores.masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1) @ v


def cosine(q: T, k: T, v: T, scale: T, bias: T) -> T:
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return ((scores * scale.exp() + bias).softmax(-1)) @ v


def rows_divided(q: T, k: T, v: T, rows: T) -> T:
    return (q @ k.transpose(-2, -1) / (rows * rows + 1)).softmax(-1) @ v


def floored(q: T, k: T, v: T, mask: T) -> T:
    scores = (q @ k.transpose(-2, -1)) + mask
    return torch.max(scores, torch.tensor(torch.finfo(q.dtype).min)).softmax(-1) @ v


def blocks(q: T, k: T, v: T, bias: T) -> T:
    scores = torch.einsum("...qhd,...khd->...hqk", q, k)
    scores += bias
    return torch.einsum("...hqk,...khd->...qhd", scores.float().softmax(-1).type_as(scores), v)


def bias_written_between(q: T, k: T, v: T, left: T, right: T) -> T:
    scores = q @ k.transpose(-2, -1)
    bias = left * 2
    bias += right
    return (scores + bias).softmax(-1) @ v


def checkpointed(q: T, k: T, v: T) -> T:
    return torch.utils.checkpoint.checkpoint(scaled, q, k, v, use_reentrant=False)


def with_sink(q: T, k: T, v: T, sink: T, mask: T) -> T:
    scores = q @ k.transpose(2, 3) * SCALE + mask
    rows = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(B, -1, L, -1)], dim=-1)
    rows = rows - rows.max(dim=-1, keepdim=True).values
    weights = F.softmax(rows, dim=-1, dtype=rows.dtype)[..., :-1]
    return F.dropout(weights, p=0.0, training=False) @ v


def sink_first(q: T, k: T, v: T, sink: T) -> T:
    hidden = torch.ones(L, S, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * SCALE).masked_fill(hidden, -math.inf)
    rows = torch.cat((sink.view(1, H, 1, 1).expand(B, H, L, 1), scores), -1)
    return rows.softmax(-1)[:, :, :, 1:] @ v


def grouped_with_sink(q: T, k: T, v: T, sink: T) -> T:
    scores = q @ repeat_kv(k, 2).transpose(2, 3) * SCALE
    rows = torch.cat([scores, sink.view(1, H, 1, 1).expand(B, H, L, 1)], -1)
    return torch.narrow(rows.softmax(-1), -1, 0, S) @ repeat_kv(v, 2)


def less_the_largest(q: T, k: T, v: T) -> T:
    scores = q @ k.transpose(2, 3)
    return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1) @ v


def padding() -> T:
    keep = torch.ones(B, 1, 1, S, dtype=torch.bool)
    keep[0, ..., -2:] = False
    return keep


def low_padding(dtype: torch.dtype = torch.float32) -> T:
    return torch.where(padding(), 0.0, torch.finfo(dtype).min).to(dtype)


def infinite_padding() -> T:
    return torch.where(padding(), 0.0, -math.inf)


@dataclass(frozen=True)
class Case:
    """A form: its function and how its inputs are made. `differentiable`: how many of them get a gradient."""

    fn: Callable[..., T]
    inputs: Callable[[], Sequence[T]] = field(default=heads)
    differentiable: int = 3


def bfloat16(xs: Sequence[T]) -> list[T]:
    return [x.bfloat16() for x in xs]


CASES = [
    *(Case(fn) for fn in (plain, scaled, divided, divided_by_tensor, scaled_before)),
    *(Case(fn, lambda: [*heads(), low_padding()]) for fn in (additive, additive_first, in_place)),
    Case(additive, lambda: [*heads(), infinite_padding()]),
    Case(subtracted, lambda: [*heads(), -low_padding()]),
    *(Case(fn, lambda: [*heads(), padding()]) for fn in (filled, filled_low, chosen, chosen_number_first)),
    *(Case(fn) for fn in (causal_filled, causal_added, causal_positions, all_visible, window, dropout_off)),
    Case(softmax_in_float32, lambda: [*bfloat16(heads()), low_padding(torch.bfloat16)]),
    Case(softmax_in_float32, lambda: [*(x.half() for x in heads()), low_padding(torch.float16)]),
    Case(scores_in_float32, lambda: [*bfloat16(heads()), low_padding()]),
    Case(plain, lambda: [x.double() for x in heads()]),
    *(
        Case(fn, lambda: [torch.randn(B, L, H * D), torch.randn(H * D, 3 * H * D) / 8], 2)
        for fn in (viewed_heads, split_qkv)
    ),
    Case(three_dimensions, lambda: heads(B * H, L, D)),
    Case(two_dimensions, lambda: heads(L, D)),
    Case(alibi, lambda: [*heads(B * H, L, D), torch.randn(B * H, 1, S)]),
    *(
        Case(fn, lambda: [torch.randn(B, H, L, D), torch.randn(B, 2, S, D), torch.randn(B, 2, S, D)])
        for fn in (grouped, grouped_by_repeat)
    ),
    Case(one_key_head, lambda: [torch.randn(B, H, L, D), torch.randn(B, 1, S, D), torch.randn(B, 1, S, D)]),
    Case(relative_bias, lambda: [*heads(), torch.randn(L, H), low_padding()]),
    Case(shifted_windows, lambda: [*heads(4, H, L, D), torch.randn(H, L, L), torch.randn(2, L, L)]),
    Case(equations, lambda: heads(B, L, H, D)),
    Case(two_masks, lambda: [*heads(), torch.randn(1, H, L, S), padding()]),
    Case(cosine, lambda: [*heads(), torch.randn(H, 1, 1), torch.randn(1, H, L, S)]),
    Case(rows_divided, lambda: [*heads(), torch.randn(B, 1, L, 1)]),
    Case(floored, lambda: [*heads(), low_padding()]),
    Case(floored, lambda: [*heads(), infinite_padding()]),
    Case(blocks, lambda: [*heads(B, 3, L, H, D), torch.randn(1, 1, H, L, S)]),
    Case(bias_written_between, lambda: [*heads(), torch.randn(1, H, L, S), torch.randn(1, H, L, S)]),
    Case(checkpointed),
    Case(with_sink, lambda: [*heads(), torch.randn(H), low_padding()], 4),
    Case(with_sink, lambda: [*bfloat16([*heads(), torch.randn(H)]), low_padding(torch.bfloat16)], 4),
    Case(sink_first, lambda: [*heads(), torch.randn(H)], 4),
    Case(
        grouped_with_sink,
        lambda: [torch.randn(B, H, L, D), torch.randn(B, 2, S, D), torch.randn(B, 2, S, D), torch.randn(H)],
        4,
    ),
    Case(less_the_largest),
    Case(scaled, lambda: [torch.randn(B, H, L, D), torch.randn(B, H, S, D), torch.randn(B, H, S, 4)]),
    Case(causal_filled, lambda: bfloat16([torch.randn(B, H, L, 8), torch.randn(B, H, S, 8), torch.randn(B, H, S, 24)])),
    Case(with_sink, lambda: [*heads()[:2], torch.randn(B, H, S, 4), torch.randn(H), low_padding()], 4),
    Case(equations, lambda: [*heads(B, L, H, D)[:2], torch.randn(B, S, H, 12)]),
]
IDS = [f"{k}-{case.fn.__name__}" for k, case in enumerate(CASES)]


def context(**options: Any) -> Context:
    cfg = resolve(None, {"attention": "on", **options})
    return Context(cfg, Trace("captured", cfg))


class Fuse:
    """A backend that fuses attention in the captured graph and then runs the graph operator by operator."""

    def __init__(self, on: str = "cpu", **options: Any) -> None:
        self.ctx, self.on = context(**options), on
        self.fused = 0
        self.graph: Any = None
        self.result: Any = None

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        original = GraphModule(gm, snapshot(gm.graph)())
        if self.on == "cuda":
            to_cuda(gm)
        with torch.set_grad_enabled(self.on == "cpu"):  # without a GPU, calls that record gradients there crash
            self.fused = rewrite.run(gm, self.ctx)
            again = rewrite.run(gm, self.ctx)
        assert again == 0, "it fires twice"
        for graph in rewrite.graphs_of(gm):
            graph.lint()
        self.graph = gm
        return original.forward if self.on == "cuda" else gm.forward

    def kept(self) -> list[str]:
        return [d.reason for d in self.ctx.trace.decisions if d.verdict == "kept"]

    def calls(self) -> list[Any]:
        return [
            n
            for graph in rewrite.graphs_of(self.graph)
            for n in graph.nodes
            if n.target in (F.scaled_dot_product_attention, attention_with_sink)
        ]


def to_cuda(gm: GraphModule) -> None:
    """Put all traced values of a captured graph on a GPU, as if it had been captured there."""

    def moved(x: FakeTensor) -> FakeTensor:
        geometry = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        fake = FakeTensor(x.fake_mode, geometry, torch.device("cuda", 0))
        fake.requires_grad_(x.requires_grad)
        return fake

    for graph in rewrite.graphs_of(gm):
        for n in graph.nodes:
            n.meta["example_value"] = tree_map_only(FakeTensor, moved, n.meta.get("example_value"))


def captured(fn: Callable[..., Any], inputs: Sequence[Any], **options: Any) -> Fuse:
    torch._dynamo.reset()
    backend = Fuse(**options)
    backend.result = torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
    return backend


def same(got: T, want: T, exact: T | None = None) -> None:
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12}.get(want.dtype)
    assert difference(got, want, exact, tolerance) == ""


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_form_in_inference(case: Case) -> None:
    torch.manual_seed(0)
    inputs = list(case.inputs())
    backend = captured(case.fn, inputs)
    assert backend.fused == 1, backend.kept()
    with torch.no_grad():
        want = case.fn(*inputs)
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        exact = case.fn(*wide) if want.dtype in (torch.bfloat16, torch.float16) else None
        same(backend.result, want, exact)


def gradients(case: Case, convert: Callable[[T], T] = torch.clone) -> list[tuple[T, T]]:
    """Return the gradients of a form that is fused beside those of eager, for inputs that `convert` copies."""
    torch._dynamo.reset()
    backend, both = Fuse(), []
    for fn in (torch.compile(case.fn, backend=backend, fullgraph=True), case.fn):
        torch.manual_seed(1)
        inputs = [convert(x) for x in case.inputs()]
        leaves = [x.requires_grad_() for x in inputs[: case.differentiable]]
        result = fn(*inputs)
        upstream = torch.linspace(-1, 1, result.numel()).to(result.dtype).view(result.shape)
        result.backward(upstream)
        both.append([x.grad for x in leaves if x.grad is not None])
        assert len(both[-1]) == len(leaves)
    assert backend.fused == 1, backend.kept()
    return list(zip(*both, strict=True))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_form_in_training(case: Case) -> None:
    for got, want in gradients(case):
        rounding = 4 * torch.finfo(want.dtype).eps if want.dtype in (torch.bfloat16, torch.float16) else 2e-5
        assert difference(got, want, None, rounding) == ""


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_form_on_a_gpu(case: Case) -> None:
    """The captured graph has values on a GPU; no kernel runs."""
    inputs = list(case.inputs())
    backend = captured(case.fn, inputs, on="cuda")
    known = {torch.float64: "dtype", torch.float16: "rounding"}
    reason = known.get(inputs[0].dtype, "of the dtype of the query" if case.fn is scores_in_float32 else "")
    if reason:
        assert backend.fused == 0
        assert reason in backend.kept()[0]
    else:
        assert backend.fused == 1, backend.kept()
        assert len(backend.calls()) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "fn", [scaled, additive, viewed_heads, shifted_windows, with_sink, grouped_with_sink], ids=lambda fn: fn.__name__
)
def test_compiled_programs_call_the_fused_kernel(fn: Callable[..., T], training: bool, tmp_path: Any) -> None:
    case = next(case for case in CASES if case.fn is fn)
    inputs = list(case.inputs())
    for x in inputs[: case.differentiable]:
        x.requires_grad_(training)
    torch._dynamo.reset()
    mine, other = twin(inputs), twin(inputs)
    result = compiled(fn, attention="on", debug_dir=str(tmp_path))(*mine)
    want = fn(*other)
    same(result.detach(), want.detach())
    if training:
        result.square().sum().backward()
        want.square().sum().backward()
        for a, b in zip(mine[: case.differentiable], other[: case.differentiable], strict=True):
            assert difference(a.grad, b.grad, None, 5e-5) == ""
    graphs = "".join(path.read_text() for path in tmp_path.rglob("*post_grad_graph.txt"))
    assert "_scaled_dot_product_flash_attention_for_cpu" in graphs
    assert ("flash_attention_for_cpu_backward" in graphs) == training


def test_checkpointed_attention_compiles_without_gradients() -> None:
    """torch takes the fused kernel for a random operator, and refuses to recompute those."""
    torch._dynamo.reset()
    inputs = heads()
    same(compiled(checkpointed, attention="on")(*inputs), checkpointed(*inputs))


@pytest.mark.parametrize("fn", [scaled, by_root_of_features, causal_for_all_sizes], ids=lambda fn: fn.__name__)
def test_dynamic_sizes(fn: Callable[..., T]) -> None:
    torch._dynamo.reset()
    backend = Fuse()
    run = torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
    for n in (5, 9):
        q, k, v = heads(B, H, n, D)
        torch.testing.assert_close(run(q, k, v), fn(q, k, v))
    assert backend.fused == 1, backend.kept()


@pytest.mark.parametrize("fn", [causal_filled, causal_added, causal_positions], ids=lambda fn: fn.__name__)
def test_causal_masks_become_a_flag(fn: Callable[..., T]) -> None:
    (call,) = captured(fn, heads()).calls()
    assert call.args[3] is None
    assert call.kwargs["is_causal"] is True


@pytest.mark.parametrize("fn", [plain, all_visible], ids=lambda fn: fn.__name__)
def test_masks_that_hide_nothing_vanish(fn: Callable[..., T]) -> None:
    (call,) = captured(fn, heads()).calls()
    assert call.args[3] is None
    assert call.kwargs["is_causal"] is False


@pytest.mark.parametrize("fn", [grouped, grouped_by_repeat], ids=lambda fn: fn.__name__)
def test_repeated_keys_are_not_copied(fn: Callable[..., T]) -> None:
    backend = captured(fn, [torch.randn(B, H, L, D), torch.randn(B, 2, S, D), torch.randn(B, 2, S, D)])
    (call,) = backend.calls()
    assert call.kwargs["enable_gqa"] is True
    assert call.args[1].meta["example_value"].shape == (B, 2, S, D)


# --- rows that are masked in full ---


def hiding(row: float, dtype: torch.dtype) -> T:
    mask = torch.zeros(B, 1, L, S, dtype=dtype)
    mask[0, :, 2] = row
    mask[1, :, 3, 2:] = row
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", [False, True], ids=["infinite", "lowest"])
def test_rows_that_an_additive_mask_hides(low: bool, dtype: torch.dtype) -> None:
    number = torch.finfo(dtype).min if low else -math.inf
    inputs = [*(x.to(dtype) for x in heads()), hiding(number, dtype)]
    backend = captured(additive, inputs)
    assert backend.fused == 1
    got, want = backend.result, additive(*inputs)
    assert torch.equal(got.isnan(), want.isnan())
    assert bool(want.isnan().any()) is not low
    q, k, v, mask = (x.double() for x in inputs)
    exact = additive(q, k, v, mask)
    if low:  # the mean of the values, in every dtype
        exact[0, :, 2] = v.mean(2)[0]
    same(got, want, exact)


@pytest.mark.parametrize("fn", [filled, filled_low, chosen, chosen_number_first], ids=lambda fn: fn.__name__)
def test_rows_that_a_boolean_mask_hides(fn: Callable[..., T]) -> None:
    keep = hiding(1.0, torch.float32) == 0
    inputs = [*heads(), keep]
    backend = captured(fn, inputs)
    assert backend.fused == 1
    same(backend.result, fn(*inputs))


def test_gradients_of_hidden_rows_are_those_of_eager() -> None:
    torch._dynamo.reset()
    backend = Fuse()
    results = []
    q, k, v = heads()
    functions: list[Callable[..., T]] = [torch.compile(additive, backend=backend), additive]
    for fn in functions:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        fn(*inputs, hiding(-math.inf, torch.float32)).sum().backward()
        results.append([x.grad for x in inputs])
    assert backend.fused == 1
    for got, want in zip(*results, strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got, want, equal_nan=True)


def lowest_added(q: T, k: T, v: T, keep: T) -> T:
    """A padding mask as transformers adds it."""
    mask = (1.0 - keep.to(q.dtype)) * torch.finfo(q.dtype).min
    return F.softmax(q @ k.transpose(2, 3) + mask, dim=-1) @ v


def _gradients(fn: Callable[..., T], mask: T) -> list[T]:
    torch.manual_seed(0)
    inputs = [x.clone().requires_grad_() for x in heads()]
    fn(*inputs, mask).square().sum().backward()
    return [x.grad for x in inputs if x.grad is not None]


@pytest.mark.parametrize("fn", [filled_low, chosen, lowest_added], ids=lambda fn: fn.__name__)
def test_gradients_of_rows_that_low_numbers_hide(fn: Callable[..., T]) -> None:
    """The kernels lose the number of columns of such a row; filled scores have no gradient, others are not fused."""
    torch._dynamo.reset()
    backend = Fuse()
    keep = hiding(1.0, torch.float32) == 0
    ours, eager = _gradients(torch.compile(fn, backend=backend), keep), _gradients(fn, keep)
    assert backend.fused == int(fn is not lowest_added)
    torch.testing.assert_close(ours, eager, equal_nan=True)


def test_gradients_of_values_in_rows_that_a_given_mask_hides() -> None:
    torch._dynamo.reset()
    backend = Fuse()
    mask = hiding(torch.finfo(torch.float32).min, torch.float32)
    ours, eager = _gradients(torch.compile(additive, backend=backend), mask), _gradients(additive, mask)
    assert backend.fused == 1
    torch.testing.assert_close(ours[2], eager[2])


@pytest.mark.parametrize("number", [-math.inf, torch.finfo(torch.float32).min], ids=["infinite", "lowest"])
def test_rows_that_a_mask_hides_beside_a_sink_are_zero(number: float) -> None:
    torch._dynamo.reset()
    backend = Fuse()
    mask, gradients = hiding(number, torch.float32), []
    functions: list[Callable[..., T]] = [torch.compile(with_sink, backend=backend), with_sink]
    for fn in functions:
        torch.manual_seed(0)
        inputs = [x.requires_grad_() for x in (*heads(), torch.randn(H))]
        result = fn(*inputs, mask)
        assert not result[0, :, 2].any()
        result.square().sum().backward()
        gradients.append([result, *(x.grad for x in inputs)])
    assert backend.fused == 1
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_rows_of_infinite_scores_and_sinks_are_no_numbers() -> None:
    inputs = [*heads(), torch.tensor([0.0, -math.inf, 1.0, -math.inf]), hiding(-math.inf, torch.float32)]
    backend = captured(with_sink, inputs)
    assert backend.fused == 1
    same(backend.result, with_sink(*inputs))
    assert bool(backend.result.isnan().any())


# --- what must stay ---


def returned_weights(q: T, k: T, v: T) -> tuple[T, T]:
    weights = F.softmax(q @ k.transpose(2, 3), dim=-1)
    return weights @ v, weights


def over_queries(q: T, k: T, v: T) -> T:
    return F.softmax(q @ k.transpose(2, 3), dim=-2) @ v


def capped(q: T, k: T, v: T) -> T:
    return F.softmax(torch.tanh(q @ k.transpose(2, 3)), dim=-1) @ v


def barely_filled(q: T, k: T, v: T) -> T:
    return (q @ k.transpose(2, 3)).masked_fill(q[..., :1] > 0, -100.0).softmax(-1) @ v


def masked_then_scaled_up(q: T, k: T, v: T) -> T:
    return ((q @ k.transpose(2, 3) + q[..., :1]) * 3).softmax(-1) @ v


def written_between(q: T, k: T, v: T) -> T:
    q = q.clone()
    scores = q @ k.transpose(2, 3)
    q.zero_()
    return scores.softmax(-1) @ v


def mask_written_between(q: T, k: T, v: T) -> T:
    bias = q[..., :1] * 1
    scores = (q @ k.transpose(2, 3)) + bias
    bias.zero_()
    return scores.softmax(-1) @ v


def column_in_half(q: T, k: T, v: T) -> T:
    q, k, v = q.half(), k.half(), v.half()
    return ((q @ k.transpose(2, 3)) * q[..., :1]).softmax(-1) @ v


def dropped(q: T, k: T, v: T) -> T:
    return F.dropout(F.softmax(q @ k.transpose(2, 3), -1), 0.5, training=True) @ v


def head_mask(q: T, k: T, v: T) -> T:
    return (F.softmax(q @ k.transpose(2, 3), -1) * q[:, :, :1, :1]) @ v


def other_column_dropped(q: T, k: T, v: T) -> T:
    rows = torch.cat([q @ k.transpose(2, 3), q[..., :1]], -1)
    return rows.softmax(-1)[..., 1:] @ v


def column_of_scores_dropped(q: T, k: T, v: T) -> T:
    return (q @ k.transpose(2, 3)).softmax(-1)[..., :-1] @ v[:, :, 1:]


def sink_with_a_value(q: T, k: T, v: T) -> T:
    rows = torch.cat([q @ k[:, :, 1:].transpose(2, 3), q[..., :1]], -1)
    return rows.softmax(-1) @ v


def scaled_beside_a_sink(q: T, k: T, v: T) -> T:
    rows = torch.cat([q @ k.transpose(2, 3), q[..., :1]], -1) * 2
    return rows.softmax(-1)[..., :-1] @ v


def less_another_row(q: T, k: T, v: T) -> T:
    scores = q @ k.transpose(2, 3)
    return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ v


def differentiated(q: T, k: T, v: T) -> T:
    return torch.func.grad(lambda q: scaled(q, k, v).sum())(q)


STAY = [
    *(over_queries, capped, barely_filled, masked_then_scaled_up, written_between, mask_written_between),
    *(column_in_half, dropped),
    *(other_column_dropped, column_of_scores_dropped, sink_with_a_value, scaled_beside_a_sink, less_another_row),
]


def test_the_call_in_the_way_is_recorded() -> None:
    backend = captured(capped, heads())
    assert set(backend.kept()) == {
        "tanh stands between its first product and the softmax, and the fused kernels have none"
    }


@pytest.mark.parametrize("fn", [returned_weights, *STAY, head_mask, differentiated], ids=lambda fn: fn.__name__)
def test_other_forms_stay(fn: Callable[..., Any]) -> None:
    assert captured(fn, heads()).fused == 0


def test_a_mask_with_a_gradient_stays_on_a_cpu_and_is_fused_on_a_gpu() -> None:
    inputs = [*heads(), torch.randn(1, H, L, S).requires_grad_()]
    assert "no gradient of a mask" in captured(additive, inputs).kept()[0]
    assert captured(additive, inputs, on="cuda").fused == 1


def test_dropout_is_fused_on_a_gpu_unless_it_must_draw_eagers_numbers() -> None:
    backend = captured(dropped, heads(), on="cuda")
    assert backend.calls()[0].kwargs["dropout_p"] == 0.5
    assert captured(dropped, heads(), on="cuda", fallback_random=True).fused == 0


@pytest.mark.parametrize("options", [{"attention": "off"}, {"numerics": "eager", "attention": "on"}])
def test_options_turn_it_off(options: dict[str, Any], tmp_path: Any) -> None:
    torch._dynamo.reset()
    inputs = heads()
    torch.testing.assert_close(compiled(scaled, debug_dir=str(tmp_path), **options)(*inputs), scaled(*inputs))
    graphs = "".join(path.read_text() for path in tmp_path.rglob("*post_grad_graph.txt"))
    assert "scaled_dot_product" not in graphs


def test_auto_keeps_what_separate_kernels_compute_faster() -> None:
    small, medium = heads(), heads(1, 12, 128, 16)
    assert captured(scaled, small, attention="auto").fused == 1
    assert "separate kernels are faster" in captured(scaled, medium, attention="auto").kept()[0]
    for x in medium:
        x.requires_grad_()
    assert captured(scaled, medium, attention="auto").fused == 1


def test_a_broadcast_key_of_the_fused_kernel_keeps_its_strides() -> None:
    """The fused kernel reads features side by side in memory; a copy of broadcast keys must not exchange dimensions."""
    torch._dynamo.reset()
    inputs = [torch.randn(B, H, L, D), torch.randn(B, 1, S, D), torch.randn(B, 1, S, D)]
    same(compiled(one_key_head, attention="on")(*inputs), one_key_head(*inputs))
