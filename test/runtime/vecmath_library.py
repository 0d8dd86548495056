"""Builds loops over the functions of <altbackend/cpu.h> into shared libraries and calls them on tensors."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from altbackend.runtime.isa import INCLUDE_DIR, Isa, detect, flags

RUNNABLE: dict[Isa, tuple[Isa, ...]] = {
    "avx512": ("generic", "avx2", "avx512"),
    "avx2": ("generic", "avx2"),
    "generic": ("generic",),
}
HERE: tuple[Isa, ...] = RUNNABLE[detect()]
CPP_TYPE = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
    torch.bfloat16: "alt::bfloat16",
    torch.float16: "alt::half",
    torch.float8_e4m3fn: "alt::float8_e4m3fn",
    torch.float8_e5m2: "alt::float8_e5m2",
}


@dataclass(frozen=True)
class Loop:
    """out[i] = expression of inputs a[i], b[i], c[i] and the index i."""

    name: str
    expression: str
    inputs: tuple[torch.dtype, ...]
    output: torch.dtype

    def body(self) -> str:
        values = " ".join(f"const auto {x} = p{x}[i];" for x in "abc"[: len(self.inputs)])
        return f"  for (int64_t i = 0; i < n; ++i) {{ {values} out[i] = {self.expression}; }}  // {self.name}"

    def source(self) -> str:
        types = [CPP_TYPE[dtype] for dtype in self.inputs]
        parameters = "".join(f"const {t}* __restrict p{x}, " for t, x in zip(types, "abc", strict=False))
        return (
            f'extern "C" __attribute__((visibility("default"))) void {self.name}({parameters}'
            f"{CPP_TYPE[self.output]}* __restrict out, int64_t n) {{\n#pragma omp simd\n{self.body()}\n}}\n"
        )


def unary(name: str, dtype: torch.dtype, output: torch.dtype | None = None) -> Loop:
    return Loop(f"{name}_{str(dtype)[6:]}", f"alt::{name}(a)", (dtype,), output or dtype)


def binary(name: str, dtype: torch.dtype) -> Loop:
    return Loop(f"{name}_{str(dtype)[6:]}", f"alt::{name}(a, b)", (dtype, dtype), dtype)


@dataclass
class Library:
    """Loaded loops of one instruction set."""

    handle: ctypes.CDLL
    loops: dict[str, Loop]
    vectorised: frozenset[str]
    vectorised_lines: frozenset[str]

    def __call__(self, name: str, *inputs: Tensor) -> Tensor:
        loop = self.loops[name]
        assert tuple(x.dtype for x in inputs) == loop.inputs
        inputs = tuple(x.contiguous() for x in inputs)
        out = torch.empty(inputs[0].shape, dtype=loop.output)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*inputs, out)]
        self.handle[name](*pointers, ctypes.c_int64(out.numel()))
        return out


def torch_saturates_e4m3fn() -> bool:
    return bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float() == 448)


def build(loops: Sequence[Loop], isa: Isa | None, folder: Path, prelude: str = "") -> Library:
    """Compile with warnings as errors, load, and note which loops g++ says that it vectorised."""
    text, shared = folder / "kernel.cpp", folder / "kernel.so"
    text.write_text("\n".join(["#include <altbackend/cpu.h>", prelude, *(loop.source() for loop in loops)]))
    command = ["g++", *flags(isa), "-fopenmp-simd", f"-I{INCLUDE_DIR}", "-shared", "-Wall", "-Wextra", "-Werror"]
    command += [f"-DALT_E4M3FN_SATURATE={int(torch_saturates_e4m3fn())}"]
    command += ["-fno-ipa-icf"]  # or of two equal loops one is only called from the other
    command += ["-fopt-info-vec", str(text), "-o", str(shared)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"g++ failed:\n{done.stderr[:4000]}")
    numbers = {int(n) for n in re.findall(r"kernel\.cpp:(\d+):\d+: optimized: loop vectorized", done.stderr)}
    lines = frozenset(line for n, line in enumerate(text.read_text().splitlines(), 1) if n in numbers)
    vectorised = frozenset(loop.name for loop in loops if loop.body() in lines)
    return Library(ctypes.CDLL(str(shared)), {loop.name: loop for loop in loops}, vectorised, lines)


def ulp_error(got: Tensor, exact: Tensor) -> Tensor:
    """|got - exact| in units in the last place of got's dtype at `exact` (float64); NaN against NaN is 0.

    What overflows counts as 2^(largest exponent + 1); an infinite error is a difference of kind.
    """
    info = torch.finfo(got.dtype)
    digits = {torch.float32: 24, torch.float64: 53}[got.dtype]
    limit = 2.0**128 if got.dtype == torch.float32 else torch.finfo(torch.float64).max
    g, e = got.double().clamp(-limit, limit), exact.clamp(-limit, limit)
    exponent = torch.frexp(e.abs().clamp_min(info.smallest_normal))[1]
    error = torch.ldexp((g - e).abs(), digits - exponent)
    error = torch.where(torch.isnan(g) | torch.isnan(e), torch.inf, error)
    return torch.where(torch.isnan(g) & torch.isnan(e), 0.0, error)


def random_bits(count: int, seed: int) -> Tensor:
    """float32 of random bits: every exponent, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def uniform(count: int, low: float, high: float, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64).mul_(high - low).add_(low).to(dtype)


def same_bits(got: Tensor, expected: Tensor) -> Tensor:
    """Per element: equal including the sign of zero, or both NaN."""
    both_nan = torch.isnan(got) & torch.isnan(expected)
    return both_nan | ((got == expected) & (torch.signbit(got) == torch.signbit(expected)))
