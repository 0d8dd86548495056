"""`numerics="eager"` on a CPU, bit for bit: generated where IEEE arithmetic decides, else eager's own kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import altbackend
from altbackend import decomp
from altbackend.compile_pool import cuda as compile_cuda
from altbackend.compile_pool import workers
from benchmarks import bitwise
from benchmarks.opinfo import library_calls

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
Functions = Mapping[str, Callable[[T], T]]

_TORCH = "abs ceil floor frac neg reciprocal round sgn sign square trunc deg2rad rad2deg relu isnan isinf signbit"
_FUNCTIONAL = "hardsigmoid hardtanh leaky_relu softsign hardshrink relu6 hardswish"
GENERATED: Functions = {
    **{name: getattr(torch, name) for name in _TORCH.split()},
    **{name: getattr(F, name) for name in _FUNCTIONAL.split()},
    "less a number": lambda x: x - 0.3,  # eager rounds the number of a difference, not that of a product
    "number less": lambda x: 0.3 - x,
    "more a number": lambda x: x + 0.3,
    "more a whole number": lambda x: x + 257,
    "scaled": lambda x: x * 1.1,
    "divided": lambda x: x / 1.1,
    "quotient": lambda x: 1.3 / x,
    "above": lambda x: x > 0.3,
    "equal": lambda x: x == 0.3,
    "a number of one tensor": lambda x: x * torch.tensor(0.3) + torch.tensor(0.7),
    "by a number of one tensor": lambda x: torch.tensor(0.3) / (x / torch.tensor(1.3)),
    "whole numbers": lambda x: x * torch.arange(x.numel()) + 1,
    "chain": lambda x: (x * 1.1 + x.flip(0)).abs() * 0.3 - x,
    "quotients": lambda x: (x / x.flip(0) + 1.0).reciprocal() * x,
    "zero at a bound": lambda x: (x * 0.0).clamp(0.0, 1.0),
    "zero at an upper bound": lambda x: F.hardtanh(x * 0.0, -1.0, 0.0),
    "signed": lambda x: torch.copysign(x * x, x.flip(0)),
    "chosen": lambda x: torch.where(x * 1.1 > x.flip(0), x - 0.3, x * 3),
    "threshold": lambda x: F.threshold(x, 0.3, 7.1),
    "square": lambda x: x**2,
    "quotient of parts": lambda x: torch.addcdiv(x, x.flip(0), x + 1, value=1.3),
    "quotient spelled out": lambda x: torch.add(x, torch.mul(torch.div(x.flip(0), x + 1), 1.3)),
}
LIBRARY: Functions = {
    "exp": torch.exp,
    "in a chain": lambda x: (x * 1.1).exp() * 0.3 + x,
    "of a part": lambda x: (x * 1.1)[::3].exp(),
    "of a part from an odd place": lambda x: (x * 1.1)[1:-2].tanh() * 2,
    "of columns": lambda x: (x[:4096] * 1.1).view(64, 64).t().sigmoid(),
    "of a row for all": lambda x: (x[:64] * 1.1).expand(9, 64).sin(),
    "the larger": lambda x: torch.fmax(x * 0.7, x.flip(0)),
    "root": lambda x: x.abs().sqrt(),
    "inverse root": lambda x: (x.abs() + 1).rsqrt(),
    "cube": lambda x: x**3,
    "inverse square": lambda x: x**-2,
    "power": lambda x: x.abs() ** 0.3,
    "remainder": lambda x: x % 1.3,
    "remainder of zero": lambda x: torch.fmod(x, 1.3),
    "whole quotient": lambda x: torch.div(x, 1.3, rounding_mode="floor"),
    "cut quotient": lambda x: torch.div(x, x.flip(0), rounding_mode="trunc"),
    "the larger of zeros": lambda x: torch.maximum(x * 0.0, x.flip(0) * 0.0),
    "a tensor's bound": lambda x: torch.clamp(x, min=x.flip(0)),
    "a share": lambda x: torch.add(x, x.flip(0), alpha=0.3),
    "a product more": lambda x: torch.addcmul(x, x.flip(0), x, value=1.3),
    "between": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "softshrink": F.softshrink,
    "logsigmoid": F.logsigmoid,
    "logit": lambda x: torch.logit(x, 1e-3),
    "xlogy": lambda x: torch.xlogy(x, x.abs() + 1),
    "glu": lambda x: F.glu(x[: x.numel() // 2 * 2]),
    "uniform exp": lambda x: torch.full([7], 0.3, dtype=x.dtype).exp(),
}
GRADIENTS = (
    "elu gelu silu mish softplus hardtanh hardswish hardsigmoid hardshrink softshrink leaky_relu logsigmoid relu6"
)


def apart(functions: Functions, dtype: str, layout: str) -> dict[str, str]:
    found = bitwise.dense(functions, getattr(torch, dtype), layout)
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize("layout", bitwise.LAYOUTS)
@pytest.mark.parametrize("dtype", bitwise.DTYPES)
def test_chains_equal_eager(dtype: str, layout: str) -> None:
    assert apart(GENERATED, dtype, layout) == {}


@pytest.mark.parametrize("layout", bitwise.LAYOUTS)
@pytest.mark.parametrize("dtype", bitwise.DTYPES)
def test_library_calls_see_what_eager_sees(dtype: str, layout: str) -> None:
    """Vectors and scalars of eager's loops differ, so what it gives depends on strides and on where a loop ends."""
    assert apart(LIBRARY, dtype, layout) == {}


@pytest.mark.parametrize("dtype", bitwise.DTYPES)
@pytest.mark.parametrize("name", GRADIENTS.split())
def test_gradients_equal_eager(name: str, dtype: str) -> None:
    def gradient(f: Callable[[T], T]) -> T:
        x = (torch.linspace(-6, 6, 1001) * 1.1).to(getattr(torch, dtype)).requires_grad_()
        return torch.autograd.grad(f(x), x, torch.linspace(0.3, 2, 1001).to(x.dtype))[0]

    torch._dynamo.reset()
    run = torch.compile(getattr(F, name), backend=altbackend.alt, dynamic=False, options=bitwise.OPTIONS)
    assert bitwise.difference(gradient(run), gradient(getattr(F, name))) == ""


def calls_and_decisions(fn: Callable[[T], T], folder: Path, x: T) -> tuple[list[str], str]:
    torch._dynamo.reset()
    options: dict[str, Any] = {**bitwise.OPTIONS, "debug_dir": str(folder)}
    torch.compile(fn, backend=altbackend.alt, dynamic=False, options=options)(x)
    return list(library_calls(folder, [])), "".join(f.read_text() for f in folder.glob("*/decisions.txt"))


def test_what_is_decided_fuses(tmp_path: Path) -> None:
    def every(x: T) -> list[T]:
        return [f(x) for f in GENERATED.values()]

    for dtype in bitwise.DTYPES:
        calls, _ = calls_and_decisions(every, tmp_path / dtype, torch.rand(40).to(getattr(torch, dtype)))  # type: ignore[arg-type]
        assert calls == [], dtype


@pytest.mark.parametrize(
    ("fn", "dtype", "reason"),
    [
        (torch.exp, torch.float32, "exp of floats: only eager's own function gives its last bit"),
        (lambda x: x % 1.3, torch.bfloat16, "remainder in 16 bits"),
        (lambda x: torch.add(x, x, alpha=0.3), torch.float32, "a product in a sum"),
        (lambda x: x**3, torch.float16, "several steps in 16 bits"),
    ],
)
def test_a_library_call_has_its_reason(fn: Callable[[T], T], dtype: torch.dtype, reason: str, tmp_path: Path) -> None:
    calls, decisions = calls_and_decisions(fn, tmp_path, torch.rand(40).to(dtype))
    assert len(calls) == 1
    assert reason in decisions


def test_quotients_of_rows_are_divisions(tmp_path: Path) -> None:
    """A product with a reciprocal is not the quotient where that is subnormal."""
    x = torch.full([8, 64], 3e-39)
    calls_and_decisions(lambda x: x / x[:, :1].mul(1e5), tmp_path, x)
    assert "divide_by" not in "".join(f.read_text() for f in tmp_path.glob("*/*kernels.cpp"))


def test_pointwise_operators_of_one_kernel_stay_whole() -> None:
    aten = torch.ops.aten
    fast, exact = decomp.table(), decomp.table("eager")
    for op in (aten.mish.default, aten.softplus.default, aten.elu_backward.default, aten._log_softmax.default):
        assert op in fast
        assert op not in exact
    assert {aten.frac.default, aten.hardshrink.default, aten.nan_to_num.default} <= set(exact)


def test_products_and_sums_of_a_gpu_kernel_are_rounded_apart() -> None:
    source = """
import triton
import triton.language as tl


@triton.jit
def kernel(a, b, c):
    i = tl.arange(0, 128)
    tl.store(c + i, tl.load(a + i) * tl.load(b + i) + tl.load(c + i))
"""
    signature = (("a", "*fp32"), ("b", "*fp32"), ("c", "*fp32"))

    def cubin(contract: bool) -> str:
        job = compile_cuda.Job(source, signature, (), (0, 1, 2), 4, 1, 90, contract=contract)
        made = workers.pool(1, "subprocess").compile(compile_cuda._request(job))
        return str(made["cubin"])

    assert cubin(True) != cubin(False)


def test_a_difference_of_one_bit_is_found() -> None:
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert bitwise.difference(a, a.clone()) == ""
    assert bitwise.difference(a, torch.tensor([1.0, float("nan"), -0.0])) == "1 of 3 elements, 0.0 instead of -0.0"
    assert bitwise.difference(a, a.nextafter(torch.tensor(2.0))).startswith("2 of 3")
    assert "torch.float64" in bitwise.difference(a, a.double())


def test_operators_of_the_database_are_compared() -> None:
    names = bitwise.pointwise()
    assert {"exp", "add", "clamp", "nn.functional.gelu", "where"} <= set(names)
    assert not {"sum", "matmul", "softmax"} & set(names)
    assert bitwise.compare("add", "bfloat16", 2)[0] in ("equal", "differs")
    assert bitwise.compare("floor", "float16", 2) == ("equal", "")


@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_next_number_is_the_next_of_its_own_type(dtype: torch.dtype, numerics: str) -> None:
    x, y = torch.randn(2, 64).to(dtype)
    compiled = torch.compile(torch.nextafter, backend="alt", options={"numerics": numerics, "strict": True})
    assert torch.equal(compiled(x, y), torch.nextafter(x, y))
