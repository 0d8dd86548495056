"""Time the vector math of generated CPU kernels on arrays that stay in L1, against calls of the C library.

    python benchmarks/vecmath.py [--isa avx512|avx2|generic] [--dtype float|double] [function ...]

One line per function: nanoseconds per element, those of a loop of scalar libm calls, their ratio, and whether the
compiler vectorised the loop. Best of several runs; the machine should be idle.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from altbackend.runtime.isa import INCLUDE_DIR, ISAS, flags

ELEMENTS = 4096
REPEATS = 20_000
UNARY = {
    "exp": (-10, 10), "exp2": (-10, 10), "expm1": (-10, 10), "log": (0, 10), "log2": (0, 10), "log10": (0, 10),
    "log1p": (0, 10), "tanh": (-5, 5), "sigmoid": (-10, 10), "erf": (-4, 4), "erfc": (-4, 4), "sin": (-10, 10),
    "cos": (-10, 10), "tan": (-10, 10), "asin": (-1, 1), "acos": (-1, 1), "atan": (-5, 5), "sinh": (-5, 5),
    "cosh": (-5, 5), "asinh": (-5, 5), "acosh": (1, 5), "atanh": (-1, 1), "sqrt": (0, 5), "rsqrt": (0, 5),
    "reciprocal": (1, 5), "floor": (-5, 5), "round": (-5, 5), "lgamma": (0, 5), "digamma": (0, 5),
    "erfinv": (-1, 1), "i0": (-9, 9), "i0e": (-9, 9), "i1": (-9, 9), "i1e": (-9, 9),
}  # fmt: skip
BINARY = {
    "pow": (0, 5), "atan2": (-5, 5), "hypot": (-5, 5), "fmod": (-5, 5), "remainder": (-5, 5),
    "floor_divide": (-5, 5), "maximum": (-5, 5), "logaddexp": (-5, 5), "xlogy": (0, 5), "nextafter": (0, 5),
}  # fmt: skip
LIBM = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "erf", "erfc", "sin", "cos", "tan", "asin",
    "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sqrt", "floor", "lgamma", "pow", "atan2", "hypot",
    "fmod", "nextafter",
}  # fmt: skip
# Functions the C library lacks are set against the costliest call within them.
LIBM_AS = {"round": "rint", "sigmoid": "exp", "rsqrt": "sqrt", "logaddexp": "log1p", "maximum": "fmax"}


@dataclass(frozen=True)
class Timing:
    """Nanoseconds per element of one function, ours and the C library's (None where it has none)."""

    name: str
    ours: float
    libm: float | None
    vectorised: bool


def source(name: str, dtype: str, bounds: tuple[float, float], two: bool) -> str:
    """A program text with `ours`, `libm` (through a volatile pointer, so one call per element) and a timer."""
    libm = LIBM_AS.get(name, name if name in LIBM else "")
    suffix = "f" if dtype == "float" else ""
    arguments = "x[i], y[i]" if two else "x[i]"
    two_libm = libm in {"pow", "atan2", "hypot", "fmod", "nextafter", "fmax"}
    libm_arguments, libm_types = ("x[i], y[i]", f"{dtype}, {dtype}") if two_libm else ("x[i]", dtype)
    declare = f'extern "C" {dtype} {libm}{suffix}({libm_types}) noexcept;' if libm else ""
    call = f"{dtype} (*volatile f)({libm_types}) = {libm}{suffix};" if libm else ""
    body = f"auto g = f; for (long i = 0; i < n; ++i) out[i] = g({libm_arguments});" if libm else ""
    return f"""
#include <altbackend/cpu.h>
#include <time.h>
{declare}
{call}
static double now() {{ timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }}
static __attribute__((noinline)) void ours(const {dtype}* __restrict x, const {dtype}* __restrict y,
                                           {dtype}* __restrict out, long n) {{
  (void)y;
#pragma omp simd
  for (long i = 0; i < n; ++i) out[i] = alt::{name}({arguments});  // LOOP
}}
static __attribute__((noinline)) void libm_loop(const {dtype}* x, const {dtype}* y, {dtype}* out, long n) {{
  (void)x; (void)y; (void)out; (void)n;
  {body}
}}
static {dtype} x[{ELEMENTS}], y[{ELEMENTS}], out[{ELEMENTS}];
extern "C" __attribute__((visibility("default"))) double measure(int which, long repeats) {{
  for (long i = 0; i < {ELEMENTS}; ++i) {{
    x[i] = {dtype}({bounds[0]} + ({bounds[1]} - ({bounds[0]})) * alt::rand_uniform(1, i));
    y[i] = {dtype}(0.5 + alt::rand_uniform(2, i));
  }}
  double best = 1e30;
  for (int trial = 0; trial < 5; ++trial) {{
    const double start = now();
    for (long r = 0; r < repeats; ++r) {{
      (which ? libm_loop : ours)(x, y, out, {ELEMENTS});
      __asm__ volatile("" ::: "memory");
    }}
    const double each = (now() - start) / (double(repeats) * {ELEMENTS});
    best = each < best ? each : best;
  }}
  return best;
}}
"""


def measure(name: str, dtype: str, target: tuple[str, ...], folder: Path) -> Timing:
    two = name in BINARY
    text, shared = folder / f"{name}.cpp", folder / f"{name}.so"
    text.write_text(source(name, dtype, BINARY[name] if two else UNARY[name], two))
    command = ["g++", *target, "-fopenmp-simd", f"-I{INCLUDE_DIR}", "-shared", "-fopt-info-vec"]
    command += [str(text), "-o", str(shared)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(i for i, t in enumerate(text.read_text().splitlines(), 1) if t.endswith("// LOOP"))
    vectorised = re.search(rf"{name}\.cpp:{line}:\d+: optimized: loop vectorized", done.stderr) is not None
    timer = ctypes.CDLL(str(shared)).measure
    timer.restype, timer.argtypes = ctypes.c_double, [ctypes.c_int, ctypes.c_long]
    has_libm = name in LIBM or name in LIBM_AS
    ours = timer(0, REPEATS // 10)
    return Timing(name, ours, timer(1, REPEATS // 40) if has_libm else None, vectorised)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("functions", nargs="*")
    parser.add_argument("--isa", choices=ISAS)
    parser.add_argument("--dtype", choices=("float", "double"), default="float")
    options = parser.parse_args()
    print(f"{'function':14}{'ns/element':>12}{'libm ns':>10}{'ratio':>8}  vectorised")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.functions or [*UNARY, *BINARY]:
            t = measure(name, options.dtype, flags(options.isa), Path(folder))
            libm, ratio = (f"{t.libm:.3f}", f"{t.libm / t.ours:.1f}") if t.libm else ("-", "-")
            print(f"{t.name:14}{t.ours:12.3f}{libm:>10}{ratio:>8}  {'yes' if t.vectorised else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
