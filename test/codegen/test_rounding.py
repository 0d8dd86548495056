"""Functions whose error a rounding hides become cheap in kernels that mix 16-bit and float32 results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.config.resolve import resolve
from altbackend.ir import value as va
from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.tiling.gpu import fast_math
from test import triton_run
from test.graphs import schedule, trace

T = torch.Tensor
GPU = ScheduleContext(H200)


def r(*sizes: int) -> T:
    return torch.randn(sizes)


def cheap_functions(fn: Callable[..., Any], *inputs: T) -> list[str]:
    """Names of the functions that `fn`'s kernels use in their cheap form, by the rule for mixed kernels."""
    (gm,) = trace(fn, *inputs)
    s = schedule(gm, None, GPU)
    functions = []
    for k in s.steps:
        if isinstance(k, Extern) or fast_math.only_low_precision(s.program, k):
            continue
        for value in fast_math.with_fast_math(s.program, k).values():
            functions += [
                v.op.removeprefix(fast_math.FAST_MATH) for v in va.walk(value) if v.op.startswith(fast_math.FAST_MATH)
            ]
    return sorted(set(functions))


def norm_and_statistics(x: T) -> tuple[T, T]:
    y = F.gelu(x)
    return y, y.float().square().sum(-1)


def test_what_is_rounded_before_anything_sees_it_is_cheap() -> None:
    assert cheap_functions(norm_and_statistics, r(4, 64).bfloat16()) == ["one_plus_erf"]


def test_softmax_beside_float32_totals() -> None:
    def fn(x: T) -> tuple[T, T]:
        y = torch.softmax(x, -1)
        return y, y.float().sum(0)

    assert cheap_functions(fn, r(8, 64).bfloat16()) == ["exp", "truediv"]


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: (x.bfloat16(), x.exp()), id="stored in float32"),
        pytest.param(lambda x: (x.bfloat16(), x.exp().sum(-1)), id="total in float32"),
        pytest.param(lambda x: ((x.exp().log() + 1).bfloat16(), x * 2), id="through a logarithm"),
        pytest.param(lambda x: (torch.where(x.sigmoid() > 0.5, x, 0).bfloat16(), x * 2), id="compared"),
        pytest.param(lambda x: (x.exp().argmax(-1), x.bfloat16(), x * 2), id="position of the maximum"),
    ],
)
def test_what_float32_results_depend_on_stays_exact(fn: Callable[[T], Any]) -> None:
    assert cheap_functions(fn, r(4, 64)) == []


def test_one_use_that_is_not_rounded_is_enough() -> None:
    def fn(x: T) -> tuple[T, T]:
        y = x.exp()
        return (y * 2).bfloat16(), y.sum(-1)

    assert cheap_functions(fn, r(4, 64)) == []


def test_results_are_as_near_as_eagers() -> None:
    """Of float16: the interpreter cuts float32 to bfloat16 instead of rounding."""
    torch.manual_seed(0)
    x = (r(33, 300) * 3).half()

    def fn(x: T) -> tuple[T, ...]:
        y = F.gelu(x) * torch.sigmoid(x)
        z = torch.softmax(y, -1)
        return z, y.float().sum(-1), z.float().sum(0)

    got, want, exact = triton_run.compiled(fn, ctx=GPU)(x), fn(x), fn(x.double())
    for g, w, e in zip(got, want, exact, strict=True):
        error, eager = float((g.double() - e).norm()), float((w.double() - e).norm())
        assert error <= 1.5 * eager + 1e-6 * float(e.norm())
    assert "sigmoid" in cheap_functions(fn, x)


def test_eager_numerics_have_no_cheap_functions() -> None:
    seen: list[Any] = []
    triton_run.compiled(norm_and_statistics, ctx=ScheduleContext(H200, fast_math=False), seen=seen)(r(8, 64).half())
    assert seen
    assert not any("_fast" in step[0].source for step in seen)


def test_parts_of_one_buffer_keep_their_own_values() -> None:
    def fn(x: T) -> tuple[T, T]:
        y = torch.cat([x.sigmoid(), x.exp() * 2, F.gelu(x)], 1)
        return y, y.half()

    torch.manual_seed(0)
    x = r(6, 10)
    for got, want in zip(triton_run.compiled(fn)(x), fn(x), strict=True):
        torch.testing.assert_close(got, want)


def test_eager_numerics_multiply_by_a_sixth_on_a_gpu() -> None:
    """Eager's hardsigmoid and hardswish divide by 6 on a CPU, and multiply by float32(1 / 6) on a GPU."""
    x = torch.linspace(-4, 4, 1001)
    exact = resolve(options={"numerics": "eager"})
    got = triton_run.compiled(lambda x: (F.hardswish(x), F.hardsigmoid(x)), cfg=exact)(x)
    sixth, inner = torch.tensor(1.0) / 6.0, (x + 3).clamp(0, 6)
    assert torch.equal(got[0], x * inner * sixth)
    assert torch.equal(got[1], inner * sixth)
    assert not torch.equal(got[1], inner / 6)
