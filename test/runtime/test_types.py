"""Conversions between dtypes of <altbackend/cpu.h> against torch's `to`; 16- and 8-bit floats exhaustively."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from test.runtime.vecmath_library import CPP_TYPE, Library, Loop, build, random_bits

pytestmark = pytest.mark.timeout(100)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
SMALL_FLOATS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.float64, *SMALL_FLOATS)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def cast_loop(source: torch.dtype, target: torch.dtype) -> Loop:
    return Loop(f"{name_of(source)}_to_{name_of(target)}", f"alt::cast<{CPP_TYPE[target]}>(a)", (source,), target)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    pairs = [(a, b) for a, b in itertools.product((*FLOATS, *INTEGERS), repeat=2) if a in INTEGERS or b in INTEGERS]
    return build([cast_loop(*pair) for pair in pairs], None, tmp_path_factory.mktemp("types"))


@pytest.fixture(scope="module", params=["generic", None], ids=["generic", "native"])
def floats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    pairs = itertools.product(FLOATS, repeat=2)
    return build([cast_loop(*pair) for pair in pairs], request.param, tmp_path_factory.mktemp("floats"))


def all_codes(dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


def same(got: Tensor, expected: Tensor) -> bool:
    """Equal including the sign of zero; NaN of any payload."""
    if not got.dtype.is_floating_point:
        return torch.equal(got, expected)
    g, e = got.double(), expected.double()
    return bool(((g.isnan() & e.isnan()) | ((g == e) & (g.signbit() == e.signbit()))).all())


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=name_of)
def test_every_code_widens(floats: Library, dtype: torch.dtype) -> None:
    x = all_codes(dtype)
    assert same(floats(f"{name_of(dtype)}_to_float32", x), x.float())


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=name_of)
def test_every_code_comes_back(floats: Library, dtype: torch.dtype) -> None:
    x = all_codes(dtype)
    assert same(floats(f"float32_to_{name_of(dtype)}", floats(f"{name_of(dtype)}_to_float32", x)), x)


@pytest.mark.parametrize("source", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=name_of)
def test_rounding_equals_torch(floats: Library, dtype: torch.dtype, source: torch.dtype) -> None:
    """Random bits, every midpoint of two codes, and its neighbours on both sides."""
    codes = all_codes(dtype).float()
    finite = codes[codes.isfinite()].sort().values
    middle = (finite[1:].double() + finite[:-1].double()).div(2).float()
    above, below = (torch.nextafter(middle, torch.full_like(middle, s * torch.inf)) for s in (1, -1))
    past = torch.tensor([449.0, 463.9, 464.0, 464.1, 480.0, 61439.0, 61440.0, 65519.0, 65520.0, 65536.0, 3.4e38])
    x = torch.cat([random_bits(200_000, 1), middle, above, below, past, -past]).to(source)
    assert same(floats(f"{name_of(source)}_to_{name_of(dtype)}", x), x.to(dtype))


NUMBERS = torch.tensor([
    0.0, -0.0, 0.3, -0.3, 0.9, 1.5, -1.5, 127.6, 128.0, -129.2, 255.9, 256.0, 300.7, -300.7, 32768.5, -32769.0, 65535.9,
    65600.0, 2.0**31, -(2.0**31), 2.0**31 - 1, 2.0**31 + 5, 3e9, -3e9, 2.0**32 + 300, 1e12, 2.0**62, 2.0**63, 1e19,
    -1e19, torch.inf, -torch.inf, torch.nan, 5e-324, 1e300,
], dtype=torch.float64)  # fmt: skip


@pytest.mark.parametrize("source", FLOATS, ids=name_of)
@pytest.mark.parametrize("target", INTEGERS, ids=name_of)
def test_float_to_integer_equals_torch(library: Library, source: torch.dtype, target: torch.dtype) -> None:
    """Also out of range, where C++ leaves the value open: torch gives what the processor's conversion gives."""
    x = NUMBERS.repeat_interleave(17).to(source)  # runs of 17: in torch's vector loop and in its tail
    assert same(library(f"{name_of(source)}_to_{name_of(target)}", x), x.to(target))


@pytest.mark.parametrize("source", INTEGERS, ids=name_of)
@pytest.mark.parametrize("target", [*FLOATS, *INTEGERS], ids=name_of)
def test_from_integer_equals_torch(library: Library, source: torch.dtype, target: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    edges = torch.tensor([0, 1, -1, 2**24 + 1, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63), 2049, 65535, 256])
    bits = torch.randint(-(2**63), 2**63 - 1, (3_000,), generator=generator)
    x = torch.cat([edges, bits, bits >> 32, bits >> 48]).to(source)
    assert same(library(f"{name_of(source)}_to_{name_of(target)}", x), x.to(target))


@pytest.mark.parametrize("source", FLOATS, ids=name_of)
@pytest.mark.parametrize("target", FLOATS, ids=name_of)
def test_float_to_float_equals_torch(floats: Library, source: torch.dtype, target: torch.dtype) -> None:
    x = torch.cat([NUMBERS, random_bits(20_000, 2).double()]).to(source)
    assert same(floats(f"{name_of(source)}_to_{name_of(target)}", x), x.to(target))


def test_conversions_vectorise(floats: Library, library: Library) -> None:
    names = {f"{name_of(d)}_to_float32" for d in SMALL_FLOATS} | {f"float32_to_{name_of(d)}" for d in SMALL_FLOATS}
    assert names - floats.vectorised == set()
    targets = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool)
    assert {f"float32_to_{name_of(d)}" for d in targets} - library.vectorised == set()
