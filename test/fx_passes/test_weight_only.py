"""Products of floats with weights of bytes: which are rewritten, and results against eager's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from altbackend.compat.torch_api import fast_byte_weights
from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes.context import Context
from altbackend.fx_passes.quantised import weight_only
from test import triton_run
from tools import translated

T = torch.Tensor
D = torch.ops.quantized_decomposed
AVX512 = pytest.mark.skipif(not fast_byte_weights(), reason="no fast product with bytes on this processor")


def cast_first(x: T, w: T, scale: T) -> T:
    return F.linear(x, w.to(x.dtype)) * scale.view(-1)


def cast_transposed(x: T, w: T, scale: T) -> T:
    return (x @ w.t().to(x.dtype)) * scale.view(-1) + 1


def scaled_first(x: T, w: T, scale: T) -> T:
    return F.linear(x, w.to(x.dtype) * scale, torch.ones(w.shape[0], dtype=x.dtype))


def by_operator(x: T, w: T, scale: T) -> T:
    d = D.dequantize_per_channel(w, scale.view(-1).float(), None, 0, -128, 127, torch.int8, out_dtype=x.dtype)
    return F.linear(x, d).relu()


def moved(x: T, w: T, scale: T) -> T:
    return F.linear(x, (w.to(x.dtype) - 3) * scale)


def grouped(x: T, w: T, scale: T) -> T:
    """Dequantise groups of 32 columns, each with a scale and a zero point."""
    groups = w.view(w.shape[0], -1, 32).to(x.dtype) - 2
    return F.linear(x, (groups * scale.view(-1, 1, 1)).view(w.shape))


MATCHED: list[Callable[[T, T, T], T]] = [cast_first, cast_transposed, scaled_first, by_operator]
REFUSED: list[Callable[[T, T, T], T]] = [moved, grouped]


def operands(rows: int, dtype: torch.dtype) -> tuple[T, T, T]:
    torch.manual_seed(0)
    w = torch.randint(-128, 128, (64, 96)).to(torch.int8)
    return torch.randn(rows, 96).to(dtype), w, (torch.rand(64, 1) * 0.01 + 0.001).to(dtype)


def decisions_of(fn: Callable[..., T], args: tuple[T, ...], folder: Path) -> tuple[T, str]:
    torch._dynamo.reset()
    options: dict[str, Any] = {"strict": True, "verify_ir": True, "debug_dir": str(folder)}
    y = torch.compile(fn, backend="alt", dynamic=False, options=options)(*args)
    return y, "".join(p.read_text() for p in folder.rglob("*decisions.txt"))


def close(got: T, fn: Callable[..., T], args: tuple[T, ...]) -> None:
    """Compare with the result in float64; eager's own error in 16 bits bounds ours."""
    exact = fn(*(a.double() if a.is_floating_point() else a for a in args)).double()
    mine, eager = ((y.double() - exact).norm() for y in (got, fn(*args)))
    assert mine <= max(2 * eager, exact.norm() * torch.finfo(got.dtype).eps), (mine, eager)


@AVX512
@pytest.mark.parametrize("fn", MATCHED, ids=lambda f: f.__name__)
def test_few_rows_on_a_cpu(fn: Callable[..., T], tmp_path: Path) -> None:
    args = operands(3, torch.bfloat16)
    got, decisions = decisions_of(fn, args, tmp_path)
    assert "bytes read by the product (3 rows" in decisions
    if fn is not by_operator:  # eager's operator takes no float64 scales for an output of 64 bits
        close(got, fn, args)
    torch.testing.assert_close(got.float(), fn(*args).float(), rtol=2**-6, atol=0.05)


@pytest.mark.parametrize("fn", [*MATCHED, *REFUSED], ids=lambda f: f.__name__)
def test_what_stays(fn: Callable[..., T], tmp_path: Path) -> None:
    many, wide = operands(40, torch.bfloat16), operands(3, torch.float32)
    for k, args in enumerate((many, wide)):
        got, decisions = decisions_of(fn, args, tmp_path / str(k))
        torch.testing.assert_close(got.float(), fn(*args).float(), rtol=2**-6, atol=0.05)
        assert "bytes read by the product" not in decisions
        assert (fn in MATCHED) == ("dequantised by a kernel" in decisions)


class Grouped(nn.Module):
    """A weight of 4 bits in bytes, which dequantisation makes four times as large."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Buffer(torch.randint(-8, 8, (512, 512)).to(torch.int8))
        self.scale = nn.Buffer(torch.rand(512, 16, 1).bfloat16())
        self.zero = nn.Buffer(torch.randint(-8, 8, (512, 16, 1)).to(torch.int8))

    def forward(self, x: T) -> T:
        groups = self.w.view(512, 16, 32).to(x.dtype) - self.zero.to(x.dtype)
        return F.linear(x, (groups * self.scale).view(512, 512))


def test_no_dequantised_weight_is_kept(tmp_path: Path) -> None:
    model, x = Grouped().eval(), torch.randn(5, 512).bfloat16()
    options: dict[str, Any] = {"strict": True, "freezing": True, "debug_dir": str(tmp_path)}
    with torch.no_grad():
        got = torch.compile(model, backend="alt", options=options)(x)
        torch.testing.assert_close(got, model(x), rtol=2**-6, atol=0.5)
    assert not list(tmp_path.rglob("*frozen_graph.txt"))
    (kernels,) = tmp_path.rglob("*kernels.txt")
    assert kernels.read_text().count("kernel:") == 1


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("fn", [cast_first, scaled_first, moved, grouped], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_on_a_gpu(fn: Callable[..., T], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only, "LARGEST_ALONE", 64 * 96)
    args = operands(rows, torch.float16)
    gm = make_fx(fn, tracing_mode="fake")(*args)
    ctx = Context(resolve(), Trace("graph", resolve()), device="gpu")
    assert weight_only.run(gm, ctx) == (1 if rows <= weight_only.MOST_ROWS_ON_GPU else 0)
    assert weight_only.run(gm, ctx) == 0
    gm.recompile()
    close(gm(*args), fn, args)
    if rows == 2:
        close(triton_run.compiled(gm)(*args), fn, args)


def test_symbolic_sizes_of_an_operand_are_no_weights() -> None:
    def run(backend: Any) -> None:
        with torch.no_grad():
            x = torch.randn(3, 30, 4, 5)
            torch.compile(lambda c: torch.tensordot(c[0], c[1], ([1, 2], [1, 2])), backend=backend, dynamic=True)(x)

    assert translated.codes(run, "cuda", resolve(options={"strict": True}))
