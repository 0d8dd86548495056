"""Generated Triton, one small program per form of kernel. Bless changes with EXPECTTEST_ACCEPT=1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import expecttest
import torch
import torch.nn.functional as F

from altbackend.codegen.triton.print_triton import TritonKernel
from altbackend.ir import expr as ex
from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from test import triton_run
from test.graphs import schedule, trace

GPU = ScheduleContext(H200)


def source(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False, ctx: ScheduleContext = GPU) -> str:
    """The kernels of a function, without what every module starts with, and how each is launched."""
    (gm,) = trace(fn, *inputs, dynamic=dynamic)
    s = schedule(gm, None, ctx)
    kernels = [triton_run.emit(s.program, k, ctx)[0] for k in s.steps if not isinstance(k, Extern)]
    return "\n".join(show(k) + "".join(show(f.kernel, f.arguments) for f in k.finish) for k in kernels)


def show(k: TritonKernel, arguments: tuple[str, ...] = ()) -> str:
    blocks = ", ".join(f"{n}={v}" for n, v in k.constexprs.items())
    head = f"# grid {ex.show(k.grid[0])}, {blocks}, {k.num_warps} warps" + (f", on {arguments}" if arguments else "")
    return f"{head}\n{k.source[k.source.index('def kernel(') :]}"


def r(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes)


def norm_backward(g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor) -> Any:
    """A layer norm's gradients, of its input and of what multiplies and is added."""
    x = (x - mean) * rstd
    scaled = g * w
    inner = scaled - scaled.mean(-1, keepdim=True) - x * (scaled * x).mean(-1, keepdim=True)
    return inner * rstd, (g * x).sum(0), g.sum(0)


def test_totals_over_rows_fill_the_device_once_and_few_columns_are_shared_by_many_programs() -> None:
    def heads(rows: int, columns: int) -> list[str]:
        text = source(norm_backward, *(r(*s) for s in [(rows, columns)] * 2 + [(rows, 1)] * 2 + [(columns,)]))
        return [line.partition(", on")[0] for line in text.splitlines() if line.startswith("# grid")]

    # 132 multiprocessors; 7 numbers alive for each of 16 elements, so 6 such programs a multiprocessor at most
    assert heads(8192, 768) == ["# grid 792, RBLOCK=1024, 2 warps", "# grid 96, XBLOCK=8, RBLOCK=1024, 4 warps"]
    # a program with fewer than four rows would leave as much behind as it reads
    assert heads(512, 768) == ["# grid 264, RBLOCK=1024, 2 warps", "# grid 96, XBLOCK=8, RBLOCK=512, 4 warps"]
    assert heads(65536, 96)[0] == "# grid 264, XBLOCK=32, RBLOCK=128, 8 warps"


def test_operands_that_many_rows_share_are_not_loaded_ahead() -> None:
    def fn(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return F.softmax(x - mean, -1).square().sum()

    own, shared = (source(fn, r(8, 6400, 64), r(8, n, 64)) for n in (6400, 1))
    assert "num_stages" in own
    assert "num_stages" not in shared


class TestTritonGolden(expecttest.TestCase):
    maxDiff = None

    def test_pointwise(self) -> None:
        self.assertExpectedInline(
            source(lambda a, b: a * 2 + b, r(40, 100), r(100)),
            """\
# grid 32, XBLOCK=128, 1 warps
def kernel(in0, in1, out0, XBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)
    xmask = x < 4000
    # mul.Tensor, add.Tensor
    t0 = tl.load(in0 + x, mask=xmask, other=0.0)
    t1 = (t0 * 2.0)
    t2 = tl.load(in1 + ((x % 100)), mask=xmask, other=0.0)
    t3 = (t1 + t2)
    tl.store(out0 + x, t3, mask=xmask)
""",
        )

    def test_rows_in_registers(self) -> None:
        self.assertExpectedInline(
            source(lambda x: torch.softmax(x.bfloat16(), -1), r(8, 100)),
            """\
# grid 8, RBLOCK=128, 1 warps
def kernel(in0, out0, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program
    r0 = tl.arange(0, RBLOCK)
    r0mask = r0 < 100
    # _to_copy.default, _softmax.default
    t0 = tl.load(in0 + (x * 100 + r0), mask=r0mask, other=0.0)
    t1 = tl.cast(t0, tl.bfloat16)
    t2 = tl.cast(t1, tl.float32)
    t3 = tl.where(r0mask, t2, float("-inf"))
    total0 = tl.reduce(t3, 0, largest, keep_dims=False)
    # _to_copy.default, _softmax.default
    t4 = (t2 - total0)
    t5 = tl.exp(t4)
    t6 = tl.where(r0mask, t5, 0.0)
    total1 = tl.sum(t6, 0, keep_dims=False)
    # _to_copy.default, _softmax.default
    t7 = (t5 / total1)
    t8 = tl.cast(t7, tl.bfloat16)
    tl.store(out0 + (x * 100 + r0), t8, mask=r0mask)
""",
        )

    def test_rows_in_blocks(self) -> None:
        self.assertExpectedInline(
            source(lambda x: x / x.sum(-1, keepdim=True), r(200, 20000)),
            """\
# grid 200, RBLOCK=8192, 8 warps
def kernel(in0, out0, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program
    sum0 = tl.full([RBLOCK], 0.0, tl.float32)
    for base in range(0, 20000, RBLOCK):
        r0 = base + tl.arange(0, RBLOCK)
        r0mask = r0 < 20000
        # sum.dim_IntList
        t0 = tl.load(in0 + (x * 20000 + r0), mask=r0mask, other=0.0)
        sum0 = sum0 + t0
    total0 = tl.sum(sum0, 0, keep_dims=False)
    for base in range(0, 20000, RBLOCK):
        r0 = base + tl.arange(0, RBLOCK)
        r0mask = r0 < 20000
        # div.Tensor
        t1 = tl.load(in0 + (x * 20000 + r0), mask=r0mask, other=0.0, eviction_policy="evict_first")
        t2 = quotient(t1, total0)
        tl.store(out0 + (x * 20000 + r0), t2, mask=r0mask)
""",
        )

    def test_what_all_columns_read_has_one_dimension(self) -> None:
        self.assertExpectedInline(
            source(lambda x, b: (x + b).amax(1), r(4, 40, 4096), r(40, 1)),
            """\
# grid 256, XBLOCK=64, RBLOCK=64, 4 warps
def kernel(in0, in1, out0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    r0 = tl.arange(0, RBLOCK)[None, :]
    r0mask = r0 < 40
    # add.Tensor, amax.default
    t0 = tl.load(in0 + ((x // 4096) * 163840 + r0 * 4096 + (x % 4096)), mask=r0mask, other=0.0)
    t1 = tl.load(in1 + tl.reshape(r0, [RBLOCK]), mask=tl.reshape(r0mask, [RBLOCK]), other=0.0)[None, :]
    t2 = (t0 + t1)
    t3 = tl.where(r0mask, t2, float("-inf"))
    total0 = tl.reduce(t3, 1, largest, keep_dims=True)
    tl.store(out0 + x, total0)
""",
        )

    def test_what_all_points_of_many_rows_read_has_one_dimension(self) -> None:
        self.assertExpectedInline(
            source(lambda x, s: (x * s).softmax(-1), r(100000, 12), r(100000, 1)),
            """\
# grid 782, XBLOCK=128, RBLOCK=16, 4 warps
def kernel(in0, in1, out0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = x < 100000
    r0 = tl.arange(0, RBLOCK)[None, :]
    r0mask = r0 < 12
    # mul.Tensor, _softmax.default
    t0 = tl.load(in0 + (x * 12 + r0), mask=r0mask & xmask, other=0.0)
    t1 = tl.load(in1 + tl.reshape(x, [XBLOCK]), mask=tl.reshape(xmask, [XBLOCK]), other=0.0)[:, None]
    t2 = (t0 * t1)
    t3 = tl.where(r0mask, t2, float("-inf"))
    total0 = tl.reduce(t3, 1, largest, keep_dims=True)
    # mul.Tensor, _softmax.default
    t4 = (t2 - total0)
    t5 = libdevice.exp(t4)
    t6 = tl.where(r0mask, t5, 0.0)
    total1 = tl.sum(t6, 1, keep_dims=True)
    # mul.Tensor, _softmax.default
    t7 = quotient(t5, total1)
    tl.store(out0 + (x * 12 + r0), t7, mask=r0mask & xmask)
""",
        )

    def test_short_rows(self) -> None:
        self.assertExpectedInline(
            source(lambda x: x.amax(-1), r(5000, 7)),
            """\
# grid 40, XBLOCK=128, 2 warps
def kernel(in0, out0, XBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)
    xmask = x < 5000
    # amax.default
    t0 = tl.load(in0 + (x * 7), mask=xmask, other=0.0)
    t1 = tl.load(in0 + (x * 7 + 1), mask=xmask, other=0.0)
    t2 = largest(t0, t1)
    t3 = tl.load(in0 + (x * 7 + 2), mask=xmask, other=0.0)
    t4 = largest(t2, t3)
    t5 = tl.load(in0 + (x * 7 + 3), mask=xmask, other=0.0)
    t6 = largest(t4, t5)
    t7 = tl.load(in0 + (x * 7 + 4), mask=xmask, other=0.0)
    t8 = largest(t6, t7)
    t9 = tl.load(in0 + (x * 7 + 5), mask=xmask, other=0.0)
    t10 = largest(t8, t9)
    t11 = tl.load(in0 + (x * 7 + 6), mask=xmask, other=0.0)
    t12 = largest(t10, t11)
    tl.store(out0 + x, t12, mask=xmask)
""",
        )

    def test_columns(self) -> None:
        self.assertExpectedInline(
            source(lambda x: x.sum(0), r(4000, 70)),
            """\
# grid 219, XBLOCK=16, RBLOCK=128, 4 warps
def kernel(in0, out0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = x < 3500
    r0 = tl.arange(0, RBLOCK)[None, :]
    r0mask = r0 < 80
    # sum.dim_IntList
    t0 = tl.load(in0 + tl.max_contiguous((x // 70) * 5600 + r0 * 70 + (x % 70), [16, 1]), mask=r0mask & xmask, other=0.0)
    total0 = tl.sum(halves_of_rows(halves_of_rows(t0)), 1, keep_dims=True)
    tl.store(out0 + x, total0, mask=xmask)

# grid 9, XBLOCK=8, RBLOCK=64, 2 warps
def kernel(in0, out0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    xmask = x < 70
    r0 = tl.arange(0, RBLOCK)[None, :]
    r0mask = r0 < 50
    # sum.dim_IntList
    t0 = tl.load(in0 + (r0 * 70 + x), mask=r0mask & xmask, other=0.0)
    total0 = tl.sum(halves_of_rows(t0), 1, keep_dims=True)
    tl.store(out0 + x, total0, mask=xmask)
""",  # noqa: E501
        )

    def test_rows_and_totals_over_rows(self) -> None:
        self.assertExpectedInline(
            source(lambda x, w: [F.rms_norm(x, (64,)) * w, (x * 2).sum(0)], r(500, 64), r(64)),
            """\
# grid 264, RBLOCK=64, 1 warps
def kernel(in0, in1, out0, partials0, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    r0 = tl.arange(0, RBLOCK)
    sum0 = tl.full([RBLOCK], 0.0, tl.float32)
    t7 = tl.load(in1 + r0)
    for x in tl.range(program, 500, programs, num_stages=3):
        # pow.Tensor_Scalar, mean.dim
        t0 = tl.load(in0 + (x * 64 + r0))
        t1 = (t0 * t0)
        total0 = tl.sum(t1, 0, keep_dims=False)
        # mul.Tensor, sum.dim_IntList
        t2 = (t0 * 2.0)
        sum0 = sum0 + t2
        # pow.Tensor_Scalar, mean.dim, add.Scalar, rsqrt.default, mul.Tensor
        t3 = (total0 * 0.015625)
        t4 = (t3 + 1.1920929e-07)
        t5 = libdevice.rsqrt(t4)
        t6 = (t0 * t5)
        t8 = (t6 * t7)
        tl.store(out0 + (x * 64 + r0), t8)
    tl.store(partials0 + (program * 64 + r0), sum0)
# grid 8, XBLOCK=8, RBLOCK=512, 4 warps, on ('partials0', 'result0')
def kernel(in0, out0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    r0 = tl.arange(0, RBLOCK)[None, :]
    r0mask = r0 < 264
    # totals_of_programs
    t0 = tl.load(in0 + (r0 * 64 + x), mask=r0mask, other=0.0)
    total0 = tl.sum(halves_of_rows(halves_of_rows(halves_of_rows(t0))), 1, keep_dims=True)
    tl.store(out0 + x, total0)
""",
        )

    def test_total_of_everything(self) -> None:
        self.assertExpectedInline(
            source(lambda x: (x * x).sum(), r(300, 100)),
            """\
# grid 8, XBLOCK=4096, 8 warps
def kernel(in0, partials0, XBLOCK: tl.constexpr):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    sum0 = tl.full([XBLOCK], 0.0, tl.float32)
    for first in range(program * XBLOCK, 30000, programs * XBLOCK):
        x = first + tl.arange(0, XBLOCK)
        xmask = x < 30000
        # mul.Tensor, sum.default
        t0 = tl.load(in0 + x, mask=xmask, other=0.0)
        t1 = (t0 * t0)
        sum0 = sum0 + t1
    total0 = tl.sum(halves_of_row(halves_of_row(sum0)), 0, keep_dims=False)
    tl.store(partials0 + program, total0)
# grid 1, RBLOCK=8, 1 warps, on ('partials0', 'result0')
def kernel(in0, out0, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    r0 = tl.arange(0, RBLOCK)
    # totals_of_programs
    t0 = tl.load(in0 + r0)
    total0 = tl.sum(t0, 0, keep_dims=False)
    tl.store(out0, total0)
""",
        )

    def test_transpose(self) -> None:
        self.assertExpectedInline(
            source(lambda x: x.t().contiguous(), r(40, 64)),
            """\
# grid 4, XBLOCK=32, RBLOCK=32, 4 warps
def kernel(in0, out0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    across = (program // 2)
    along = (program % 2)
    x = across * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    r0 = along * RBLOCK + tl.arange(0, RBLOCK)[None, :]
    r0mask = r0 < 40
    # clone.default
    t0 = tl.load(in0 + (r0 * 64 + x), mask=r0mask, other=0.0)
    tl.store(out0 + (x * 40 + r0), t0, mask=r0mask)
""",
        )

    def test_positions_from_data(self) -> None:
        self.assertExpectedInline(
            source(lambda x, i: x[i], r(40, 64), torch.zeros(9, dtype=torch.int64)),
            """\
# grid 5, XBLOCK=128, 1 warps
def kernel(in0, in1, out0, error, XBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)
    xmask = x < 576
    # index.Tensor
    t0 = tl.load(in0 + ((x // 64)), mask=xmask, other=0)
    t1 = tl.where(t0 < 0, t0 + 40, t0)
    inside0 = (t1 >= 0) & (t1 < 40)
    outside0 = (inside0 == 0)
    tl.store(error + tl.broadcast_to(tl.cast(0, tl.int64), [XBLOCK]), tl.full([], 1, tl.int32), mask=xmask & outside0)
    t2 = tl.load(in1 + (t1 * 64 + (x % 64)), mask=xmask & inside0, other=0.0)
    tl.store(out0 + x, t2, mask=xmask)
""",
        )

    def test_scatter(self) -> None:
        at = torch.zeros(20, 4, dtype=torch.int64)
        self.assertExpectedInline(
            source(lambda x, i, s: x.scatter_add(0, i, s), r(10, 4), at, r(20, 4)),
            """\
# grid 1, XBLOCK=64, 1 warps
def kernel(in0, out0, XBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)
    xmask = x < 40
    # scatter_add.default
    t0 = tl.load(in0 + x, mask=xmask, other=0.0)
    tl.store(out0 + x, t0, mask=xmask)

# grid 1, XBLOCK=128, 1 warps
def kernel(in0, in1, out0, error, XBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program * XBLOCK + tl.arange(0, XBLOCK)
    xmask = x < 80
    # scatter_add.default
    t0 = tl.load(in0 + x, mask=xmask, other=0.0)
    t1 = tl.load(in1 + x, mask=xmask, other=0)
    t2 = (t1 < 0)
    t3 = tl.where(t2, 9223372036854775807, t1)
    t4 = tl.where(t3 < 0, t3 + 10, t3)
    inside0 = (t4 >= 0) & (t4 < 10)
    outside0 = (inside0 == 0)
    tl.store(error + tl.broadcast_to(tl.cast(0, tl.int64), [XBLOCK]), tl.full([], 1, tl.int32), mask=xmask & outside0)
    tl.atomic_add(out0 + (t4 * 4 + (x % 4)), t0, mask=xmask & inside0, sem="relaxed")
""",
        )

    def test_scan(self) -> None:
        short = ScheduleContext(replace(H200, registers=256))
        self.assertExpectedInline(
            source(lambda x: x.cumsum(-1), r(6, 100), ctx=short),
            """\
# grid 6, RBLOCK=64, 1 warps
def kernel(in0, out0, RBLOCK: tl.constexpr):
    program = tl.program_id(0)
    x = program
    carry0 = tl.full([], 0.0, tl.float32)
    lost_carry0 = tl.full([], 0.0, tl.float32)
    for base in range(0, 100, RBLOCK):
        r0 = base + tl.arange(0, RBLOCK)
        r0mask = r0 < 100
        # cumsum.default
        t0 = tl.load(in0 + (x * 100 + r0), mask=r0mask, other=0.0)
        t1 = scan_exactly(t0, 0)
        total0 = sum_exactly(t0, 0, False)
        t2 = with_lost(carry0, lost_carry0) + t1
        carry0, lost_carry0 = add_exactly(carry0, lost_carry0, total0)
        tl.store(out0 + (x * 100 + r0), t2, mask=r0mask)
""",
        )

    def test_symbolic_sizes(self) -> None:
        self.assertExpectedInline(
            source(lambda x: x.exp() + 1, r(30, 70), dynamic=True),
            """\
# grid ((s27*s77 + 1023) // 1024), XBLOCK=1024, 2 warps
def kernel(in0, out0, s27, s77, XBLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    x = program * XBLOCK + tl.arange(0, XBLOCK).to(tl.int64)
    xmask = x < s27 * s77
    # exp.default, add.Tensor
    t0 = tl.load(in0 + x, mask=xmask, other=0.0)
    t1 = libdevice.exp(t0)
    t2 = (t1 + 1.0)
    tl.store(out0 + x, t2, mask=xmask)
""",
        )


def test_weights_and_windows_stay_in_the_cache() -> None:
    """Programs read a weight, and an element of a window, again; a streamed row they do not."""

    def policies(fn: Callable[..., Any], *inputs: torch.Tensor) -> dict[str, bool]:
        lines = [line for line in source(fn, *inputs).splitlines() if "tl.load(" in line]
        return {line.partition("tl.load(")[2].split(" ")[0]: "evict_first" in line for line in lines}

    rows, weight = r(400_000, 192), r(192)
    assert policies(lambda x, w: (x * w).softmax(-1), rows, weight) == {"in0": True, "in1": False}

    def sliding(x: torch.Tensor) -> torch.Tensor:
        return (x[:-2] + x[1:-1] * 2 + x[2:]).softmax(-1)

    assert policies(sliding, rows) == {"in0": False}
