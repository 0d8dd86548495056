"""Attentions whose operands keep torch from its fused kernels get other operands; results and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes.attention import gates, strides
from altbackend.fx_passes.context import Context
from test.compare import check, check_gradients

T = torch.Tensor
attend = F.scaled_dot_product_attention


def three_dimensions(x: T) -> T:
    q = x[:, 0]
    return attend(q, q * 2, q.sin())


def three_dimensions_with_mask(x: T) -> T:
    q = x[:, 0]
    return attend(q, q * 2, q, attn_mask=(q @ q.mT).detach(), scale=0.3)


def rows_of_a_mask(x: T) -> T:
    q = x[:, 0]
    return attend(q, q, q, attn_mask=torch.arange(q.shape[1]) % 3 != 1, is_causal=False).view(-1)


def mask_of_three_dimensions(x: T) -> T:
    return attend(x, x, x, attn_mask=x[0] @ x[1].mT > 0.1)


def rows_that_see_nothing(x: T) -> T:
    q = x[:, 0]
    return attend(q, q, q, attn_mask=(torch.arange(q.shape[1]) != 3)[:, None].expand(-1, q.shape[1]))


def points_of_an_image(x: T) -> T:
    tokens = x.flatten(2).transpose(1, 2)
    return attend(tokens, tokens, tokens).transpose(1, 2).reshape(x.shape)


def features_first(x: T) -> T:
    return attend(x.mT, x.mT, x.mT * 2, is_causal=True)


def keys_alone(x: T) -> T:
    return attend(x, x.mT.contiguous().mT, x, None, 0.0, True).view(x.shape[0] * x.shape[1], -1)


def fits(x: T) -> T:
    return attend(x, x, x)


CASES: list[tuple[Callable[[T], T], int]] = [
    (three_dimensions, 1),
    (three_dimensions_with_mask, 1),
    (rows_of_a_mask, 1),
    (mask_of_three_dimensions, 1),
    (rows_that_see_nothing, 1),
    (points_of_an_image, 1),
    (features_first, 1),
    (keys_alone, 1),
    (fits, 0),
]


def changed(fn: Callable[..., T], *inputs: T) -> tuple[int, GraphModule]:
    """Return the number of attentions that the pass changes in the graph of a function, and the graph after it."""
    found: list[tuple[int, GraphModule]] = []

    def backend(gm: GraphModule, _: object) -> GraphModule:
        found.append((strides.run(gm, Context(resolve(), Trace("captured", resolve()))), gm))
        assert strides.run(gm, Context(resolve(), Trace("captured", resolve()))) == 0  # once is enough
        return gm

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*inputs)
    return found[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fn", "count"), CASES)
def test_operands_change_once_and_results_stay(fn: Callable[[T], T], count: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2, 8, 16, dtype=dtype)
    with patch.object(gates, "separate_is_faster", lambda *_: ""):
        assert changed(fn, x)[0] == count
        check(fn, x)
        check_gradients(fn, x)


def test_attentions_that_the_kernel_refuses_stay() -> None:
    q = torch.randn(2, 5, 8)
    for fn, x in (
        (lambda x: attend(x, x, x, dropout_p=0.5), q),  # no fused kernel of a CPU drops
        (lambda x: attend(x, x, x[..., :4]), q),
        (lambda x: attend(x, x, x), q.double()[:0]),
        (lambda x: attend(x.float(), x.float(), x.float()), torch.ones(2, 5, 8).int()),
    ):
        want = x.dtype == torch.int32
        with patch.object(gates, "separate_is_faster", lambda *_: ""):
            assert changed(fn, x)[0] == want


def test_a_gradient_that_must_not_vary_stays_on_a_gpu() -> None:
    x = torch.ones(2, requires_grad=True, device="meta")
    call = strides.Call(x, x, x, None, 0.5, False, {})  # type: ignore[arg-type]
    with patch.object(strides, "value_of", lambda n: n):
        for options, want in (({}, False), ({"deterministic": True}, True), ({"fallback_random": True}, True)):
            cfg = resolve(None, options)
            assert strides._varies(call, Context(cfg, Trace("captured", cfg))) == want


def test_a_broadcast_mask_is_copied_without_its_repetitions() -> None:
    def fn(x: T, bias: T) -> T:
        return attend(x, x, x, attn_mask=bias.permute(2, 0, 1).expand(3, 2, 8, 8))

    with patch.object(torch_api, "fuses_attention", lambda call: call.mask.stride(-1) == 1):
        count, gm = changed(fn, torch.randn(3, 2, 8, 16), torch.randn(8, 8, 2))
    assert count == 1
    copies = [n for n in gm.graph.nodes if n.target is torch.ops.aten.clone.default]
    assert [tuple(n.meta["example_value"].shape) for n in copies] == [(1, 2, 8, 8)]


def test_products_in_tf32_stay_on_a_gpu() -> None:
    x = torch.randn(3, 2, 8, 16)
    torch.set_float32_matmul_precision("high")
    try:
        with patch.object(strides, "value_of", lambda n: n):
            call = strides.Call(x.to("meta"), x.to("meta"), x.to("meta"), None, 0.0, False, {})  # type: ignore[arg-type]
            with (
                patch.dict(gates.TYPES, {"meta": gates.TYPES["cuda"]}),
                patch.object(strides, "dtype_of", lambda n: n.dtype),
                patch.object(strides, "shape_of", lambda n: n.shape),
            ):
                assert not strides._gains(call)
                torch.set_float32_matmul_precision("highest")
                assert strides._gains(call)
    finally:
        torch.set_float32_matmul_precision("highest")
