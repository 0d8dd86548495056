"""Random operators inside kernels: what is generated. Bless changes with EXPECTTEST_ACCEPT=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F

from altbackend.codegen.cpp import emit, print_cpp
from altbackend.codegen.host import cpu_program, launch_plan
from altbackend.config.resolve import resolve
from altbackend.ir.loops import Extern
from altbackend.schedule.kernel import Kernel
from test import seeded, triton_run
from test.graphs import Scheduled


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.gelu(x), 0.1) + w


def only_kernel(s: Scheduled) -> tuple[Kernel, Extern]:
    (call,) = [k for k in s.steps if isinstance(k, Extern)]
    (kernel,) = [k for k in s.steps if not isinstance(k, Extern)]
    return kernel, call


class TestRandomGolden(expecttest.TestCase):
    maxDiff = None

    def test_gelu_dropout_residual_is_one_triton_kernel(self) -> None:
        (s,) = seeded.scheduled(block, torch.ones(8, 100), torch.ones(8, 100), ctx=seeded.GPU)
        kernel, call = only_kernel(s)
        assert call.target.__name__ == "philox_seeds"
        source = triton_run.emit(s.program, kernel, seeded.GPU)[0].source
        self.assertExpectedInline(
            source[source.index("def kernel(") :],
            """\
def kernel(in0, in1, in2, out0, XBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)
    xmask = x < 800
    # gelu.default, philox_uniform, ge.Scalar, mul.Tensor, add.Tensor
    t0 = tl.load(in0 + x, mask=xmask, other=0.0)
    t1 = (t0 * 0.5)
    t2 = (t0 * 0.70710677)
    t3 = (1.0 + libdevice.erf(t2))
    t4 = (t1 * t3)
    xq = program * XBLOCK // 4 + tl.arange(0, XBLOCK // 4)
    t5 = tl.load(in1)
    t6 = philox_uniform_quads(t5, tl.cast(xq, tl.int64))
    t7 = (t6 >= 0.1)
    t8 = tl.cast(t7, tl.float32)
    t9 = (t4 * t8)
    t10 = (t9 * 1.1111112)
    t11 = tl.load(in2 + x, mask=xmask, other=0.0)
    t12 = (t10 + t11)
    tl.store(out0 + x, t12, mask=xmask)
""",
        )

    def test_gelu_dropout_residual_is_one_cpp_kernel(self) -> None:
        (s,) = seeded.scheduled(block, torch.ones(8, 100), torch.ones(8, 100))
        kernel, _ = only_kernel(s)
        text = print_cpp.function(emit.emit(s.program, kernel)[0], "kernel", 1)
        self.assertExpectedInline(
            text[text.index("#pragma omp simd") :],
            """\
#pragma omp simd
    for (int64_t i0 = begin; i0 < end; ++i0) {
      const float t0 = p0[i0];
      const float t1 = (t0 * 0.5f);
      const float t2 = (t0 * 0.70710677f);
      const float t3 = alt::one_plus_erf(t2);
      const float t4 = (t1 * t3);
      const int64_t t6 = int64_t(i0);
      const float t7 = alt::philox_uniform(t5, t6);
      const bool t8 = bool((t7 >= 0.1f));
      const float t9 = alt::cast<float>(t8);
      const float t10 = (t4 * t9);
      const float t11 = (t10 * 1.1111112f);
      const float t12 = p2[i0];
      const float t13 = (t11 + t12);
      p3[i0] = t13;
    }
  }
}
""",
        )


@pytest.mark.parametrize("ctx", [None, seeded.GPU])
def test_training_takes_one_kernel_each_way_and_keeps_the_mask(ctx: Any) -> None:
    x = torch.ones(8, 100, requires_grad=True)
    forward, backward = seeded.scheduled(block, x, torch.ones(8, 100), ctx=ctx)
    assert (forward.kernels, forward.calls) == (1, 1)
    assert (backward.kernels, backward.calls) == (1, 0)
    input_dtypes = [b.dtype for b in backward.program.buffers.values() if b.kind == "input"]
    assert input_dtypes.count(torch.bool) == 1


def test_layers_with_dropout_share_their_kernel() -> None:
    def layers(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
        for w in ws:
            x = block(x, x) @ w
        return x

    (s,) = seeded.scheduled(layers, torch.ones(8, 64), *([torch.ones(64, 64)] * 4), ctx=seeded.GPU)
    sources = {triton_run.emit(s.program, k, seeded.GPU)[0].source for k in s.steps if not isinstance(k, Extern)}
    assert s.kernels == 4
    assert len(sources) == 1


def test_the_host_file_of_a_graph_with_dropout_runs_as_a_program(tmp_path: Path) -> None:
    (s,) = seeded.scheduled(block, torch.ones(8, 100), torch.ones(8, 100))
    (call, kernel), cfg = s.steps, resolve()
    function, buffers = emit.emit(s.program, kernel)
    steps = [call, launch_plan.Launch("kernel", function, buffers, kernel.origins)]
    file = tmp_path / "host.py"
    file.write_text(cpu_program.build(launch_plan.plan(s.program, s.deps, steps, cfg), cfg).python)
    done = subprocess.run(
        [sys.executable, str(file)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("ms a call")
