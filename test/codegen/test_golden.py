"""Generated code, one small program per kind of kernel. Bless changes with EXPECTTEST_ACCEPT=1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expecttest
import torch
import torch.nn.functional as F

from altbackend.codegen.cpp import emit, print_cpp
from altbackend.codegen.host import cpu_program, launch_plan
from altbackend.config.resolve import resolve
from altbackend.ir.loops import Extern, show_program
from altbackend.schedule.kernel import show_kernel
from test.graphs import schedule, trace

ROOT = Path(__file__).parents[2]
CONFIG = resolve(None, {"parallel_threshold": 16})


def middle(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> str:
    """Loop IR and kernels of a function."""
    (gm,) = trace(fn, *inputs, dynamic=dynamic)
    s = schedule(gm, CONFIG)
    lines = [line for line in show_program(s.program).splitlines() if not line.startswith("    #")]
    return "\n".join([*lines, *(show_kernel(k).rstrip() for k in s.steps if not isinstance(k, Extern)), ""])


def source(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> str:
    """C++ of the kernels of a function."""
    (gm,) = trace(fn, *inputs, dynamic=dynamic)
    s = schedule(gm, CONFIG)
    functions = [emit.emit(s.program, k)[0] for k in s.steps if not isinstance(k, Extern)]
    return "\n".join(print_cpp.function(f, f"kernel{n}", CONFIG.parallel_threshold) for n, f in enumerate(functions))


def whole_host(fn: Callable[..., Any], *inputs: torch.Tensor) -> str:
    (gm,) = trace(fn, *inputs)
    s = schedule(gm, CONFIG)
    steps: list[launch_plan.Step] = []
    for n, k in enumerate(s.steps):
        if isinstance(k, Extern):
            steps.append(k)
        else:
            function, buffers = emit.emit(s.program, k)
            steps.append(launch_plan.Launch(f"kernel of step {n}", function, buffers, k.origins))
    return cpu_program.build(launch_plan.plan(s.program, s.deps, steps, CONFIG), CONFIG).python


def x(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes)


class TestGolden(expecttest.TestCase):
    maxDiff = None

    def test_pointwise_flat(self) -> None:
        self.assertExpectedInline(
            source(lambda a: a * 2 + 1, x(4, 8)),
            """\
static void kernel0(const float* __restrict p0, float* __restrict p1, const int max_threads) {
  const int threads = max_threads;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share_blocks(32, 64, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    #pragma omp simd
    for (int64_t i0 = begin; i0 < end; ++i0) {
      const float t0 = p0[i0];
      const float t1 = (t0 * 2.0f);
      const float t2 = (t1 + 1.0f);
      p1[i0] = t2;
    }
  }
}
""",
        )

    def test_pointwise_rows(self) -> None:
        self.assertExpectedInline(
            source(lambda a, b: a + b, x(4, 8), x(8)),
            """\
static void kernel0(const float* __restrict p0, const float* __restrict p1, float* __restrict p2, const int max_threads) {
  const int threads = max_threads;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share(4, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    for (int64_t o = begin; o < end; ++o) {
      #pragma omp simd
      for (int64_t i0 = 0; i0 < 8; ++i0) {
        const float t0 = p0[8 * o + i0];
        const float t1 = p1[i0];
        const float t2 = (t0 + t1);
        p2[8 * o + i0] = t2;
      }
    }
  }
}
""",  # noqa: E501
        )

    def test_low_precision(self) -> None:
        self.assertExpectedInline(
            source(lambda a: a * a + a, x(32).bfloat16()),
            """\
static void kernel0(const alt::bfloat16* __restrict p0, alt::bfloat16* __restrict p1, const int max_threads) {
  const int threads = max_threads;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share_blocks(32, 64, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    #pragma omp simd
    for (int64_t i0 = begin; i0 < end; ++i0) {
      const alt::bfloat16 t0 = p0[i0];
      const float t1 = alt::cast<float>(t0);
      const float t2 = (t1 * t1);
      const float t3 = (t2 + t1);
      const alt::bfloat16 t4 = alt::cast<alt::bfloat16>(t3);
      p1[i0] = t4;
    }
  }
}
""",
        )

    def test_row_chain(self) -> None:
        self.assertExpectedInline(
            middle(lambda a: F.softmax(a, 1) * 2, x(4, 8)),
            """\
input arg0_1: float32[4, 8] : (8, 1)
buffer buf1: float32[4, 1] : (1, 1)
  buf1[d0] = max(arg0_1[8*d0 + d1], over d1:8)  for d0:4
buffer buf2: float32[4, 8] : (8, 1)
  buf2[8*d0 + d1] = exp(sub(arg0_1[8*d0 + d1], buf1[d0]))  for d0:4, d1:8
buffer buf3: float32[4, 1] : (1, 1)
  buf3[d0] = sum(buf2[8*d0 + d1], over d1:8)  for d0:4
buffer buf4: float32[4, 8] : (8, 1)
  buf4[8*d0 + d1] = mul(truediv(buf2[8*d0 + d1], buf3[d0]), 2.0)  for d0:4, d1:8
return buf4[(4, 8) : (8, 1)]
kernel: 4 rows
  for i0:8
    buf1[o] = in_row max(i0) arg0_1[8*o + i0]  (scalar)
  for i0:8
    buf2[8*o + i0] = exp(sub(arg0_1[8*o + i0], buf1[o]))  (scratch)
    buf3[o] = in_row sum(i0) buf2[8*o + i0]  (scalar)
  for i0:8
    buf4[8*o + i0] = mul(truediv(buf2[8*o + i0], buf3[o]), 2.0)  (forward+global)
""",
        )
        self.assertExpectedInline(
            source(lambda a: F.softmax(a, 1) * 2, x(4, 8)),
            """\
static void kernel0(const float* __restrict p0, float* __restrict p1, const int max_threads) {
  const int threads = max_threads;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share(4, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    alignas(64) float w0[8];
    alignas(64) float v0[8];
    for (int64_t o = begin; o < end; ++o) {
      float r2 = -__builtin_inff();
      #pragma omp simd
      for (int64_t i0 = 0; i0 < 8; ++i0) {
        const float t1 = p0[8 * o + i0];
        v0[i0] = t1;
      }
      r2 = alt::maximum(r2, alt::row_max(v0, 8));
      const float t3 = r2;
      float r7 = 0.0f;
      #pragma omp simd
      for (int64_t i0 = 0; i0 < 8; ++i0) {
        const float t4 = p0[8 * o + i0];
        const float t5 = (t4 - t3);
        const float t6 = alt::exp(t5);
        w0[i0] = t6;
        v0[i0] = t6;
      }
      r7 = r7 + alt::row_sum(v0, 8);
      const float t8 = r7;
      const float t10 = alt::divisor_scale(t8);
      const float t11 = (t8 * t10);
      const float t12 = (float(1) / t11);
      #pragma omp simd
      for (int64_t i0 = 0; i0 < 8; ++i0) {
        const float t9 = w0[i0];
        const float t13 = alt::divide_by(t9, t10, t11, t12);
        const float t14 = (t13 * 2.0f);
        p1[8 * o + i0] = t14;
      }
    }
  }
}
""",
        )

    def test_column_sum(self) -> None:
        self.assertExpectedInline(
            source(lambda a: a.sum(0), x(8, 4)),
            """\
static void kernel0(float* __restrict p0, const float* __restrict p1, const int max_threads) {
  const int threads = max_threads;
  const int64_t a0_pitch = (4 + 15) / 8 * 8;
  alt::Heap<double> a0_heap(threads * a0_pitch); double* const a0_all = a0_heap.data;
  for (int64_t k = 0; k < threads * a0_pitch; ++k) a0_all[k] = 0.0;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share(8, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    double* const a0 = a0_all + thread * a0_pitch;
    for (int64_t o = begin; o < end; ++o) {
      #pragma omp simd
      for (int64_t i0 = 0; i0 < 4; ++i0) {
        const float t1 = p1[4 * o + i0];
        a0[i0] = a0[i0] + alt::cast<double>(t1);
      }
    }
  }
  for (int64_t i0 = 0; i0 < 4; ++i0) {
    double total = a0_all[i0];
    for (int t = 1; t < threads; ++t) total = total + a0_all[t * a0_pitch + i0];
    p0[i0] = total;
  }
}
""",
        )

    def test_full_reduction(self) -> None:
        self.assertExpectedInline(
            source(lambda a: a.exp().sum(), x(4, 8)),
            """\
static void kernel0(float* __restrict p0, const float* __restrict p1, const int max_threads) {
  const int threads = max_threads;
  const int64_t a0_pitch = (1 + 15) / 8 * 8;
  alt::Heap<double> a0_heap(threads * a0_pitch); double* const a0_all = a0_heap.data;
  for (int64_t k = 0; k < threads * a0_pitch; ++k) a0_all[k] = 0.0;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share_blocks(32, 64, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    double* const a0 = a0_all + thread * a0_pitch;
    float r3 = 0.0f;
    #pragma omp simd reduction(+: r3)
    for (int64_t i0 = begin; i0 < end; ++i0) {
      const float t1 = p1[i0];
      const float t2 = alt::exp(t1);
      r3 = r3 + t2;
    }
    a0[0] = a0[0] + alt::cast<double>(r3);
  }
   {
    double total = a0_all[0];
    for (int t = 1; t < threads; ++t) total = total + a0_all[t * a0_pitch + 0];
    p0[0] = total;
  }
}
""",
        )

    def test_scan(self) -> None:
        self.assertExpectedInline(
            source(lambda a: a.cumsum(1), x(4, 8)),
            """\
static void kernel0(const float* __restrict p0, float* __restrict p1, const int max_threads) {
  const int threads = max_threads;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share(4, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    for (int64_t o = begin; o < end; ++o) {
      double r1 = 0.0;
      for (int64_t i0 = 0; i0 < 8; ++i0) {
        const float t0 = p0[8 * o + i0];
        r1 = r1 + alt::cast<double>(t0);
        p1[8 * o + i0] = alt::cast<float>(r1);
      }
    }
  }
}
""",
        )

    def test_argmax(self) -> None:
        self.assertExpectedInline(
            source(lambda a: a.argmax(1), x(4, 8)),
            """\
static void kernel0(const float* __restrict p0, int64_t* __restrict p1, const int max_threads) {
  const int threads = max_threads;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share(4, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    alignas(64) float v0[8];
    for (int64_t o = begin; o < end; ++o) {
      float r1 = -__builtin_inff();
      #pragma omp simd
      for (int64_t i0 = 0; i0 < 8; ++i0) {
        const float t0 = p0[8 * o + i0];
        v0[i0] = t0;
      }
      r1 = alt::maximum(r1, alt::row_max(v0, 8));
      const float t2 = r1;
      int32_t r10 = int32_t(2147483647);
      #pragma omp simd reduction(alt_min: r10)
      for (int64_t i0 = 0; i0 < 8; ++i0) {
        const float t3 = p0[8 * o + i0];
        const bool t4 = bool((t3 == t2));
        const bool t5 = alt::isnan(t3);
        const bool t6 = bool((t4 | t5));
        const int64_t t7 = int64_t(i0);
        const int32_t t8 = alt::cast<int32_t>(t7);
        const int32_t t9 = (t6 ? t8 : int32_t(2147483647));
        r10 = alt::minimum(r10, t9);
      }
      const int32_t t11 = r10;
      const int64_t t12 = alt::cast<int64_t>(t11);
      p1[o] = t12;
    }
  }
}
""",
        )

    def test_masked_load(self) -> None:
        self.assertExpectedInline(
            source(lambda a: F.pad(a, (1, 1)), x(4, 8)),
            """\
static void kernel0(const float* __restrict p0, float* __restrict p1, const int max_threads) {
  const int threads = max_threads;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share(4, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    for (int64_t o = begin; o < end; ++o) {
      #pragma omp simd
      for (int64_t i0 = 0; i0 < 10; ++i0) {
        const int64_t t0 = int64_t(i0 - 1);
        const bool t1 = bool((t0 >= int64_t(0)));
        const bool t2 = bool((t0 < int64_t(8)));
        const bool t3 = bool((t1 & t2));
        const float t4 = (t3 ? p0[8 * o + i0 - 1] : 0.0f);
        p1[10 * o + i0] = t4;
      }
    }
  }
}
""",
        )

    def test_gather(self) -> None:
        self.assertExpectedInline(
            source(lambda a, i: a[i] * 2, x(5, 8), torch.zeros(3, dtype=torch.int64)),
            """\
static void kernel0(const int64_t* __restrict p0, const float* __restrict p1, float* __restrict p2, const int max_threads, int64_t* error) {
  const int threads = max_threads;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share(3, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    for (int64_t o = begin; o < end; ++o) {
      const int64_t t0 = p0[o];
      const int64_t t1 = alt::wrap_index(t0, 5, error);
      #pragma omp simd
      for (int64_t i0 = 0; i0 < 8; ++i0) {
        const float t2 = p1[8 * t1 + i0];
        const float t3 = (t2 * 2.0f);
        p2[8 * o + i0] = t3;
      }
    }
  }
}
""",  # noqa: E501
        )

    def test_dynamic_size(self) -> None:
        self.assertExpectedInline(
            middle(lambda a: a.sum(1) + a.shape[0], x(4, 8), dynamic=True),
            """\
input s97
input s98
input arg2_1: float32[s97, s98] : (s98, 1)
buffer buf1: float32[s97, 1] : (1, 1)
  buf1[d0] = sum(arg2_1[d0*s98 + d1], over d1:s98)  for d0:s97
buffer buf2: float32[s97] : (1)
  buf2[d0] = add(buf1[d0], float32(index(s97)))  for d0:s97
return buf2[(s97) : (1)]
kernel: s97 rows
  for i0:s98
    buf1[o] = in_row sum(i0) arg2_1[i0 + o*s98]  (scalar)
  for once
    buf2[o] = add(buf1[o], float32(index(s97)))  (scalar+global)
""",
        )
        self.assertExpectedInline(
            source(lambda a: a.sum(1) + a.shape[0], x(4, 8), dynamic=True),
            """\
static void kernel0(const float* __restrict p0, float* __restrict p1, const int64_t s97, const int64_t s98, const int max_threads) {
  const int threads = 2 * s97 + 2 * s97 * s98 >= 16 ? max_threads : 1;
  #pragma omp parallel num_threads(threads) if (threads > 1)
   {
    const int thread = omp_get_thread_num();
    const alt::Share range = alt::share(s97, thread, omp_get_num_threads());
    const int64_t begin = range.begin, end = range.end;
    alignas(64) float v0[256];
    if (s98 < 32) {
      #pragma omp simd
      for (int64_t o = begin; o < end; ++o) {
        double r1 = 0.0;
        float r2 = 0.0f;
        for (int64_t i0 = 0; i0 < s98; ++i0) {
          const float t0 = p0[i0 + o * s98];
          r2 = r2 + t0;
        }
        r1 = r1 + alt::cast<double>(r2);
        const float t3 = alt::cast<float>(r1);
        const int64_t t4 = int64_t(s97);
        const float t5 = alt::cast<float>(t4);
        const float t6 = (t3 + t5);
        p1[o] = t6;
      }
    } else {
      for (int64_t o = begin; o < end; ++o) {
        double r1 = 0.0;
        for (int64_t block = 0; block < s98; block += 256) {
          const int64_t block_end = alt::min64(block + 256, s98);
          float r2 = 0.0f;
          #pragma omp simd
          for (int64_t i0 = block; i0 < block_end; ++i0) {
            const float t0 = p0[i0 + o * s98];
            v0[-block + i0] = t0;
          }
          r2 = r2 + alt::row_sum(v0, -block + block_end);
          r1 = r1 + alt::cast<double>(r2);
        }
        const float t3 = alt::cast<float>(r1);
        const int64_t t4 = int64_t(s97);
        const float t5 = alt::cast<float>(t4);
        const float t6 = (t3 + t5);
        p1[o] = t6;
      }
    }
  }
}
""",  # noqa: E501
        )

    def test_host(self) -> None:
        text = whole_host(lambda a, b: torch.softmax((a @ b).relu(), 1).sum(0), x(4, 8), x(8, 6))
        # source lines of this file would change with every golden above
        text = re.sub(r" \| .*", "", text[: text.index("SOURCE = ")])
        self.assertExpectedInline(
            text,
            """\
import torch
from altbackend.runtime.host import Workspaces, check_error, empty_cpu, ensure_strides, view


def layout():
    \"\"\"Temporaries as (slots, bytes, first step, last step); windows on them for library calls.\"\"\"
    blocks = [
        ((0,), 96, 0, 1),  # buf2
    ]
    windows = [
        (0, torch.float32, (4, 6), (6, 1), 0),  # buf2
    ]
    return blocks, windows


def bind(library, const, num_threads):
    spaces = Workspaces(layout, 2, {}, True, True)
    spaces.constants = const  # the workspaces hold their addresses
    spare = spaces.spare
    segment0 = library.fn('segment0')
    op_mm_out = torch.mm

    def call(args):
        arg0_1, arg1_1 = args
        args.clear()
        try:
            ws = spare.pop()
        except IndexError:
            ws = spaces.make()
        P, S, V, E = ws.pointers, ws.scalars, ws.views, ws.error_pointer
        threads = num_threads()
        op_mm_out(arg0_1, arg1_1, out=V[0])  # mm
        del arg0_1, arg1_1
        buf7 = empty_cpu((1, 6), (6, 1), torch.float32)
        P[1] = buf7.data_ptr()
        # kernel of step 1: relu, _softmax, sum_1
        segment0(P, S, threads, E)
        if len(spare) < 4:
            spare.append(ws)
        return (view(buf7, (6,), (1,), 0),)

    call.release = spaces.release  # for a program in C++ that takes over
    return call


""",
        )


def test_host_file_runs_as_a_program(tmp_path: Path) -> None:
    """`python host.py` builds its kernels, runs on random inputs and prints a time."""
    file = tmp_path / "host.py"
    file.write_text(whole_host(lambda a, b: torch.softmax((a @ b).relu(), 1).sum(0), x(4, 8), x(8, 6)))
    done = subprocess.run(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("ms a call")
    assert float(done.stdout.split()[0]) > 0
