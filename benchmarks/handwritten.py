"""python -m benchmarks.handwritten: the norm chain by hand in C++, against eager and the compiled form.

4 x (LayerNorm -> GELU * sigmoid -> softmax -> residual) on 2048 x 768 float32. The kernel keeps one row in
two buffers on the stack and walks it in five vector loops a layer. All three run alternately in one process;
`--backend` takes any torch.compile backend.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from altbackend.compile_pool import cpp
from altbackend.config.options import Config
from benchmarks.cases import SUITES

SOURCE = r"""
#include <altbackend/kernel.h>

template <int n> static void layer(float* x, float* y, const float* weight, const float* bias) {
  float sum = 0.0f;
  #pragma omp simd reduction(+: sum)
  for (int j = 0; j < n; ++j) sum += x[j];
  const float mean = sum / n;
  float squares = 0.0f;
  #pragma omp simd reduction(+: squares)
  for (int j = 0; j < n; ++j) squares += (x[j] - mean) * (x[j] - mean);
  const float scale = alt::rsqrt(squares / n + 1e-5f);
  float top = -__builtin_inff();
  #pragma omp simd reduction(alt_max: top)
  for (int j = 0; j < n; ++j) {
    const float v = (x[j] - mean) * scale * weight[j] + bias[j];
    const float w = v * 0.5f * (alt::erf(v * 0.70710678f) + 1.0f) * alt::sigmoid(v);
    y[j] = w;
    top = alt::maximum(top, w);
  }
  float total = 0.0f;
  #pragma omp simd reduction(+: total)
  for (int j = 0; j < n; ++j) {
    y[j] = alt::exp(y[j] - top);
    total += y[j];
  }
  #pragma omp simd
  for (int j = 0; j < n; ++j) x[j] += y[j] / total;
}

extern "C" __attribute__((visibility("default")))
void chain(const float* in, float* out, const float* const* weights, const float* const* biases, int64_t rows,
           int threads) {
  constexpr int n = 768;
  #pragma omp parallel num_threads(threads)
  {
    const alt::Share mine = alt::share(rows, omp_get_thread_num(), omp_get_num_threads());
    alignas(64) float x[n], y[n];
    for (int64_t o = mine.begin; o < mine.end; ++o) {
      for (int j = 0; j < n; ++j) x[j] = in[o * n + j];
      for (int k = 0; k < 4; ++k) layer<n>(x, y, weights[k], biases[k]);
      for (int j = 0; j < n; ++j) out[o * n + j] = x[j];
    }
  }
}
"""


def hand(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """The hand-written kernel bound to the LayerNorm weights of `model`, four of width 768."""
    with tempfile.TemporaryDirectory() as folder:
        dll = cpp.load(SOURCE, Config(cache_dir=folder)).dll
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    if len(norms) != 4 or any(m.normalized_shape != (768,) for m in norms):
        raise ValueError("the hand-written kernel is for four LayerNorms of width 768")
    table = ctypes.c_void_p * 4
    weights, biases = table(*(m.weight.data_ptr() for m in norms)), table(*(m.bias.data_ptr() for m in norms))
    threads = torch.get_num_threads()

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        dll.chain(*pointers, weights, biases, ctypes.c_int64(x.shape[0]), threads)
        return out

    return run


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.handwritten")
    p.add_argument("--backend", default="alt")
    p.add_argument("--reps", type=int, default=60)
    args = p.parse_args()
    case = next(c for c in SUITES["models"] if c.name == "norm_chain")
    model, inputs, _ = case.build("cpu")
    model = model.eval()
    (x,) = inputs
    with torch.no_grad():
        calls: dict[str, Callable[..., Any]] = {
            "eager": model,
            "hand": hand(model),
            args.backend: torch.compile(model, backend=args.backend),
        }
        want = model(x)
        errors = {name: float((f(x) - want).norm() / want.norm()) for name, f in calls.items()}
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.reps):
            for name, f in calls.items():
                start = time.perf_counter()
                f(x)
                spent[name].append(time.perf_counter() - start)
    for name, times in spent.items():
        ratio = median(times) / median(spent["hand"])
        print(f"{name:10} {median(times) * 1e3:8.2f} ms  {ratio:5.2f} x hand  error {errors[name]:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
