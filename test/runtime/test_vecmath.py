"""float32 and float64 functions of <altbackend/cpu.h> against float64, mpmath and torch, for each instruction set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mpmath as mp  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from altbackend.runtime.isa import Isa
from test.runtime.vecmath_library import (
    HERE,
    Library,
    Loop,
    binary,
    build,
    random_bits,
    same_bits,
    ulp_error,
    unary,
    uniform,
)

pytestmark = pytest.mark.timeout(100)
COUNT = 200_000
FEWER = 60_000
F32, F64 = torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """A unary function, where most of its interesting arguments lie, and its largest float32 error.

    `ulps` holds with a fused multiply-add; `plain` without one.
    """

    name: str
    low: float
    high: float
    ulps: float = 2.0
    plain: float = 2.0
    vectorised: bool = True
    special: bool = False

    @property
    def reference(self) -> Callable[[Tensor], Tensor]:
        return getattr(torch.special if self.special else torch, self.name)


UNARY = (
    Case("exp", -104, 89, 1.0, 1.0),
    Case("exp2", -150, 128, 1.0, 1.0),
    Case("expm1", -10, 89, 1.5, 1.5),
    Case("log", 0, 4, 1.0, 1.0),
    Case("log2", 0, 4, 1.0),
    Case("log10", 0, 4, 1.0),
    Case("log1p", -1, 4, 1.5, 1.5),
    Case("tanh", -10, 10, plain=2.1),
    Case("sigmoid", -104, 20),
    Case("erf", -4, 4),
    Case("erfc", -4, 10.2, 1.0, 1.0),
    Case("sin", -10, 10, 1.5, 1.5),
    Case("cos", -10, 10, 1.5, 1.5),
    Case("tan", -10, 10, 1.0, 1.0),
    Case("asin", -1, 1, 1.5, 1.5),
    Case("acos", -1, 1, 1.5, 1.5),
    Case("atan", -5, 5, 1.5, 1.6),
    Case("sinh", -5, 5, 1.0, 1.0),
    Case("cosh", -5, 5, 1.0, 1.0),
    Case("asinh", -5, 5, 1.0, 1.0),
    Case("acosh", 1, 5, 1.0, 1.0),
    Case("atanh", -1, 1, 1.0, 1.0),
    Case("sqrt", 0, 4, 0.501, 0.501),
    Case("rsqrt", 0, 4, 1.5, 1.5),
    Case("reciprocal", -4, 4, 0.501, 0.501),
    Case("lgamma", -5, 5, 1.0, 1.0, vectorised=False),
    Case("digamma", -5, 5, 1.0, 1.0, vectorised=False),
    Case("erfinv", -1, 1, 1.0, 1.0, vectorised=False),
    Case("i0", -12, 12, 1.0, 1.0),
    Case("i0e", -12, 12, 1.0, 1.0, special=True),
    Case("i1", -12, 12, 1.0, 1.0, special=True),
    Case("i1e", -12, 12, 1.0, 1.0, special=True),
)
EXACT_UNARY = ("floor", "ceil", "round", "trunc", "abs", "neg", "sign", "sgn", "relu")
PREDICATES = ("isnan", "isinf", "isfinite", "signbit")
BINARY = ("pow", "atan2", "hypot", "fmod", "remainder", "floor_divide", "copysign", "nextafter")
EXTREMA = ("maximum", "minimum", "fmax", "fmin")
COMPOSED = ("logaddexp", "xlogy", "ldexp")
SCALED = "b * alt::divisor_scale(b)"
DIVIDE_BY = Loop(
    "divide_by_float32", f"alt::divide_by(a, alt::divisor_scale(b), {SCALED}, 1.0f / ({SCALED}))", (F32, F32), F32
)
CLAMP = Loop("clamp_float32", "alt::clamp(a, b, c)", (F32, F32, F32), F32)
EDGES = torch.tensor([
    0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 7.0, 8.0, 88.0, 88.72284, 89.0, 103.0, 104.5, 128.0, 1e10, 3.4e38, torch.inf,
    1e-45, 1e-40, 1.17549435e-38, 1e-20, 5.9604645e-08, 0.70710677, 0.99999994, 1.0000001, 1.5707964, 3.1415927,
    torch.nan, 2.0**22, 2.0**23, 2.0**24 + 2, 2.0**31, 2.0**63,
])  # fmt: skip
EDGES = torch.cat([EDGES, -EDGES])


def float_loops() -> list[Loop]:
    loops = [unary(case.name, F32) for case in UNARY] + [unary(name, F32) for name in EXACT_UNARY]
    loops += [unary(name, F32, torch.bool) for name in PREDICATES]
    loops += [unary("one_plus_erf", F32)]
    return loops + [binary(name, F32) for name in (*BINARY, *EXTREMA, *COMPOSED)] + [CLAMP, DIVIDE_BY]


@pytest.fixture(scope="session", params=HERE)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Isa, Library]:
    return request.param, build(float_loops(), request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Library:
    loops = [unary(case.name, F64) for case in UNARY] + [unary(name, F64) for name in EXACT_UNARY]
    loops += [binary(name, F64) for name in (*BINARY, *EXTREMA, *COMPOSED)]
    return build(loops, None, tmp_path_factory.mktemp("double"))


def samples(case: Case) -> Tensor:
    width = (case.high - case.low) / 16
    near_one = uniform(FEWER // 4, 0.999, 1.001, 3)
    inside = uniform(FEWER, case.low, case.high, 2)
    return torch.cat([random_bits(COUNT, 1), inside, uniform(FEWER, -width, width, 4), near_one])


@cache
def exact(case: Case) -> Tensor:
    return case.reference(samples(case).double())


def worst(error: Tensor, *inputs: Tensor) -> str:
    at = int(error.argmax())
    return f"{float(error[at]):.3f} ulp at " + ", ".join(f"{float(x[at]):.9g}" for x in inputs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.name)
def test_float_error_in_ulps(built: tuple[Isa, Library], case: Case) -> None:
    isa, library = built
    x = samples(case)
    error = ulp_error(library(f"{case.name}_float32", x), exact(case))
    assert float(error.max()) <= (case.plain if isa == "generic" else case.ulps), worst(error, x)


@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.name)
def test_float_specials_are_torchs(built: tuple[Isa, Library], case: Case) -> None:
    """NaN, infinities and zeros come out exactly where float64 has them, with its sign of zero."""
    got, expected = built[1](f"{case.name}_float32", EDGES), case.reference(EDGES.double()).float()
    if case.name in ("i0", "i1"):  # torch gives 0.99999994 at 0 and NaN at infinity: inf * 0; so do we
        expected[EDGES.isinf()] = torch.nan
    special = ~torch.isfinite(expected) | (expected == 0)
    wrong = special & ~same_bits(got, expected)
    assert not wrong.any(), list(zip(EDGES[wrong].tolist(), got[wrong].tolist(), expected[wrong].tolist(), strict=True))


@pytest.mark.parametrize("name", EXACT_UNARY)
def test_exact_functions_equal_torch(built: tuple[Isa, Library], name: str) -> None:
    x = torch.cat([EDGES, random_bits(COUNT, 1), uniform(COUNT, -50, 50, 2), uniform(1000, -8, 8, 3).round() / 2])
    got, expected = built[1](f"{name}_float32", x), getattr(torch, name)(x)
    wrong = ~same_bits(got, expected)
    assert not wrong.any(), (x[wrong][:5], got[wrong][:5], expected[wrong][:5])


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates_equal_torch(built: tuple[Isa, Library], name: str) -> None:
    x = torch.cat([EDGES, random_bits(COUNT, 1)])
    assert torch.equal(built[1](f"{name}_float32", x), getattr(torch, name)(x))


def pairs(name: str) -> tuple[Tensor, Tensor]:
    low = 0.0 if name == "pow" else -500.0
    grid = torch.cartesian_prod(EDGES, EDGES)
    a = torch.cat([grid[:, 0], random_bits(COUNT, 1), uniform(FEWER, low, 500, 2), uniform(FEWER, -20, 20, 3)])
    b = torch.cat([grid[:, 1], random_bits(COUNT, 4), uniform(FEWER, -5, 5, 5), uniform(FEWER, -20, 20, 6).round()])
    return quiet(a), quiet(b)


def quiet(x: Tensor) -> Tensor:
    """All NaN quiet: torch.fmax gives NaN for a signaling one."""
    return torch.where(torch.isnan(x), torch.nan, x)


@pytest.mark.parametrize(("name", "ulps"), [("pow", 1.0), ("atan2", 1.6), ("hypot", 1.0), ("fmod", 0.0)])
def test_binary_error_in_ulps(built: tuple[Isa, Library], name: str, ulps: float) -> None:
    a, b = pairs(name)
    got, expected = built[1](f"{name}_float32", a, b), getattr(torch, name)(a.double(), b.double())
    error = ulp_error(got, expected)
    assert float(error.max()) <= ulps, worst(error, a, b)
    rounded = expected.float()
    special = ~torch.isfinite(expected) | (expected == 0)
    wrong = special & ~same_bits(got, rounded)
    assert not wrong.any(), (a[wrong][:5], b[wrong][:5], got[wrong][:5], rounded[wrong][:5])


@pytest.mark.parametrize("name", ["remainder", "floor_divide", "copysign", "nextafter", *EXTREMA])
def test_exact_binary_functions_equal_torch(built: tuple[Isa, Library], name: str) -> None:
    a, b = pairs(name)
    # torch's float32 remainder gives NaN for quotients beyond 2^24; its float64 one is exact
    inputs = (a.double(), b.double()) if name == "remainder" else (a, b)
    got, expected = built[1](f"{name}_float32", a, b), getattr(torch, name)(*inputs).float()
    wrong = ~(same_values(got, expected) if name in EXTREMA else same_bits(got, expected))
    assert not wrong.any(), (a[wrong][:5], b[wrong][:5], got[wrong][:5], expected[wrong][:5])


def same_values(got: Tensor, expected: Tensor) -> Tensor:
    """As same_bits, with either zero: of two zeros torch takes one in its vector loop and the other in the tail."""
    return (torch.isnan(got) & torch.isnan(expected)) | (got == expected)


def test_clamp_equals_torch_with_nan_bounds(built: tuple[Isa, Library]) -> None:
    some = EDGES[::3]
    x, low, high = (g.contiguous() for g in torch.cartesian_prod(EDGES, some, some).unbind(1))
    assert same_values(built[1]("clamp_float32", x, low, high), torch.clamp(x, low, high)).all()


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_functions(built: tuple[Isa, Library], name: str) -> None:
    """logaddexp rounds its two summands: its error is counted in units of the larger one."""
    grid = torch.cartesian_prod(EDGES, EDGES)
    a = torch.cat([grid[:, 0], uniform(COUNT, -30, 30, 1), random_bits(FEWER, 2)])
    b = torch.cat([grid[:, 1], uniform(COUNT, -30, 30, 3), uniform(FEWER, -30, 30, 4)])
    got, expected = built[1](f"{name}_float32", a, b), getattr(torch, name)(a, b)
    assert torch.equal(torch.isnan(got), torch.isnan(expected))
    finite = torch.isfinite(expected) & torch.isfinite(got)
    assert torch.equal(got[~finite].nan_to_num(0.5), expected[~finite].nan_to_num(0.5))
    exact_value = getattr(torch, name)(a.double(), b.double())[finite]
    scale = torch.maximum(torch.maximum(a, b).abs(), torch.tensor(0.7)) if name == "logaddexp" else expected.abs()
    unit = scale[finite].double().clamp_min(2.0**-126) * 2.0**-23
    assert float(((got[finite].double() - exact_value).abs() / unit).max()) <= 2.5


def test_one_plus_erf(built: tuple[Isa, Library]) -> None:
    """Within 2 ulp of the sum's scale, as 1 + erf(x) is in eager; NaN and the limits 0 and 2 exactly."""
    x = torch.cat([EDGES, random_bits(COUNT, 1), uniform(COUNT, -4.2, 4.2, 2)])
    got, expected = built[1]("one_plus_erf_float32", x), 1 + torch.erf(x.double())
    assert torch.equal(torch.isnan(got), torch.isnan(x))
    error = (got.double() - expected).nan_to_num(0) / torch.maximum(expected, torch.tensor(1.0)).nan_to_num(1) * 2**23
    assert float(error.abs().max()) <= 2.0
    assert got[x < -4.2].eq(0).all()
    assert got[x > 4.2].eq(2).all()


def test_divide_by_is_division(built: tuple[Isa, Library]) -> None:
    """Equal to a / b wherever the residual of the quotient is a normal number; elsewhere within one unit."""
    a, b = pairs("fmod")
    got, expected = built[1]("divide_by_float32", a, b), a / b
    size = expected.abs()
    near_overflow = (size > 3.4e38) & torch.isfinite(a) & (b != 0)
    ordinary = ((a.abs() > 1e-30) & (size > 1e-37)) | ~torch.isfinite(expected) | (a == 0) | b.isinf()
    wrong = ordinary & ~near_overflow & ~same_bits(got, expected)
    assert not wrong.any(), (a[wrong][:5], b[wrong][:5], got[wrong][:5], expected[wrong][:5])
    rest = ~ordinary & ~near_overflow
    assert float(ulp_error(got[rest], expected[rest].double()).max()) <= 1.0


NOT_IN_MPMATH = ("sqrt", "rsqrt", "reciprocal")
MP_CASES = [case.name for case in UNARY if case.name not in NOT_IN_MPMATH]
MP_FUNCTIONS: dict[str, Callable[[mp.mpf], mp.mpf]] = {
    "exp2": lambda x: mp.power(2, x),
    "log2": lambda x: mp.log(x, 2),
    "sigmoid": lambda x: 1 / (1 + mp.exp(-x)),
    "lgamma": lambda x: mp.log(abs(mp.gamma(x))),
    "i0": lambda x: mp.besseli(0, x),
    "i1": lambda x: mp.besseli(1, x),
    "i0e": lambda x: mp.exp(-abs(x)) * mp.besseli(0, x),
    "i1e": lambda x: mp.exp(-abs(x)) * mp.besseli(1, x),
}
# digamma and lgamma cancel near their zeros; erfinv is refined on the C library's erf.
DOUBLE_ULPS = {"digamma": 200.0, "lgamma": 200.0, "i0": 8.0, "i1": 8.0, "i0e": 8.0, "i1e": 8.0}


@pytest.mark.parametrize("name", MP_CASES)
def test_double_error_in_ulps(doubles: Library, name: str) -> None:
    case = next(case for case in UNARY if case.name == name)
    count = 300
    bounds = (max(case.low, -30), min(case.high, 30))
    x = torch.cat([uniform(count, *bounds, 1, F64), uniform(count, bounds[0] / 99, bounds[1] / 99, 2, F64)])
    if case.low == 1:
        x = x[x > 1]
    got = doubles(f"{name}_float64", x)
    function = MP_FUNCTIONS.get(name) or getattr(mp, name)
    with mp.workdps(40):
        errors = [ulps_of(g, function(mp.mpf(v))) for v, g in zip(x.tolist(), got.tolist(), strict=True)]
    at = max(range(len(errors)), key=lambda i: errors[i])
    assert errors[at] <= DOUBLE_ULPS.get(name, 4.0), f"{errors[at]} ulp at {x[at]:.17g}"


def ulps_of(got: float, exact_value: mp.mpf) -> float:
    return float(abs(mp.mpf(got) - exact_value) / mp.mpf(2) ** (mp.frexp(exact_value)[1] - 53))


@pytest.mark.parametrize("case", UNARY, ids=lambda case: case.name)
def test_double_specials_are_torchs(doubles: Library, case: Case) -> None:
    x = torch.cat([EDGES.double(), torch.tensor([1e300, -1e300, 709.7, -745.0, -746.5, 5e-324, -5e-324, 2.3e-308])])
    got, expected = doubles(f"{case.name}_float64", x), case.reference(x)
    if case.name == "sigmoid":  # torch loses the tail below -709, where exp(-x) overflows
        expected[x == -745.0] = got[x == -745.0]
        assert float(got[x == -745.0]) > 0
    special = ~torch.isfinite(expected) | (expected == 0)
    wrong = special & ~same_bits(got, expected)
    assert not wrong.any(), list(zip(x[wrong].tolist(), got[wrong].tolist(), expected[wrong].tolist(), strict=True))


@pytest.mark.parametrize("name", [*EXACT_UNARY, "remainder", "floor_divide", "copysign", "nextafter", *EXTREMA, "fmod"])
def test_exact_double_functions_equal_torch(doubles: Library, name: str) -> None:
    a, b = (x.double() for x in pairs(name))
    inputs = (a,) if name in EXACT_UNARY else (a, b)
    got, expected = doubles(f"{name}_float64", *inputs), getattr(torch, name)(*inputs)
    wrong = ~(same_values(got, expected) if name in EXTREMA else same_bits(got, expected))
    assert not wrong.any(), (a[wrong][:5], b[wrong][:5])


def test_loops_vectorise(built: tuple[Isa, Library]) -> None:
    """g++ reports a vectorised loop for each function that promises it."""
    isa, library = built
    names = [case.name for case in UNARY if case.vectorised] + [
        "one_plus_erf",
        *EXACT_UNARY,
        *PREDICATES,
        *BINARY,
        *EXTREMA,
        *COMPOSED,
    ]
    missing = {name for name in names if f"{name}_float32" not in library.vectorised}
    assert missing <= ({"atanh"} if isa == "generic" else set())


@pytest.mark.skipif("avx512" not in HERE, reason="double exponents are vectorised with AVX-512's 64-bit integers")
def test_double_loops_vectorise(doubles: Library) -> None:
    names = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sigmoid", "i0e", "i1e", "sqrt", "rsqrt"]
    assert {name for name in names if f"{name}_float64" not in doubles.vectorised} == set()
