"""Integer functions of <altbackend/cpu.h> against torch, for each width."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from test.runtime.vecmath_library import HERE, Library, Loop, binary, build, unary

pytestmark = pytest.mark.timeout(100)
DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SHORT = {dtype: str(dtype)[6:] for dtype in (*DTYPES, torch.bool)}
TORCH_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "minimum": torch.minimum,
    "left_shift": torch.bitwise_left_shift, "right_shift": torch.bitwise_right_shift, "gcd": torch.gcd,
    "bitwise_and": torch.bitwise_and, "bitwise_or": torch.bitwise_or, "bitwise_xor": torch.bitwise_xor,
    "pow": torch.pow,
}  # fmt: skip
DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "floor_divide": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}
UNARY = ("neg", "abs", "sign", "bitwise_not")
BOOL = ("add", "mul", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")


@pytest.fixture(scope="module", params=[HERE[0], HERE[-1]])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    loops: list[Loop] = [binary(name, dtype) for name in (*TORCH_BINARY, *DIVISIONS) for dtype in DTYPES]
    loops += [unary(name, dtype) for name in UNARY for dtype in DTYPES]
    loops += [binary(name, torch.bool) for name in BOOL] + [unary("bitwise_not", torch.bool)]
    loops += [Loop(f"clamp_{SHORT[d]}", "alt::clamp(a, b, c)", (d, d, d), d) for d in DTYPES]
    return build(loops, request.param, tmp_path_factory.mktemp("integer"))


def values(dtype: torch.dtype, seed: int, count: int = 6_000) -> Tensor:
    """All of a byte; else random bits, small numbers and the ends of the range."""
    info, generator = torch.iinfo(dtype), torch.Generator().manual_seed(seed)
    edges = torch.tensor([info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 7], dtype=dtype)
    wide = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, dtype=torch.int64).to(dtype)
    small = torch.randint(0 if info.min == 0 else -70, 70, (count,), generator=generator).to(dtype)
    return torch.cat([edges, wide, small])


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    edges = values(dtype, 0, 0)
    grid = torch.cartesian_prod(edges, edges)
    a, b = values(dtype, 1), values(dtype, 2)
    shuffled = b[torch.randperm(b.numel(), generator=torch.Generator().manual_seed(3))]
    return torch.cat([grid[:, 0], a, a]), torch.cat([grid[:, 1], b, shuffled])


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.__getitem__)
@pytest.mark.parametrize("name", TORCH_BINARY)
def test_binary_equals_torch(library: Library, name: str, dtype: torch.dtype) -> None:
    a, b = pairs(dtype)
    assert torch.equal(library(f"{name}_{SHORT[dtype]}", a, b), TORCH_BINARY[name](a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.__getitem__)
@pytest.mark.parametrize("name", DIVISIONS)
def test_division_equals_torch(library: Library, name: str, dtype: torch.dtype) -> None:
    """Except the lowest value by -1, which is undefined in torch (SIGFPE for some widths): here it wraps around."""
    a, b = pairs(dtype)
    wraps = (a == torch.iinfo(dtype).min) & (b == -1) & (torch.iinfo(dtype).min < 0)
    defined = (b != 0) & ~wraps
    got = library(f"{name}_{SHORT[dtype]}", a, b)
    assert torch.equal(got[defined], DIVISIONS[name](a[defined], b[defined]))
    assert not got[b == 0].any()
    assert torch.equal(got[wraps], a[wraps] if "divide" in name else torch.zeros_like(a[wraps]))


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.__getitem__)
@pytest.mark.parametrize("name", UNARY)
def test_unary_equals_torch(library: Library, name: str, dtype: torch.dtype) -> None:
    x = values(dtype, 1)
    assert torch.equal(library(f"{name}_{SHORT[dtype]}", x), getattr(torch, name)(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=SHORT.__getitem__)
def test_clamp_equals_torch(library: Library, dtype: torch.dtype) -> None:
    (a, b), c = pairs(dtype), values(dtype, 5)
    a, b, c = a[: c.numel()], b[: c.numel()], c[: a.numel()]
    assert torch.equal(library(f"clamp_{SHORT[dtype]}", a, b, c), torch.clamp(a, b, c))


@pytest.mark.parametrize("name", BOOL)
def test_bool_equals_torch(library: Library, name: str) -> None:
    a, b = torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True])
    assert torch.equal(library(f"{name}_bool", a, b), getattr(torch, name)(a, b))


def test_bool_not(library: Library) -> None:
    assert library("bitwise_not_bool", torch.tensor([False, True])).tolist() == [True, False]


def test_narrow_division_vectorises(tmp_path: Path) -> None:
    names = ("trunc_divide", "floor_divide", "remainder", "fmod")
    loops = [binary(name, dtype) for name in names for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8)]
    assert {loop.name for loop in loops} == build(loops, HERE[-1], tmp_path).vectorised
