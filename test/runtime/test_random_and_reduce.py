"""Philox, its distributions, OpenMP reductions, argument reductions, Welford and atomics of <altbackend/cpu.h>."""

from __future__ import annotations

import ctypes
import math
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from test.runtime.vecmath_library import CPP_TYPE, HERE, Library, Loop, build

pytestmark = pytest.mark.timeout(100)
I64, F32 = torch.int64, torch.float32
REDUCED = (torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, I64, torch.uint8)
RANDOM = [
    *(Loop(f"philox_{w}", f"int64_t(alt::philox(a, b, c).{w})", (I64, I64, I64), I64) for w in "xyzw"),
    Loop("uniform", "alt::rand_uniform(7, a)", (I64,), F32),
    Loop("normal", "alt::rand_normal(7, a)", (I64,), F32),
    Loop("integer", "alt::randint64(7, a, b, c)", (I64, I64, I64), I64),
]
EXPORT = 'extern "C" __attribute__((visibility("default"))) '


def reduction_source(name: str, dtype: torch.dtype, start: str) -> str:
    t = CPP_TYPE[dtype]
    return (
        f"{EXPORT}void {name}_{str(dtype)[6:]}(const {t}* x, {t}* out, int64_t n) {{\n"
        f"  {t} m = {start};\n#pragma omp simd reduction(alt_{name} : m)\n"
        f"  for (int64_t i = 0; i < n; ++i) m = alt::{COMBINE[name]}(m, x[i]);\n  *out = m;\n}}\n"
    )


COMBINE = {"max": "maximum", "min": "minimum", "sum": "add", "prod": "mul"}
STARTS = {"max": "alt::lowest_of<{}>()", "min": "alt::highest_of<{}>()", "sum": "{}(0)", "prod": "{}(1)"}
OTHER = f"""
{EXPORT}int64_t arg(const float* x, int64_t n, int largest) {{
  alt::Indexed<float> up{{alt::lowest_of<float>(), INT64_MAX}}, down{{alt::highest_of<float>(), INT64_MAX}};
#pragma omp simd reduction(alt_argmax : up) reduction(alt_argmin : down)
  for (int64_t i = 0; i < n; ++i) {{
    up = alt::argmax_combine(up, alt::Indexed<float>{{x[i], i}});
    down = alt::argmin_combine(down, alt::Indexed<float>{{x[i], i}});
  }}
  return largest ? up.index : down.index;
}}
{EXPORT}void welford(const double* x, int64_t n, int64_t split, double* out) {{
  alt::Welford<double> left, right;
  for (int64_t i = 0; i < split; ++i) left = alt::welford_update(left, x[i]);
  for (int64_t i = split; i < n; ++i) right = alt::welford_update(right, x[i]);
  const alt::Welford<double> all = alt::welford_combine(left, right);
  out[0] = all.mean; out[1] = all.m2; out[2] = all.weight;
}}
{EXPORT}void logic(const bool* x, int64_t n, bool* out) {{
  bool any = false, all = true;
#pragma omp simd reduction(alt_any : any) reduction(alt_all : all)
  for (int64_t i = 0; i < n; ++i) {{ any = any | x[i]; all = all & x[i]; }}
  out[0] = any; out[1] = all;
}}
"""
ATOMIC = (torch.float32, torch.float64, torch.int32, I64, torch.bfloat16, torch.float16)


def atomic_source(dtype: torch.dtype) -> str:
    t = CPP_TYPE[dtype]
    return (
        f"{EXPORT}void scatter_{str(dtype)[6:]}({t}* out, const int64_t* at, const {t}* x, int64_t n) {{\n"
        f"  for (int64_t i = 0; i < n; ++i) alt::atomic_add(out + at[i], x[i]);\n}}\n"
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    prelude = OTHER + "".join(atomic_source(dtype) for dtype in ATOMIC)
    for name, start in STARTS.items():
        prelude += "".join(reduction_source(name, dtype, start.format(CPP_TYPE[dtype])) for dtype in REDUCED)
    return build(RANDOM, HERE[-1], tmp_path_factory.mktemp("random"), prelude)


def pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def signed(*words: int) -> Tensor:
    """Two 32-bit words, low first, as one int64."""
    value = words[0] | words[1] << 32
    return torch.tensor([value - (1 << 64) if value >> 63 else value])


# Random123's kat_vectors for philox4x32-10: counter, key, result.
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_known_answers(
    library: Library, counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    arguments = signed(*key), signed(*counter[2:]), signed(*counter[:2])
    assert tuple(int(library(f"philox_{w}", *arguments)) for w in "xyzw") == result


def test_uniform(library: Library) -> None:
    n = 1_000_000
    x = library("uniform", torch.arange(n)).double()
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    assert abs(float(x.mean()) - 0.5) < 5 / math.sqrt(12 * n)
    counts = torch.histc(x, 64, 0, 1)
    assert float(((counts - n / 64) ** 2 / (n / 64)).sum()) < 120  # chi-squared, 63 degrees: P < 1e-5
    assert torch.equal(x[500:], library("uniform", torch.arange(500, n)).double())


def test_normal(library: Library) -> None:
    n = 1_000_000
    x = library("normal", torch.arange(n)).double()
    assert torch.isfinite(x).all()
    assert abs(float(x.mean())) < 5 / math.sqrt(n)
    assert abs(float(x.var()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float((x**4).mean()) - 3) < 5 * math.sqrt(96 / n)
    ordered = torch.sort(x).values
    steps = torch.arange(1, n + 1).double() / n
    assert float((torch.special.ndtr(ordered) - steps).abs().max()) < 2.5 / math.sqrt(n)  # Kolmogorov-Smirnov


def test_normal_is_box_muller(library: Library) -> None:
    n = 50_000
    zero, index = torch.zeros(n, dtype=I64), torch.arange(n)
    x, y = (library(f"philox_{w}", zero + 7, zero, index).double() for w in "xy")
    exact = torch.sqrt(-2 * torch.log((x + 0.5) / 2**32)) * torch.cos(2 * math.pi * (y // 256) / 2**24)
    assert float((library("normal", index).double() - exact).abs().max()) < 2e-6


def test_randint(library: Library) -> None:
    n = 100_000
    index = torch.arange(n)
    low, high = torch.full((n,), -3), torch.full((n,), 5)
    x = library("integer", index, low, high)
    counts = torch.bincount(x + 3, minlength=8)
    assert counts.numel() == 8
    assert float((counts - n / 8).abs().max()) < 6 * math.sqrt(n / 8)
    assert library("integer", index[:3], low[:3], low[:3]).tolist() == [-3, -3, -3]
    wide = library("integer", index, torch.full((n,), -(2**63)), torch.full((n,), 2**63 - 1))
    assert int(wide.min()) < -(2**62)
    assert int(wide.max()) > 2**62


def test_random_loops_vectorise(library: Library) -> None:
    assert {"uniform", "normal"} <= library.vectorised


def reduce(library: Library, name: str, x: Tensor) -> Tensor:
    out = torch.empty((), dtype=x.dtype)
    library.handle[f"{name}_{str(x.dtype)[6:]}"](pointer(x), pointer(out), ctypes.c_int64(x.numel()))
    return out


@pytest.mark.parametrize("count", [0, 1, 7, 16, 1003])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reductions(library: Library, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(0 if dtype == torch.uint8 else -9, 10, (count,), generator=generator).to(dtype)
    bounds = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    low, high = (-torch.inf, torch.inf) if dtype.is_floating_point else (bounds.min, bounds.max)
    assert reduce(library, "max", x) == (x.max() if count else low)
    assert reduce(library, "min", x) == (x.min() if count else high)
    assert reduce(library, "sum", x) == x.sum().to(dtype)
    few = x[:7]
    assert reduce(library, "prod", few) == few.prod().to(dtype)


@pytest.mark.parametrize("place", [0, 5, 99, 100])
def test_extrema_propagate_nan(library: Library, place: int) -> None:
    x = torch.arange(101, dtype=F32)
    x[place] = torch.nan
    assert torch.isnan(reduce(library, "max", x))
    assert torch.isnan(reduce(library, "min", x))


@pytest.mark.parametrize("name", COMBINE)
def test_reductions_vectorise(name: str, tmp_path: Path) -> None:
    """g++ keeps one partial result per lane for a reduction of ours."""
    loop = Loop("unused", "a", (F32,), F32)
    source = reduction_source(name, F32, STARTS[name].format("float"))
    line = next(t for t in source.splitlines() if "for (" in t)
    assert line in build([loop], HERE[-1], tmp_path, source).vectorised_lines


@pytest.mark.parametrize("values", [[], [1, 3, 3, 2], [3, 1, 1, 3], [1, torch.nan, 5, torch.nan], [-torch.inf] * 40])
def test_argument_reductions_equal_torch(library: Library, values: list[float]) -> None:
    x = torch.tensor([0.0, *values], dtype=F32)
    n = ctypes.c_int64(x.numel())
    library.handle.arg.restype = ctypes.c_int64
    assert library.handle.arg(pointer(x), n, 1) == int(x.argmax())
    assert library.handle.arg(pointer(x), n, 0) == int(x.argmin())


@pytest.mark.parametrize("split", [0, 1, 400, 1000])
def test_welford(library: Library, split: int) -> None:
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e6
    out = torch.empty(3, dtype=torch.float64)
    library.handle.welford(pointer(x), ctypes.c_int64(1000), ctypes.c_int64(split), pointer(out))
    assert out[2] == 1000
    torch.testing.assert_close(out[0], x.mean(), rtol=1e-14, atol=0)
    torch.testing.assert_close(out[1] / 1000, x.var(correction=0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("values", [[False] * 33, [True] * 33, [False] * 20 + [True]])
def test_logic(library: Library, values: list[bool]) -> None:
    x, out = torch.tensor(values), torch.empty(2, dtype=torch.bool)
    library.handle.logic(pointer(x), ctypes.c_int64(x.numel()), pointer(out))
    assert out.tolist() == [any(values), all(values)]


@pytest.mark.parametrize("dtype", ATOMIC, ids=str)
def test_atomic_add(library: Library, dtype: torch.dtype) -> None:
    at = torch.randint(0, 10, (200,), generator=torch.Generator().manual_seed(1))
    x = torch.arange(200).remainder(4).to(dtype)
    out = torch.zeros(10, dtype=dtype)
    library.handle[f"scatter_{str(dtype)[6:]}"](pointer(out), pointer(at), pointer(x), ctypes.c_int64(200))
    assert torch.equal(out, torch.zeros(10, dtype=dtype).index_add(0, at, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, I64], ids=str)
def test_atomic_add_from_several_threads(library: Library, dtype: torch.dtype) -> None:
    """ctypes lets go of the interpreter lock, so the four calls race for the same three sums."""
    count = 200_000
    at, x, out = torch.arange(count) % 3, torch.ones(count, dtype=dtype), torch.zeros(3, dtype=dtype)
    scatter = library.handle[f"scatter_{str(dtype)[6:]}"]
    arguments = (pointer(out), pointer(at), pointer(x), ctypes.c_int64(count))
    threads = [threading.Thread(target=scatter, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(out, 4 * torch.bincount(at).to(dtype))
