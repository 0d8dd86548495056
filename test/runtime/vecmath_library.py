"""Builds loops over the functions of <altbackend/cpu.h> into shared libraries and calls them on tensors."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
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

    def source(self) -> str:
        letters = "abc"[: len(self.inputs)]
        types = [CPP_TYPE[dtype] for dtype in self.inputs]
        parameters = "".join(f"const {t}* __restrict p{x}, " for t, x in zip(types, letters, strict=True))
        values = " ".join(f"const {t} {x} = p{x}[i];" for t, x in zip(types, letters, strict=True))
        out = CPP_TYPE[self.output]
        return (
            f'extern "C" __attribute__((visibility("default"))) void {self.name}({parameters}{out}* __restrict out, '
            f"int64_t n) {{\n#pragma omp simd\n"
            f"  for (int64_t i = 0; i < n; ++i) {{ {values} out[i] = {self.expression}; }}\n}}\n"
        )


def unary(name: str, dtype: torch.dtype, output: torch.dtype | None = None) -> Loop:
    return Loop(f"{name}_{str(dtype)[6:]}", f"alt::{name}(a)", (dtype,), output or dtype)


def binary(name: str, dtype: torch.dtype) -> Loop:
    return Loop(f"{name}_{str(dtype)[6:]}", f"alt::{name}(a, b)", (dtype, dtype), dtype)


@dataclass
class Library:
    """Loaded loops of one instruction set."""

    handle: ctypes.CDLL
    loops: dict[str, Loop] = field(default_factory=dict)

    def __call__(self, name: str, *inputs: Tensor) -> Tensor:
        loop = self.loops[name]
        assert tuple(x.dtype for x in inputs) == loop.inputs
        inputs = tuple(x.contiguous() for x in inputs)
        out = torch.empty(inputs[0].shape, dtype=loop.output)
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*inputs, out)]
        self.handle[name](*pointers, ctypes.c_int64(out.numel()))
        return out


def compile_shared(source: str, isa: Isa | None, folder: Path, *extra: str) -> tuple[Path, str]:
    """The shared object of `source` and what the compiler printed."""
    folder.mkdir(parents=True, exist_ok=True)
    text, shared = folder / "kernel.cpp", folder / "kernel.so"
    text.write_text("#include <altbackend/cpu.h>\n" + source)
    command = ["g++", *flags(isa), "-Wall", "-Wextra", "-Werror", "-fopenmp-simd", f"-I{INCLUDE_DIR}", "-shared", *extra]
    done = subprocess.run([*command, str(text), "-o", str(shared)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"g++ failed:\n{done.stderr[:4000]}")
    return shared, done.stderr


def build(loops: Sequence[Loop], isa: Isa | None, folder: Path) -> Library:
    shared, _ = compile_shared("".join(loop.source() for loop in loops), isa, folder)
    return Library(ctypes.CDLL(str(shared)), {loop.name: loop for loop in loops})


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
