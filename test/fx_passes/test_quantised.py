"""Passes over quantised graphs: what they match, what they refuse and why, and results against eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
import torch.nn.functional as F
from torch import nn

from altbackend.compat.torch_api import exact_byte_products
from altbackend.fx_passes import onednn

T = torch.Tensor
D = torch.ops.quantized_decomposed
pytestmark = pytest.mark.skipif(
    not onednn.available() or not exact_byte_products(), reason="products of bytes are not exact on this processor"
)


def quantised(x: T, scale: float = 0.05, zero: int = 3, dtype: torch.dtype = torch.uint8) -> T:
    """Return what an observer leaves of a float tensor: quantised and dequantised."""
    low, high = (0, 255) if dtype == torch.uint8 else (-128, 127)
    q = D.quantize_per_tensor(x, scale, zero, low, high, dtype)
    return D.dequantize_per_tensor(q, scale, zero, low, high, dtype)


class Weight(nn.Module):
    """A quantised weight with a scale and a zero point for each output channel."""

    def __init__(self, *sizes: int, zero: int = 0) -> None:
        super().__init__()
        self.register_buffer("q", torch.randint(-127, 128, sizes).to(torch.int8))
        self.register_buffer("scale", torch.rand(sizes[0]) * 0.01 + 0.001)
        self.register_buffer("zero", torch.full((sizes[0],), zero))

    def forward(self) -> T:
        return D.dequantize_per_channel(self.q, self.scale, self.zero, 0, -128, 127, torch.int8)


class Linears(nn.Module):
    """Two quantised linears with what stands around them. `dtype`: of the activations' integers."""

    def __init__(self, zero: int = 0, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.w1, self.w2, self.dtype = Weight(48, 64, zero=zero), Weight(16, 48, zero=zero), dtype
        self.bias = nn.Parameter(torch.randn(48))

    def forward(self, x: T) -> T:
        y = F.relu(F.linear(quantised(x, dtype=self.dtype), self.w1(), self.bias))
        return torch.exp(-F.linear(quantised(y, 0.1, 0, self.dtype), self.w2()))


class Convolutions(nn.Module):
    """Three quantised convolutions, an addition and a mean."""

    def __init__(self, zero: int = 0, groups: int = 1) -> None:
        super().__init__()
        self.w1, self.w2 = Weight(16, 3, 3, 3, zero=zero), Weight(16, 16 // groups, 3, 3, zero=zero)
        self.bias, self.groups = nn.Parameter(torch.randn(16)), groups

    def forward(self, x: T) -> T:
        y = F.relu(F.conv2d(quantised(x), self.w1(), self.bias, padding=1))
        y = quantised(y, 0.02, 0)
        z = F.conv2d(y, self.w2(), padding=1, groups=self.groups)
        z = quantised(F.relu(z + y), 0.05, 0)
        return F.conv2d(z, self.w2(), stride=2, padding=1, groups=self.groups).mean((2, 3))


def compiled(model: nn.Module, folder: Path, *inputs: T, **options: Any) -> tuple[T, str]:
    """Return the result of the second call and the text of the decisions."""
    torch._dynamo.reset()
    dynamic = options.pop("dynamic", False)
    settings: dict[str, Any] = {"strict": True, "verify_ir": True, "debug_dir": str(folder), **options}
    call = torch.compile(model, backend="alt", dynamic=dynamic, options=settings)
    with torch.no_grad():
        call(*inputs)
        y = call(*inputs)
    return y, "".join(p.read_text() for p in folder.rglob("*decisions.txt"))


@pytest.mark.parametrize("zero", [0, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=str)
@pytest.mark.parametrize("freezing", [True, False])
def test_linears(zero: int, dtype: torch.dtype, freezing: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Linears(zero, dtype).eval(), torch.randn(2, 5, 64)
    with torch.no_grad():
        want = model(x)
    got, decisions = compiled(model, tmp_path, x, freezing=freezing)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    kind = "quantised linear" if freezing and dtype == torch.uint8 else "product of integers"
    assert decisions.count(f": {kind} (") == 2, decisions
    assert "2 products of integers" in decisions


def test_few_rows_are_products_of_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Linears().eval(), torch.randn(2, 64)
    got, decisions = compiled(model, tmp_path, x, freezing=True)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
    assert decisions.count(": product of integers (") == 2, decisions


@pytest.mark.parametrize("zero", [0, 5])
@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions(zero: int, groups: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Convolutions(zero, groups).eval(), torch.randn(2, 3, 12, 10)
    with torch.no_grad():
        want = model(x)
    got, decisions = compiled(model, tmp_path, x, freezing=True)
    # a value between two quanta may be rounded to either: one quantum of the first convolution, through the second
    torch.testing.assert_close(got, want, rtol=0.01, atol=0.02)
    assert "with relu and a result of torch.uint8" in decisions, decisions
    assert "with an addition, relu and a result of torch.uint8" in decisions, decisions
    assert "with none and a result of torch.float32" in decisions, decisions


class OneScale(nn.Module):
    """A convolution and a linear whose weights have one scale each, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Buffer(torch.randint(-127, 128, (16, 8, 3, 3)).to(torch.int8))
        self.w = nn.Buffer(torch.randint(-127, 128, (24, 16)).to(torch.int8))

    def forward(self, x: T) -> T:
        c, w = (D.dequantize_per_tensor(q, 0.002, 0, -127, 127, torch.int8) for q in (self.c, self.w))
        y = F.relu(F.conv2d(quantised(x), c))
        return F.linear(quantised(y.mean((2, 3)), 0.01, 0), w)


def test_weights_with_one_scale(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = OneScale().eval(), torch.randn(9, 8, 6, 6)
    got, decisions = compiled(model, tmp_path, x, freezing=True)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=0.01, atol=0.02)
    assert "quantised convolution (" in decisions
    assert "quantised linear (" in decisions
    (prologue,) = tmp_path.rglob("*frozen_graph.txt")
    assert prologue.read_text().count("_prepack.default(") == 2


def test_zero_points_that_are_written_later(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Convolutions().eval(), torch.randn(2, 3, 12, 10)
    call = torch.compile(model, backend="alt", options={"strict": True, "freezing": True})
    with torch.no_grad():
        call(x), call(x)
        model.get_buffer("w1.zero").add_(7)
        torch.testing.assert_close(call(x), model(x), rtol=0.01, atol=0.02)


def test_a_convolution_without_packed_weights_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Convolutions().eval(), torch.randn(2, 3, 12, 10)
    got, decisions = compiled(model, tmp_path, x, freezing=False)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=0.01, atol=0.02)
    assert "left as floats (weights are packed once or never" in decisions
    assert "perf_hint: quantised graph: no product of integers" in decisions


class Dynamic(nn.Module):
    """A linear whose activations are quantised when it runs: of the whole tensor, or of each row."""

    def __init__(self, per_row: bool) -> None:
        super().__init__()
        self.w, self.bias, self.per_row = Weight(48, 64), nn.Parameter(torch.randn(48)), per_row

    def forward(self, x: T) -> T:
        if self.per_row:
            scales, zeros = D.choose_qparams_per_token_asymmetric(x, torch.int8)
            q = D.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)
            y = D.dequantize_per_token(q, scales, zeros, -128, 127, torch.int8, torch.float32)
        else:
            scale, zero = D.choose_qparams.tensor(x, 0, 255, 1e-5, torch.uint8)
            q = D.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
            y = D.dequantize_per_tensor.tensor(q, scale, zero, 0, 255, torch.uint8)
        return F.relu(F.linear(y, self.w(), self.bias))


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic(per_row: bool, dynamic: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Dynamic(per_row).eval(), torch.randn(2, 5, 64)
    got, decisions = compiled(model, tmp_path, x, dynamic=dynamic, freezing=True)
    with torch.no_grad():
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    kind = "product of integers" if per_row else "quantised linear"
    assert decisions.count(f": {kind} (") == 1, decisions


def test_refusals(tmp_path: Path) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = Weight(64, 48)  # scales of the summed dimension

        def forward(self, x: T) -> T:
            return quantised(x) @ self.w().t().t()

    model, x = Transposed().eval(), torch.randn(4, 64)
    got, decisions = compiled(model, tmp_path, x)
    torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-4)
    assert "no product of integers" in decisions


class Lowered(nn.Module):
    """Call what lowering to oneDNN leaves: packed weights, a convolution, one that accumulates, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        ones, geometry = torch.zeros(8, dtype=torch.int64), ([1, 1], [1, 1], [1, 1], 1)
        w1, w2 = (torch.randint(-50, 50, (8, 8, 3, 3)).to(torch.int8) for _ in range(2))
        self.scales, self.zeros, self.geometry = torch.rand(8) * 0.01 + 0.001, ones, geometry
        self.p1 = torch.ops.onednn.qconv_prepack(w1, self.scales, 0.05, 3, *geometry)
        self.p2 = torch.ops.onednn.qconv_prepack(w2, self.scales, 0.02, 0, *geometry)
        self.p3 = torch.ops.onednn.qlinear_prepack(torch.randint(-50, 50, (8, 8)).to(torch.int8), None)

    def forward(self, x: T) -> T:
        ops, s, z, g = torch.ops.onednn, self.scales, self.zeros, self.geometry
        q = D.quantize_per_tensor(x, 0.05, 3, 0, 255, torch.uint8)
        y = ops.qconv_pointwise(q, 0.05, 3, self.p1, s, z, None, *g, 0.02, 0, torch.uint8, "relu", [], "")
        added = D.dequantize_per_tensor(y, 0.02, 0, 0, 255, torch.uint8)
        end: tuple[Any, ...] = (1.0, 0, torch.float32, 1.0, 0, "sum", 1.0, "relu", [], "")
        y = ops.qconv2d_pointwise.binary(y, 0.02, 0, self.p2, s, z, added, None, *g, *end)
        q = D.quantize_per_tensor(y.mean((2, 3)), 0.01, 0, 0, 255, torch.uint8)
        y = ops.qlinear_pointwise(q, 0.01, 0, self.p3, s, z, None, 1.0, 0, torch.float32, "none", [], "")
        return F.gelu(y)


def test_lowered_graphs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Lowered().eval(), torch.randn(2, 8, 6, 5)
    got, decisions = compiled(model, tmp_path, x)
    torch.testing.assert_close(got, model(x))
    assert "3 products of integers" in decisions
    assert "library calls only" not in decisions


def test_products_of_parts_of_a_split() -> None:
    """The operand of such a product is an element of a list."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        left, right = torch.ops.aten.unsafe_split.Tensor(w, 8, 1)
        return (x @ left) + (x @ right)

    x, w = torch.randn(6, 8), torch.randn(8, 16)
    got = torch.compile(fn, backend="alt", options={"strict": True})(x, w)
    torch.testing.assert_close(got, fn(x, w))
