"""Quantisation and dequantisation: kernels have eager's bits, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators

from test import triton_run
from test.compare import as_list, compiled

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
D = torch.ops.quantized_decomposed
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def bounds(dtype: torch.dtype) -> tuple[int, int]:
    facts = torch.iinfo(dtype) if not dtype.is_floating_point else torch.finfo(dtype)
    return int(facts.min), int(facts.max)


def hard(dtype: torch.dtype = torch.float32) -> T:
    """Return ties between whole numbers, numbers beyond every range, zeros of both signs, infinities and NaN."""
    torch.manual_seed(0)
    x = torch.randn(9, 33) * 20
    ties = torch.arange(-10, 10) / 20 + 0.025
    numbers = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 0.05, 0.15, -0.05, 1e9, -1e9, 3e38]
    special = torch.cat([torch.tensor(numbers), ties])
    x.view(-1)[: len(special)] = special
    return x.to(dtype)


def parameters(scale: torch.dtype, zero: torch.dtype) -> tuple[T, ...]:
    """Return scale and zero point of a tensor, of 33 channels and of 9 rows."""
    torch.manual_seed(1)
    return (
        *(torch.tensor([0.05], dtype=scale), torch.tensor(2).to(zero)),
        *((torch.rand(33) + 0.01).to(scale), torch.randint(-5, 5, (33,)).to(zero)),
        *((torch.rand(9, 1) + 0.01).to(scale), torch.randint(-5, 5, (9, 1)).to(zero)),
    )


def quantize(x: T, dtype: torch.dtype, p: tuple[T, ...]) -> list[T]:
    low, high = bounds(dtype)
    return [
        D.quantize_per_tensor(x, 0.1, 3, low, high, dtype),
        D.quantize_per_tensor.tensor(x, p[0], p[1], low, high, dtype),
        D.quantize_per_channel(x, p[2], p[3], 1, low, high, dtype),
        D.quantize_per_token(x, p[4], p[5], low, high, dtype),
    ]


def dequantize(q: T, out: torch.dtype, p: tuple[T, ...]) -> list[T]:
    low, high = bounds(q.dtype)
    return [
        D.dequantize_per_tensor(q, 0.1, 3, low, high, q.dtype),
        D.dequantize_per_tensor(q, 0.1, 3, low, high, q.dtype, out_dtype=out),
        D.dequantize_per_tensor.tensor(q, p[0], p[1], low, high, q.dtype, out_dtype=out),
        D.dequantize_per_channel(q, p[2], p[3], 1, low, high, q.dtype, out_dtype=out),
        D.dequantize_per_channel(q, p[2], None, 1, low, high, q.dtype),
        D.dequantize_per_token(q, p[4], p[5], low, high, q.dtype, out),
    ]


def assert_same_bits(fn: Callable[..., Any], *args: Any, way: str = "cpp") -> None:
    torch._dynamo.reset()
    got = compiled(fn)(*args) if way == "cpp" else triton_run.compiled(fn)(*args)
    for g, w in zip(as_list(got), as_list(fn(*args)), strict=True):
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
        torch.testing.assert_close(g.double(), w.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("x", "scale", "zero"),
    [
        (torch.float32, torch.float64, torch.int64),
        (torch.float32, torch.float32, torch.int8),
        (torch.bfloat16, torch.float32, torch.int32),
    ],
    ids=str,
)
def test_quantize(dtype: torch.dtype, x: torch.dtype, scale: torch.dtype, zero: torch.dtype) -> None:
    p = parameters(scale, zero)
    assert_same_bits(lambda x, *p: quantize(x, dtype, p), hard(x), *p)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(
    ("out", "scale"),
    [(torch.float32, torch.float64), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_dequantize(dtype: torch.dtype, out: torch.dtype, scale: torch.dtype) -> None:
    q = torch.randint(*bounds(dtype), (9, 33), dtype=torch.int64).to(dtype)
    p = parameters(scale, dtype if scale == torch.float32 else torch.int64)
    assert_same_bits(lambda q, *p: dequantize(q, out, p), q, *p)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    x = hard().nan_to_num(nan=0.5)  # the interpreter's NaN becomes another integer than a GPU's
    p = parameters(torch.float32, torch.int32)
    assert_same_bits(lambda x, *p: quantize(x, dtype, p), x, *p, way="triton")
    q = quantize(x, dtype, p)[0]
    assert_same_bits(lambda q, *p: dequantize(q, torch.float16, p), q, *p, way="triton")


def dynamic(x: T) -> list[T]:
    scale, zero = D.choose_qparams.tensor(x, 0, 255, 1e-5, torch.uint8)
    rows, zeros = D.choose_qparams_per_token(x, torch.int8)
    q = D.quantize_per_token(x, rows, zeros, -128, 127, torch.int8)
    return [
        *(scale, zero, D.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)),
        *D.choose_qparams_symmetric.tensor(x, -127, 127, 1e-5, torch.int8),
        *(rows, zeros, q, D.dequantize_per_token(q, rows, zeros, -128, 127, torch.int8, x.dtype)),
    ]


def asymmetric(x: T) -> list[T]:
    scales, zeros = D.choose_qparams_per_token_asymmetric(x, torch.int8)
    return [scales, zeros, D.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e3])
def test_chosen_parameters(dtype: torch.dtype, magnitude: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(65, 133) * magnitude
    x[3], x[5], x[6] = 0, x[5].abs(), -x[6].abs()
    assert_same_bits(dynamic, x.to(dtype))
    if dtype != torch.float16:
        assert_same_bits(asymmetric, x.to(dtype))


@pytest.mark.parametrize("shape", [(6, 4), (6, 1)], ids=str)
def test_groups(shape: tuple[int, int]) -> None:
    q = torch.randint(-8, 8, (6, 128), dtype=torch.int8)
    scales, zeros = torch.rand(shape), torch.randint(-4, 4, shape, dtype=torch.int8)
    group = 32 if shape[1] == 4 else 256

    def fn(q: T, scales: T, zeros: T) -> list[T]:
        args = (-8, 7, torch.int8, group)
        return [D.dequantize_per_channel_group(q, scales, z, *args, torch.bfloat16) for z in (zeros, None)]

    assert_same_bits(fn, q, scales, zeros)


def test_checks_raise_as_in_eager() -> None:
    x, scale, zero = torch.randn(4, 8), torch.zeros(1), torch.zeros(1, dtype=torch.int64)

    def too_wide(x: T) -> T:
        return D.quantize_per_tensor(x, 0.1, 0, 0, 256, torch.uint8)

    def by_scale(x: T, scale: T, zero: T) -> T:
        return D.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)

    with pytest.raises(AssertionError):
        compiled(too_wide)(x)
    with pytest.raises((ZeroDivisionError, RuntimeError), match=r"(?i)zero"):
        compiled(by_scale)(x, scale, zero)


def test_neighbours_share_the_kernel(tmp_path: Path) -> None:
    def fn(x: T) -> T:
        q = D.quantize_per_tensor(torch.relu(x), 0.1, 3, 0, 255, torch.uint8)
        return torch.exp(D.dequantize_per_tensor(q, 0.1, 3, 0, 255, torch.uint8))

    x = torch.randn(8, 16)
    torch.testing.assert_close(compiled(fn, debug_dir=str(tmp_path))(x), fn(x))
    (kernels,) = tmp_path.rglob("*kernels.txt")
    assert "library call" not in kernels.read_text()
    assert kernels.read_text().count("kernel:") == 1, kernels.read_text()
