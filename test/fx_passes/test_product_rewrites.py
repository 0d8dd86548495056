"""1x1 convolutions as matmuls, batches of linears, linears of one input on a GPU: on CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend import decomp
from altbackend.compat import torch_api
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import batch_linears, inference, onednn, patchify, pointwise_convolutions
from altbackend.fx_passes.constants import constant_nodes
from altbackend.fx_passes.context import Context
from altbackend.fx_passes.graph import stable_sort
from altbackend.fx_passes.mixed_layouts import is_channels_last
from test.compare import difference

T = torch.Tensor


def traced(fn: Callable[..., Any], *inputs: T) -> torch.fx.GraphModule:
    with FakeTensorMode() as mode:
        return make_fx(fn, decomposition_table=decomp.table())(*(mode.from_tensor(x) for x in inputs))


def context(device: str, static: tuple[int, ...] = (), **options: Any) -> Context:
    cfg = resolve(options=options)
    return Context(cfg, Trace("test", cfg), static, device)


def result(gm: torch.fx.GraphModule) -> Any:
    return gm.graph.output_node().args[0].meta["val"]


@pytest.fixture(autouse=True)
def equal_settings() -> Iterator[None]:
    """Let products of float32 round as convolutions do, so that they may replace them."""
    with tf32(products=False, convolutions=False):
        yield


@contextlib.contextmanager
def tf32(products: bool, convolutions: bool) -> Iterator[None]:
    """Set what torch's settings allow. Other tests forbid to set those of cuDNN themselves."""
    answers: dict[str, Any] = {
        "allows_tf32": lambda: products,
        "allows_tf32_convolutions": lambda: convolutions,
    }
    with patch.multiple(torch_api, **answers):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("products", "convolutions"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize(("rewrite", "window"), [(pointwise_convolutions.run, 1), (patchify.run, 2)])
def test_a_product_replaces_a_convolution_if_both_round_alike(
    rewrite: Callable[..., int], window: int, products: bool, convolutions: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(2, 6, 4, 8).to(dtype, memory_format=torch.channels_last)
    w = torch.randn(4, 6, window, window).to(dtype, memory_format=torch.channels_last)
    with tf32(products, convolutions):
        for device in ("gpu", "cpu"):
            gm = traced(lambda x, w: F.conv2d(x, w, stride=window), x, w)
            differ = device == "gpu" and dtype == torch.float32 and products != convolutions
            with patch.object(onednn, "computes", lambda dtype: True):
                assert rewrite(gm, context(device)) == (not differ)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("device", "size", "last"),
    [
        ("gpu", (2, 6, 5, 7), True),
        ("cpu", (2, 6, 5, 7), True),
        ("cpu", (3, 6, 1, 1), False),
        ("gpu", (2, 6, 3, 4, 5), True),
    ],
)
def test_pointwise_convolutions(device: str, size: tuple[int, ...], last: bool, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(size).to(dtype)
    if last:
        x = x.to(memory_format=torch.channels_last if len(size) == 4 else torch.channels_last_3d)
    w, b = torch.randn(4, 6, *[1] * (len(size) - 2)).to(dtype), torch.randn(4).to(dtype)
    conv = F.conv2d if len(size) == 4 else F.conv3d

    def fn(x: T, w: T, b: T) -> T:
        return conv(x, w, b if bias else None).relu()

    gm = traced(fn, x, w, b)
    before = result(gm)
    known = device == "gpu" or dtype == torch.float32 or onednn.computes(dtype)
    fires = known and (is_channels_last(before) or not last)
    assert [pointwise_convolutions.run(gm, context(device)) for _ in range(2)] == [fires, False]
    after = result(gm)
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    if last:
        assert after.stride() == before.stride()
    gm.recompile()
    # eager's convolution on a GPU rounds before it adds the bias, as the kernel does that reads the product
    expected = (conv(x, w) + b.view(-1, *[1] * (len(size) - 2))).relu() if bias and device == "gpu" else fn(x, w, b)
    assert not difference(gm(x, w, b), expected, fn(x.double(), w.double(), b.double()), strides=last)


@pytest.mark.parametrize(
    ("fn", "device", "product"),
    [
        (lambda x, w, b: F.conv2d(x, w, b).relu(), "gpu", "mm"),
        (lambda x, w, b: F.conv2d(x, w, b), "gpu", "addmm"),
        (lambda x, w, b: F.conv2d(F.conv2d(x, w, b), w), "gpu", "addmm"),
        (lambda x, w, b: F.conv2d(x, w, b).relu(), "cpu", "addmm"),
    ],
    ids=["kernel", "result", "product", "cpu"],
)
def test_kernels_of_a_gpu_add_the_bias(fn: Callable[..., T], device: str, product: str) -> None:
    x, w, b = torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last), torch.randn(6, 6, 1, 1), torch.randn(6)
    gm = traced(fn, x, w, b)
    assert pointwise_convolutions.run(gm, context(device))
    targets = [n.target.overloadpacket.__name__ for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert next(name for name in targets if name in ("mm", "addmm")) == product
    gm.recompile()
    torch.testing.assert_close(gm(x, w, b), fn(x, w, b))


@pytest.mark.parametrize(("dtype", "fires"), [(torch.float32, 1), (torch.bfloat16, 0)], ids=str)
def test_convolutions_of_a_dtype_without_fast_products_stay(dtype: torch.dtype, fires: int) -> None:
    x, w = torch.randn(3, 6, 1, 1).to(dtype), torch.randn(4, 6, 1, 1).to(dtype)
    gm = traced(lambda x, w: F.conv2d(x, w), x, w)
    with patch.object(onednn, "computes", lambda dtype: dtype == torch.float32):
        assert pointwise_convolutions.run(gm, context("cpu")) == fires


def test_other_convolutions_stay() -> None:
    x, w = torch.randn(2, 6, 5, 5), torch.randn(4, 6, 1, 1)
    last = x.to(memory_format=torch.channels_last)
    for fn, image, device in (
        (lambda x, w: F.conv2d(x, w), x, "gpu"),  # pixels are no rows
        (lambda x, w: F.conv2d(x, w) + F.conv2d(x, w).sin(), last, "cpu residual"),
        (lambda x, w: F.conv2d(x, w, stride=2), last, "gpu"),
        (lambda x, w: F.conv2d(x, w, padding=1), last, "gpu"),
        (lambda x, w: F.conv2d(x, w[:, :3], groups=2), last, "gpu"),
    ):
        expected = 1 if "residual" in device else 0  # of two, the one that is not added
        assert pointwise_convolutions.run(traced(fn, image, w), context(device[:3])) == expected


def experts(x: T, ws: list[T], bs: list[T]) -> T:
    parts = [F.linear(x * (k + 1), w, b).relu() for k, (w, b) in enumerate(zip(ws, bs, strict=True))]
    more = [F.linear(p, w.t()) for p, w in zip(parts, ws, strict=True)]
    return torch.stack(parts).sum() + torch.stack(more)


def test_batches_of_linears() -> None:
    torch.manual_seed(0)
    x, ws, bs = torch.randn(3, 6), [torch.randn(5, 6) for _ in range(4)], [torch.randn(5) for _ in range(4)]
    gm = traced(lambda x, *p: experts(x, list(p[:4]), list(p[4:])), x, *ws, *bs)
    before, constant = result(gm), constant_nodes(gm, tuple(range(1, 9)))
    assert [batch_linears.join(gm, constant) for _ in range(2)] == [2, 0]
    gm.graph.lint()
    gm.graph.eliminate_dead_code()
    assert result(gm).stride() == before.stride()
    names = [str(n.target) for n in gm.graph.nodes]
    assert (names.count("aten.baddbmm.default"), names.count("aten.bmm.default")) == (1, 1)
    assert not any("aten.mm" in t or "addmm" in t for t in names)
    gm.recompile()
    torch.testing.assert_close(gm(x, *ws, *bs), experts(x, ws, bs))


def test_linears_that_need_each_other_are_no_batch() -> None:
    def chain(x: T, *ws: T) -> T:
        for w in ws:
            x = (x @ w).relu()
        return x

    gm = traced(chain, torch.randn(3, 6), *(torch.randn(6, 6) for _ in range(5)))
    assert batch_linears.join(gm, constant_nodes(gm, (1, 2, 3, 4, 5))) == 0


@pytest.mark.parametrize("freezing", [True, False])
def test_linears_of_one_input_are_joined_on_a_gpu_where_that_is_kept(freezing: bool) -> None:
    x, ws = torch.randn(5, 8), [torch.randn(8, 8) for _ in range(3)]

    def fn(x: T, *ws: T) -> tuple[T, ...]:
        return tuple(F.linear(x, w).view(1, 5, 8) for w in ws)

    gm = traced(fn, x, *ws)
    cfg = resolve(options={"freezing": freezing})
    split = inference(gm, (1, 2, 3), cfg, Trace("test", cfg), "gpu")
    products = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(products) == (1 if freezing else 3)
    assert (split is not None) == freezing


def test_sort_keeps_order_and_finds_cycles() -> None:
    gm = traced(lambda x: (x.sin() + x.cos()).exp(), torch.randn(3))
    names = [n.name for n in gm.graph.nodes]
    stable_sort(gm)
    assert [n.name for n in gm.graph.nodes] == names
    sin, exp = (next(n for n in gm.graph.nodes if n.name == name) for name in ("sin", "exp"))
    exp.append(sin)  # behind its reader
    stable_sort(gm)
    gm.graph.lint()
    sin.args = (exp,)
    with pytest.raises(RuntimeError, match="before it is computed"):
        stable_sort(gm)
