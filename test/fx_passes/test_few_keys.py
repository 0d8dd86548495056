"""Attentions of few keys call the memory-efficient kernel, forward and backward; others stay. No GPU is needed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import few_keys
from altbackend.fx_passes.context import Context

T = torch.Tensor
aten = torch.ops.aten
SIZES = (4, 3, 49, 32)


def context(**options: Any) -> Context:
    cfg = resolve(None, options)
    return Context(cfg, Trace("joint", cfg), device="gpu")


def traced(fn: Any, *sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> GraphModule:
    with FakeTensorMode():
        inputs = [torch.empty(s[0], s[2], s[1], s[3], dtype=dtype, device="cuda").transpose(1, 2) for s in sizes]
        gm = make_fx(fn)(*inputs)
    gm.graph.eliminate_dead_code()
    return gm


def cudnn(q: T, k: T, v: T, bias: T | None, **more: Any) -> T:
    out: T = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, False, **more)[0]
    return out


def plain(q: T, k: T, v: T) -> T:
    return cudnn(q, k, v, None)


def cudnn_joint(q: T, k: T, v: T, g: T) -> tuple[T, ...]:
    out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=0.2)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        g, q, k, v, out[0], out[1], out[6], out[7], None, None, None, 49, 49, 0.0, True, scale=0.2
    )
    return out[0], *grads


def flash_joint(q: T, k: T, v: T, g: T) -> tuple[T, ...]:
    out = aten._scaled_dot_product_flash_attention(q, k, v)
    grads = aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, out[0], out[1], None, None, 49, 49, 0.0, False, out[6], out[7]
    )
    return out[0], *grads


def names(gm: GraphModule) -> list[str]:
    return [str(n.target).split(".")[1] for n in gm.graph.nodes if "attention" in str(n.target)]


def strides(gm: GraphModule) -> list[tuple[int, ...]]:
    (results,) = (n.args[0] for n in gm.graph.nodes if n.op == "output")
    return [r.meta["val"].stride() for r in (results if isinstance(results, (list, tuple)) else [results])]


def test_an_inference_graph_changes_once() -> None:
    gm = traced(plain, SIZES, SIZES, SIZES)
    before = strides(gm)
    assert few_keys.run(gm, context()) == 1
    gm.graph.lint()
    assert few_keys.run(gm, context()) == 0
    assert names(gm) == ["_scaled_dot_product_efficient_attention"]
    assert strides(gm) == before
    (call,) = (n for n in gm.graph.nodes if "efficient" in str(n.target))
    assert call.args[4] is False  # no logarithms of sums are kept


@pytest.mark.parametrize("fn", [cudnn_joint, flash_joint])
def test_the_gradient_changes_with_its_attention(fn: Any) -> None:
    gm = traced(fn, SIZES, SIZES, SIZES, SIZES)
    before = strides(gm)
    assert few_keys.run_joint(gm, context()) == 1
    gm.graph.lint()
    want = ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"]
    assert names(gm) == want
    assert strides(gm) == before
    forward, backward = (n for n in gm.graph.nodes if "efficient" in str(n.target))
    assert forward.args[4] is True
    assert backward.args[11] is forward.args[6] is (fn is cudnn_joint)
    assert forward.kwargs == backward.kwargs == {"scale": 0.2 if fn is cudnn_joint else None}
    read = [a for a in backward.args if getattr(a, "target", None) is operator.getitem]
    assert [(n.args[0], n.args[1]) for n in read] == [(forward, k) for k in range(4)]


def test_rows_of_a_bias_are_aligned_and_its_repetitions_are_not_copied() -> None:
    def fn(q: T, k: T, v: T, bias: T) -> T:
        return cudnn(q, k, v, bias.expand(4, 3, 49, 49))

    gm = traced(fn, SIZES, SIZES, SIZES, (1, 3, 49, 49))
    assert few_keys.run(gm, context()) == 1
    (call,) = (n for n in gm.graph.nodes if "efficient" in str(n.target))
    bias = call.args[3].meta["val"]
    assert (tuple(bias.shape), bias.stride(0), bias.stride(2), bias.stride(3)) == ((4, 3, 49, 49), 0, 64, 1)
    (padded,) = (n for n in gm.graph.nodes if "constant_pad" in str(n.target))
    assert tuple(padded.meta["val"].shape) == (1, 3, 49, 64)


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        (((4, 3, 65, 32), (4, 3, 49, 32)), {}),  # more queries than a tile has rows
        (((4, 3, 49, 32), (4, 3, 80, 32)), {}),
        (((4, 3, 49, 80), (4, 3, 49, 80)), {}),
        (((4, 3, 49, 12), (4, 3, 49, 12)), {}),  # rows that are not aligned
        (((4, 3, 1, 32), (4, 3, 49, 32)), {}),
        (((4, 3, 32, 32), (4, 3, 49, 32)), {"is_causal": True}),  # the kernels differ in where the diagonal begins
        (((4, 3, 49, 32), (4, 3, 49, 32)), {"dropout_p": 0.1}),
    ],
)
def test_others_stay(sizes: tuple[tuple[int, ...], ...], more: dict[str, Any]) -> None:
    gm = traced(lambda q, k, v: cudnn(q, k, v, None, **more), sizes[0], sizes[1], sizes[1])
    assert few_keys.run(gm, context()) == 0


def test_gradients_that_must_not_vary_stay() -> None:
    gm = traced(cudnn_joint, SIZES, SIZES, SIZES, SIZES)
    assert few_keys.run_joint(gm, context(deterministic=True)) == 0
    assert few_keys.run(gm, context()) == 0  # the backward reads more than the result
    torch.use_deterministic_algorithms(True)
    try:
        assert few_keys.run_joint(gm, context()) == 0
    finally:
        torch.use_deterministic_algorithms(False)
