"""FlexAttention on a GPU's path: what its kernels compute, and which machine code they become."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from altbackend import pipeline
from altbackend.compat import torch_api
from altbackend.compiled.load import Job
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.graph_cache.key import nodes_of
from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200
from test import graphs, triton_run

T = torch.Tensor
Mask = Any


@pytest.fixture(scope="module", autouse=True)
def machine_code() -> Iterator[None]:
    """Every kernel of this file compiles for sm_80 and sm_90, within their shared memory."""
    yield
    assert triton_run.compile_errors() == []


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and the largest scores, which torch refuses for tensors of a CPU; no advice to compile."""

    def options(q: T, k: T, v: T, lse: bool, given: Any, aux: Any = None) -> dict[str, Any]:
        return {"BACKEND": "AUTO", "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": True, **(given or {})}

    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "_apply_kernel_options", options)
    monkeypatch.setattr(flex, "_warn_once", lambda *a, **k: None)


def r(*sizes: int, dtype: torch.dtype = torch.float32) -> T:
    return torch.randn(sizes).to(dtype)


def qkv(rows: int = 70, columns: int = 70, heads: int = 3, depth: int = 16, dtype: torch.dtype = torch.float32) -> Any:
    return [r(2, heads, n, depth, dtype=dtype) for n in (rows, columns, columns)]


def leaves(x: object, requires_grad: bool = True) -> list[T]:
    tensors = [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]
    return [t for t in tensors if t.requires_grad or not requires_grad]


def dots(steps: list[Any]) -> list[str]:
    return [s[0].source for s in steps if not isinstance(s, Extern) and "tl.dot" in s[0].source]


def check(
    fn: Callable[..., Any], inputs: list[T], gradients: bool = True, capabilities: tuple[int, ...] = (90,)
) -> list[Any]:
    """Results and gradients are as near to those of float64 as eager's, but for some roundings; gives the steps."""
    seen: list[Any] = []
    compiled = triton_run.compiled(fn, seen=seen, capabilities=capabilities)

    def values(f: Callable[..., Any], xs: list[T]) -> list[T]:
        xs = [x.detach().clone().requires_grad_(gradients and x.is_floating_point()) for x in xs]
        outs = leaves(f(*xs), gradients)
        if not gradients:
            return outs
        generator = torch.Generator().manual_seed(1)
        by = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outs]
        return [*(o.detach() for o in outs), *torch.autograd.grad(outs, [x for x in xs if x.requires_grad], by)]

    got, want = values(compiled, inputs), values(fn, inputs)
    exact = values(fn, [x.double() if x.is_floating_point() else x for x in inputs])
    for g, w, e in zip(got, want, exact, strict=True):
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
        near = torch.where(g == e, 0.0, (g.double() - e).abs())
        finite = e[e.isfinite()].abs()
        # the interpreter cuts float32 to bfloat16, and the weights are rounded before they are divided by their sum
        eps = max(torch.finfo(t.dtype).eps for t in (g, *inputs) if t.is_floating_point())
        bound = 8 * eps * (float(finite.max()) if finite.numel() else 1.0)
        assert float(near.max()) <= float((w.double() - e).abs().nan_to_num().max()) + bound
    expected = 3 if gradients else 1
    assert len(dots(seen)) == expected, seen
    return seen


def causal(b: T, h: T, q: T, k: T) -> T:
    return q >= k


def mask_of(fn: Callable[..., T], rows: int, columns: int, size: int | tuple[int, int] = 32, **sizes: int) -> Mask:
    return create_block_mask(fn, sizes.get("B"), sizes.get("H"), rows, columns, device="cpu", BLOCK_SIZE=size)


def test_without_functions() -> None:
    check(flex_attention, qkv(), capabilities=(80, 90))


def test_relative_bias() -> None:
    check(lambda q, k, v: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1, scale=0.3), qkv())


def test_statistics() -> None:
    """The logsumexp has a gradient; the largest score has none."""
    mask = mask_of(causal, 70, 70)
    both = AuxRequest(lse=True, max_scores=True)
    check(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, return_aux=both), qkv(), gradients=False)
    check(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True)), qkv())


def test_rows_without_keys() -> None:
    """A head that sees nothing has 0, and -inf as its logsumexp; its gradients are 0."""

    def window(b: T, h: T, q: T, k: T) -> T:
        return (q >= k) & (q - k < 40) & (h != 1)

    mask = mask_of(window, 50, 70, (32, 16), B=2, H=2)
    inputs = [r(2, 2, 50, 24), r(1, 1, 70, 24), r(1, 1, 70, 40)]
    inputs = [x.bfloat16() for x in inputs]
    check(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), inputs, capabilities=(80, 90))
    both = AuxRequest(lse=True, max_scores=True)
    check(
        lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=both),
        inputs,
        gradients=False,
    )


def test_captured_tensors() -> None:
    """Functions read tensors at positions, also from the end; views of other layouts are read where they lie."""
    documents = torch.randint(0, 3, (70,)).sort().values
    slopes, places = r(3), torch.randint(-3, 3, (70,))
    mask = mask_of(lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]), 70, 70)

    def fn(q: T, k: T, v: T) -> T:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        soft = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: 20 * torch.tanh(s / 20) + slopes[places[j]])
        return soft + flex_attention(q, k, v, block_mask=mask)

    seen: list[Any] = []
    compiled = triton_run.compiled(fn, seen=seen, capabilities=(90,))
    inputs = [r(2, 70, 3, 24) for _ in range(3)]
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), fn(*inputs))
    assert len(dots(seen)) == 2


def test_gradients_of_captured_tensors() -> None:
    def fn(q: T, k: T, v: T, bias: T, slopes: T, distances: T) -> T:
        def score(s: T, b: T, h: T, i: T, j: T) -> T:
            return 20 * torch.tanh((s + bias[b, h, i, j]) / 20) + slopes[h] * (i - j) * 0.01 + distances[h, i - j + 69]

        return flex_attention(q, k, v, score_mod=score, enable_gqa=True)

    inputs = [r(1, 4, 40, 24), r(1, 2, 70, 24), r(1, 2, 70, 40), r(1, 4, 40, 70), r(4), r(4, 110)]
    check(fn, inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("tf32", [False, True])
def test_totals_of_the_gradient_are_rounded_as_its_products(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_api, "allows_tf32", lambda: tf32)
    seen: list[Any] = []
    inputs = [x.requires_grad_() for x in qkv()]
    upstream = r(2, 3, 70, 16)
    got = torch.autograd.grad(triton_run.compiled(flex_attention, seen=seen)(*inputs), inputs, upstream)
    want = torch.autograd.grad(flex_attention(*inputs), inputs, upstream)
    for g, w in zip(got, want, strict=True):
        assert float((g - w).norm() / w.norm()) < (2e-3 if tf32 else 1e-5)
    others = [s[0].source for s in seen if not isinstance(s, Extern) and "tl.dot" not in s[0].source]
    assert any("= to_tf32(" in source for source in others) == tf32


def test_position_out_of_range() -> None:
    """The kernel reads nothing there, and the host program raises IndexError."""
    table = r(60)

    def fn(q: T, k: T, v: T) -> T:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[i])

    with torch.no_grad(), pytest.raises(IndexError):
        triton_run.compiled(fn)(*qkv())


def test_sizes_that_vary() -> None:
    def fn(q: T, k: T, v: T, documents: T) -> T:
        n = q.shape[2]
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]), None, None, n, n, device="cpu", BLOCK_SIZE=32
        )
        shifted = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.01 * (i - j + n))
        return flex_attention(q, k, v, block_mask=mask) + shifted

    compiled = triton_run.compiled(fn, dynamic=True, host=True, capabilities=(90,))
    with torch.no_grad():
        for n in (70, 33):
            inputs = [*qkv(n, n), torch.randint(0, 3, (n,)).sort().values]
            torch.testing.assert_close(compiled(*inputs), fn(*inputs))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_chosen_tiles(dtype: torch.dtype) -> None:
    """Options of the call choose tiles of other sizes than the blocks."""
    mask = mask_of(causal, 100, 100, 48)
    options: Any = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16, "bwd_BLOCK_M1": 16, "bwd_BLOCK_N2": 64, "num_warps": 2}
    seen = check(
        lambda q, k, v: flex_attention(q, k, v, block_mask=mask, kernel_options=options), qkv(100, 100, 1, dtype=dtype)
    )
    kernels = [s[0] for s in seen if not isinstance(s, Extern) and "tl.dot" in s[0].source]
    tiles = [(k.constexprs["ROWS"], k.constexprs["COLUMNS"], k.num_warps) for k in kernels]
    assert tiles[0] == (32, 16, 2)
    assert tiles[1][0] == 16
    assert tiles[2][1] == 64


def test_garbage_in_lists() -> None:
    """Counts and blocks that no mask has lead to no access outside the tensors."""
    mask = mask_of(causal, 70, 70, 16)
    counts, blocks = mask.kv_num_blocks, mask.kv_indices
    counts.fill_(1 << 30)
    blocks.copy_(torch.tensor([1 << 30, -(1 << 30), 7, -7, 0]).expand_as(blocks))
    with torch.no_grad():
        out = triton_run.compiled(lambda q, k, v: flex_attention(q, k, v, block_mask=mask))(*qkv())
    assert out.isfinite().all()


def test_one_query() -> None:
    check(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True), [r(2, 4, 1, 16), r(2, 2, 90, 16), r(2, 2, 90, 16)])


def test_few_queries_of_many_keys() -> None:
    """Several programs share the keys of a tile; a second kernel adds what they leave."""

    def far(b: T, h: T, q: T, k: T) -> T:
        return (q + 895 >= k) & (h != 1) & (k % 3 != q)

    mask = mask_of(far, 5, 900, 128, H=2)

    def fn(q: T, k: T, v: T) -> Any:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))

    inputs = [r(2, 2, 5, 16), r(2, 1, 900, 16), r(2, 1, 900, 24)]
    seen = check(fn, inputs, gradients=False, capabilities=(80, 90))
    (kernel,) = (s[0] for s in seen if not isinstance(s, Extern) and "tl.dot" in s[0].source)
    assert len(kernel.finish) == 1
    run = triton_run.compiled(fn, host=True, capabilities=())
    with torch.no_grad():
        torch.testing.assert_close(run(*inputs)[0], fn(*inputs)[0])


def test_whole_programs_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward are launches alone, in Python and C++, which a CUDA graph can replay; no graph is kept."""
    for name, value in (("cuda_name", "a GPU"), ("cuda_properties", asdict(H200))):
        monkeypatch.setattr(torch_api, name, lambda device, value=value: value)
    slopes, mask = r(3), mask_of(causal, 70, 70)

    def fn(q: T, k: T, v: T) -> T:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j), block_mask=mask)

    cfg = resolve(options={"strict": True, "cudagraphs": True, "host": "cpp"})
    inputs = [x.requires_grad_() for x in qkv(dtype=torch.bfloat16)]
    names = ["forward", "backward"]
    for gm, name in zip(graphs.trace(fn, *inputs), names, strict=True):
        for n in nodes_of(gm):
            n.meta["val"] = torch.utils._pytree.tree_map(on_a_gpu, n.meta.get("val"))
        code = pipeline.translate(gm, cfg, Trace(name, cfg), Job(name))
        assert code.library_calls == 0
        assert not any(isinstance(c, torch.fx.GraphModule) for c in code.constants.values())
        assert len([j for j in code.jobs if "tl.dot" in j.source]) == (1 if name == "forward" else 2)
        assert code.host is not None
        assert code.recording is not None
        assert not code.recording.refusal


def on_a_gpu(x: Any) -> Any:
    if not isinstance(x, FakeTensor):
        return x
    with x.fake_mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def test_refusals() -> None:
    """Operands of float64 and functions that draw numbers stay with torch's own kernels."""
    seen: list[Any] = []
    # the harness has no graphs for torch's operator
    with torch.no_grad(), pytest.raises(Exception, match="callable"):
        triton_run.compiled(flex_attention, seen=seen)(*qkv(dtype=torch.float64))
    assert not dots(seen)
