"""Reductions against float64: no further from it than eager; and what they give for infinities, NaN and zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import accuracy
from test import triton_run
from test.compare import as_list, compiled

pytestmark = pytest.mark.sample(3)

INF = float("inf")
PATHS: dict[str, Callable[..., Any]] = {"C++": compiled, "Triton": lambda fn: triton_run.compiled(fn, host=True)}


@pytest.mark.parametrize("n", [100, 20_000], ids=str)
@pytest.mark.parametrize("case", accuracy.CASES, ids=lambda c: c.name)
def test_no_further_from_float64_than_eager(case: accuracy.Case, n: int) -> None:
    run = compiled(case.run)
    for ratio in case.ratios:
        found = accuracy.measure(case, run, n, ratio, "cpu")
        assert found.quotient <= 1.5, f"mean {ratio} times the deviation: {found}"


@pytest.mark.parametrize("n", [1_000_003, 4_000_003])
def test_a_long_sum_beside_a_scan(n: int) -> None:
    x = torch.full((n,), 0.1)
    for fn in (lambda x: x.sum(), lambda x: (x.sum(), x.mean(), x.cumsum(0))):
        total = as_list(compiled(fn)(x))[0]
        assert abs(total.double() - x.double().sum()) < 0.02  # half of what two neighbouring floats are apart


@pytest.mark.parametrize("length", [None, 1000])
def test_a_sum_of_any_length_has_short_blocks(length: int | None) -> None:
    x = torch.full((3, 3000), 0.1)
    run = compiled(lambda x: x.sum(-1), dynamic=length is None)
    for n in (3000, 2999):
        y = x[:, :n].contiguous()
        assert float((run(y).double() / y.double().sum(-1) - 1).abs().max()) < 3e-7


def test_variance_of_rows_on_a_gpu_takes_off_what_rounded_the_mean() -> None:
    x = 1e3 + 1e-3 * torch.randn(8, 700)
    run = PATHS["Triton"](lambda x: torch.var_mean(x, -1))
    for got, want in zip(run(x), torch.var_mean(x.double(), -1), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    assert (PATHS["Triton"](lambda x: x.std(-1))(torch.full((4, 700), 0.1)) < 1e-8).all()


def _special_rows(n: int) -> torch.Tensor:
    x = torch.randn(6, n, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[1, 3], x[2, 0], x[2, 4], x[3, 2] = INF, -INF, INF, -INF, float("nan")
    x[4] = INF
    return x


NORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "var_mean": lambda x: torch.var_mean(x, -1),
    "std": lambda x: x.std(-1),
    "var of columns": lambda x: x.t().contiguous().var(0),
    "layer norm": lambda x: torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5),
    "group norm": lambda x: functional.group_norm(x.view(6, 4, -1), 2),
    "batch norm": lambda x: functional.batch_norm(x.view(6, -1, 4).transpose(0, 1), None, None, training=True),
    "instance norm": lambda x: functional.instance_norm(x.view(3, 2, -1)),
    "rms norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", NORMS)
def test_rows_with_infinities(name: str, path: str) -> None:
    for n in (16, 600):
        x = _special_rows(n)
        for got, want in zip(as_list(PATHS[path](NORMS[name])(x)), as_list(NORMS[name](x)), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-3, atol=1e-4)


ZEROS: dict[str, Callable[[torch.Tensor], Any]] = {
    "neg": lambda x: -x,
    "divided by -0": lambda x: x / -0.0,
    "times -0": lambda x: x * -0.0,
    "at least 0": lambda x: x.clamp(min=0.0),
    "at most 0": lambda x: x.clamp(max=0.0),
    "floor": lambda x: torch.div(x, -0.5, rounding_mode="floor"),
    "trunc": lambda x: torch.div(x, -0.5, rounding_mode="trunc"),
    "quotient by a row's number": lambda x: x / 0.5,
}
ONLY_CPU = ("at least 0", "at most 0")  # a GPU's eager has +0 there


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    keep = ~want.isnan()
    assert torch.equal(got[keep], want[keep])
    assert torch.equal(got[keep].signbit(), want[keep].signbit())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_signs_of_zeros_and_quotients_that_overflow(dtype: torch.dtype, path: str) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, INF, -INF, float("nan"), top, -top] * 4, dtype=dtype)
    fns = {n: f for n, f in ZEROS.items() if path == "C++" or n not in ONLY_CPU}

    def every(x: torch.Tensor) -> list[Any]:
        return [f(x) for f in fns.values()]

    for got, want in zip(PATHS[path](every)(x), every(x), strict=True):
        _same_bits(got, want)


def _pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each number with each other, in whole vectors: eager's loops end with other instructions."""
    numbers = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, INF, -INF, float("nan")], dtype=dtype)
    return numbers.repeat_interleave(8), numbers.repeat(8)


OF_PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "//": lambda a, b: a // b,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_quotients_and_extrema_of_zeros_and_infinities(dtype: torch.dtype, path: str) -> None:
    def every(a: torch.Tensor, b: torch.Tensor) -> list[Any]:
        return [f(a, b) for f in OF_PAIRS.values()]

    pairs = _pairs(dtype)
    for got, want in zip(PATHS[path](every)(*pairs), every(*pairs), strict=True):
        _same_bits(got, want)


@pytest.mark.parametrize("path", PATHS)
def test_an_ignored_row_of_a_cross_entropy_has_gradients_of_plus_zero(path: str) -> None:
    x, target = torch.randn(5, 7, requires_grad=True), torch.tensor([0, 3, -100, 6, -100])
    grads = []
    for fn in (functional.nll_loss, functional.cross_entropy):
        plain = lambda x, fn=fn: fn(x, target)  # noqa: E731
        grads += [torch.autograd.grad(f(x), x)[0] for f in (plain, PATHS[path](plain))]
    for want, got in (grads[:2], grads[2:]):
        torch.testing.assert_close(got, want)
        assert torch.equal(got[2::2].signbit(), want[2::2].signbit())


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_has_a_gradient_of_nan(path: str) -> None:
    x = torch.tensor([0.5, float("nan"), -3.0], requires_grad=True)
    both = (functional.smooth_l1_loss, PATHS[path](functional.smooth_l1_loss))
    want, got = (torch.autograd.grad(f(x, torch.zeros(3)), x)[0] for f in both)
    torch.testing.assert_close(got, want, equal_nan=True)


def test_half_powers_of_half_precision() -> None:
    x = torch.tensor([0.0, -0.0, 4.0, -1.0, INF, -INF] * 8, dtype=torch.float16)
    for power in (0.5, -0.5):
        _same_bits(compiled(lambda x, power=power: x**power)(x), x**power)


def test_the_table_is_printed_and_says_whether_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["--cases", "mean of columns", "--most", "100"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| mean")]
    assert row.count("|") == len(accuracy.RATIOS) + 4
    assert accuracy.main(["--cases", "mean of columns", "--most", "100", "--limit", "0.01"]) == 1
