"""`numerics="eager"` on a CPU: what IEEE arithmetic decides is eager's bit for bit, at all values of 16-bit types."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch.nn import functional as F

from benchmarks import bitwise

_TORCH = "abs ceil floor frac neg reciprocal round sgn sign square trunc deg2rad rad2deg rsqrt"
_FUNCTIONAL = "relu hardsigmoid hardtanh leaky_relu softsign hardshrink"
EXACT: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in _TORCH.split()},
    **{name: getattr(F, name) for name in _FUNCTIONAL.split()},
    "less a number": lambda x: x - 0.3,  # eager rounds the number of a difference, not that of a product
    "remainder": lambda x: x % 1.3,
    "remainder of zero": lambda x: torch.fmod(x, 1.3),
    "scaled": lambda x: x * 1.1,
    "quotient": lambda x: 1.3 / x,
    "chain": lambda x: (x * 1.1 + x.flip(0)).abs() * 0.3 - x,
    "quotients": lambda x: (x / x.flip(0) + 1.0).reciprocal() * x,
    "larger": lambda x: torch.maximum(x * 0.7, x.flip(0)),
    "signed": lambda x: torch.copysign(x * x, x.flip(0)),
    "chosen": lambda x: torch.where(x * 1.1 > x.flip(0), x - 0.3, x * 3),
}


@pytest.mark.parametrize("dtype", bitwise.DTYPES)
def test_chains_equal_eager(dtype: str) -> None:
    found = bitwise.dense(EXACT, getattr(torch, dtype))
    assert {name: text for name, text in found.items() if text} == {}


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
