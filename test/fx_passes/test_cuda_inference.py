"""Passes of GPU inference preserve the results of graphs; they run here on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import conv_bias, inference, pad_matmul
from altbackend.fx_passes.constants import constant_nodes

T = torch.Tensor


def traced(fn: Callable[..., Any], *inputs: T) -> torch.fx.GraphModule:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        return make_fx(fn, decomposition_table=decomp.table())(*fakes)


def targets(gm: torch.fx.GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def test_wide_projections_are_padded() -> None:
    def fn(x: T, w: T, b: T) -> tuple[T, T]:
        return F.linear(x, w, b) * 2, (x @ w.t()).view(2, 1024, 1031)

    x, w, b = (torch.randn(s).bfloat16() for s in ((2048, 2048), (1031, 2048), (1031,)))
    gm = traced(fn, x, w, b)
    assert pad_matmul.pad(gm, constant := constant_nodes(gm, (1, 2)), constant) == 2
    gm.recompile()
    gm.graph.lint()
    wide = x.float(), w.float(), b.float()  # a CPU without 16-bit products takes half a minute for bfloat16
    for got, want in zip(gm(*wide), fn(*wide), strict=True):
        torch.testing.assert_close(got, want)
    widths = [n.meta["val"].shape[1] for n in gm.graph.nodes if "mm" in str(n.target)]
    assert widths == [1040, 1040]
    for other in (torch.randn(2048, 2048), x[:8]):  # float32 and small matmuls are not padded
        w_, b_ = w.to(other.dtype), b.to(other.dtype)
        gm = traced(fn if len(other) == 2048 else lambda x, w, b: F.linear(x, w, b), other, w_, b_)
        assert pad_matmul.pad(gm, constant := constant_nodes(gm, (1, 2)), constant) == 0


def test_convolution_biases_stand_alone() -> None:
    x, w, b = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    gm = traced(lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(), x, w, b)
    assert conv_bias.split_biases(gm) == 1
    gm.recompile()
    torch.testing.assert_close(gm(x, w, b), F.conv2d(x, w, b, padding=1).relu())


@pytest.mark.parametrize(
    ("dtype", "layout", "groups", "split"),
    [
        (torch.bfloat16, torch.contiguous_format, 8, 0),  # the library adds the bias before it rounds
        (torch.float16, torch.contiguous_format, 8, 0),
        (torch.float32, torch.contiguous_format, 8, 1),
        (torch.bfloat16, torch.channels_last, 8, 1),
        (torch.bfloat16, torch.contiguous_format, 2, 1),
    ],
    ids=str,
)
def test_biases_of_plain_depthwise_images_stay(
    dtype: torch.dtype, layout: torch.memory_format, groups: int, split: int
) -> None:
    x = torch.randn(2, 8, 6, 6, dtype=dtype).to(memory_format=layout)
    w, b = torch.randn(16, 8 // groups, 3, 3, dtype=dtype), torch.randn(16, dtype=dtype)
    gm = traced(lambda x, w, b: F.conv2d(x, w, b, groups=groups), x, w, b)
    assert conv_bias.split_biases(gm) == split


def test_block_in_bfloat16_is_folded_and_channels_last() -> None:
    def fn(x: T, w: T, gamma: T, beta: T, mean: T, var: T) -> T:
        return F.batch_norm(F.conv2d(x, w, padding=1), mean, var, gamma, beta).relu()

    torch.manual_seed(0)
    x, w = torch.randn(2, 8, 16, 16).bfloat16(), torch.randn(16, 8, 3, 3).bfloat16()
    gamma, beta, mean, var = (torch.rand(16).bfloat16() + 0.5 for _ in range(4))
    gm = traced(fn, x, w, gamma, beta, mean, var)
    cfg = resolve(options={"freezing": True})
    split = inference(gm, (1, 2, 3, 4, 5), cfg, Trace("test", cfg), "gpu")
    assert split is not None
    names = targets(split.main)
    assert not any("batch_norm" in n for n in names)
    conv = next(n for n in split.main.graph.nodes if "convolution" in str(n.target))
    assert conv.args[2] is None
    assert conv.meta["val"].is_contiguous(memory_format=torch.channels_last)
    inputs = [x, w, gamma, beta, mean, var]
    folded = split.prologue(*(inputs[k] for k in split.watched))
    split.main.recompile()
    got = split.main(*(inputs[k] for k in split.inputs), *folded)
    exact = fn(*(t.double() for t in inputs))
    eager = fn(*inputs)
    assert float((got.double() - exact).norm()) <= 2 * float((eager.double() - exact).norm()) + 1e-3


def test_block_that_keeps_nothing_normalises_where_its_result_is_read() -> None:
    def fn(x: T, w: T, gamma: T, beta: T, mean: T, var: T) -> T:
        return F.batch_norm(F.conv2d(x, w, padding=1), mean, var, gamma, beta).relu()

    torch.manual_seed(0)
    x, w = torch.randn(2, 8, 16, 16), torch.randn(16, 8, 3, 3)
    gamma, beta, mean, var = (torch.rand(16) + 0.5 for _ in range(4))
    gm = traced(fn, x, w, gamma, beta, mean, var)
    cfg = resolve(options={"freezing": False})
    assert inference(gm, (1, 2, 3, 4, 5), cfg, Trace("test", cfg), "gpu") is None
    gm.recompile()
    torch.testing.assert_close(gm(x, w, gamma, beta, mean, var), fn(x, w, gamma, beta, mean, var))


def test_weights_copied_in_each_call_are_padded_for_many_rows_only() -> None:
    for rows, padded in ((4096, 1), (128, 0)):
        x, w = torch.randn(rows, 4096).bfloat16(), torch.randn(1031, 4096).bfloat16()
        gm = traced(lambda x, w: F.linear(x, w), x, w)
        assert pad_matmul.pad(gm, constant_nodes(gm, (1,))) == padded


def test_weights_are_rearranged_where_they_are_needed() -> None:
    """Results that all exist from the start would add to the peak of memory, which early layers often have."""

    def fn(x: T, v: T, w: T) -> T:
        for weight in (v, w):
            x = F.conv2d(x, weight, padding=1).relu()
        return x

    x, v, w = torch.randn(2, 64, 8, 8), torch.randn(64, 64, 3, 3), torch.randn(64, 64, 3, 3)
    gm = traced(fn, *(t.bfloat16() for t in (x, v, w)))
    inference(gm, (1, 2), resolve(options={"freezing": False}), Trace("test", resolve()), "gpu")
    gm.graph.lint()
    names = targets(gm)
    at = [k for k, name in enumerate(names) if name == "aten.convolution.default"]
    assert names[at[0] : at[1]].count("aten.clone.default") == 1
    assert gm(*(t.bfloat16() for t in (x, v, w))).shape == (2, 64, 8, 8)
