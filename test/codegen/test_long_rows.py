"""Rows that a program of a GPU cannot hold: joined passes, pieces, and parts of unequal length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.fx_passes import instance_norm
from altbackend.ir.loops import Extern
from altbackend.lowering.operators import pieces
from altbackend.schedule import split
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.tiling.gpu.one_pass import joined_passes
from altbackend.schedule.tiling.gpu.online_position import OnlinePosition
from altbackend.schedule.tiling.gpu.online_softmax import OnlineSoftmax
from test import triton_run
from test.compare import as_list, difference
from test.graphs import schedule, trace

pytestmark = pytest.mark.sample(3)

T = torch.Tensor
SMALL = ScheduleContext(replace(H200, sms=4, registers=64))  # rows of more than 16 elements are long
LAST = torch.channels_last


def kernels_of(fn: Callable[..., Any], x: T, ctx: ScheduleContext = SMALL) -> list[Kernel]:
    return [k for k in schedule(trace(fn, x)[0], ctx=ctx).steps if not isinstance(k, Extern)]


def passes_of(fn: Callable[..., Any], x: T) -> list[object]:
    return [p for k in kernels_of(fn, x) for p in joined_passes(k.stages, list(k.stages), k.stored)]


def check(fn: Callable[..., Any], x: T, ctx: ScheduleContext = SMALL, tolerance: float = 1e-5) -> None:
    for got, want in zip(as_list(triton_run.compiled(fn, ctx=ctx)(x)), as_list(fn(x)), strict=True):
        assert not difference(got, want, strides=False, tolerance=tolerance)


# --- sums ------------------------------------------------------------------------------------------------------------


def test_sums_of_long_rows_keep_what_they_round_off() -> None:
    x = torch.full((2, 2000), 0.1)  # chains of 125 equal numbers
    for got in as_list(triton_run.compiled(lambda x: (x.sum(1), x.sum(), x.mean(1)), ctx=SMALL)(x)):
        exact = float(x[0, 0].double()) * (1 if got.max() < 1 else x.numel() if got.dim() == 0 else 2000)
        assert ((got.double() - exact).abs() <= exact * 2**-24).all()


def test_sums_of_infinities_and_large_numbers() -> None:
    x = torch.ones(5, 100)
    x[0, 3], x[1, 50], x[2, 1] = torch.inf, -torch.inf, torch.nan
    x[3, 7], x[3, 40] = torch.inf, -torch.inf
    x[4] = torch.finfo(torch.float32).max / 64  # overflows
    check(lambda x: (x.sum(1), x.sum(0), x.sum(), x.cumsum(1)), x)


@pytest.mark.parametrize("columns", [9, 16, 50])
def test_totals_of_one_number_a_row_beside_whole_rows(columns: int) -> None:
    weight, x = torch.randn(400), torch.randn(400, columns)
    check(lambda x: ((x * weight[:, None]).softmax(1), weight.sum(), (weight * weight).sum()), x)


def test_a_program_of_one_row_totals_one_number_of_it() -> None:
    x, w = torch.randn(4096, 1000), torch.randn(4096)
    graph = schedule(trace(lambda x, w: ((x * w[:, None]).softmax(1), w.sum()), x, w)[0], ctx=triton_run.TARGET)
    assert triton_run.steps_of(graph)


def test_sums_of_half_precision_are_plain() -> None:
    def sources(x: T) -> str:
        steps = triton_run.steps_of(schedule(trace(lambda x: x.sum(1), x)[0], ctx=SMALL), SMALL)
        return "".join(kernel.source for kernel, *_ in steps)

    assert "add_exactly" in sources(torch.ones(3, 500))
    assert "add_exactly" not in sources(torch.ones(3, 500).half())


# --- positions of extrema --------------------------------------------------------------------------------------------


def ties(*sizes: int, dtype: torch.dtype = torch.float32) -> T:
    return torch.randint(-3, 4, sizes).to(dtype)


def special() -> T:
    """Rows with NaN, only negative infinity, only NaN, infinities of both signs, and equal elements."""
    x = ties(6, 50)
    x[0, 30] = x[0, 41] = torch.nan
    x[1] = -torch.inf
    x[2] = torch.nan
    x[3, 7], x[3, 9] = torch.inf, -torch.inf
    x[4] = 2.0
    return x


@pytest.mark.parametrize(("fn", "dim", "dtype"), [
    (torch.argmax, 0, torch.float32),
    (torch.argmax, 1, torch.int64),
    (torch.argmin, 0, torch.bfloat16),
    (torch.argmin, 1, torch.float32),
])  # fmt: skip
def test_positions_take_one_pass(fn: Callable[..., T], dim: int, dtype: torch.dtype) -> None:
    x = ties(37, 53, dtype=dtype)
    assert any(isinstance(p, OnlinePosition) for p in passes_of(lambda x: fn(x, dim), x))
    check(lambda x: fn(x, dim), x)


@pytest.mark.parametrize("dim", [0, 1])
def test_positions_of_special_numbers(dim: int) -> None:
    x = special() if dim == 1 else special().t().contiguous()
    check(lambda x: (x.argmax(dim), x.argmin(dim)), x)
    check(lambda x: (*x.max(dim), *x.min(dim)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_rows_of_the_largest_number_have_their_first_position(dtype: torch.dtype) -> None:
    """No element is better than the one that a pass begins with."""
    x = ties(5, 70, dtype=dtype)
    x[1:4] = torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max
    x[2, 9] = 2
    if dtype.is_floating_point:
        x[3, 60] = torch.nan
    check(lambda x: (x.argmin(1), (-x).argmax(1), x.view(5, 7, 10).argmin(2)), x)
    check(lambda x: x.t().flip(0).argmin(0), x)


def test_first_positions_beside_a_scan_from_the_end() -> None:
    """Blocks of the kernel then begin at the end of a row, and an equal value comes earlier than the one before it."""

    def fn(x: T) -> tuple[T, T]:
        best, at = x.max(1, keepdim=True)
        return at, (x - best).flip(1).cumsum(1).flip(1)

    check(fn, ties(5, 70))


def test_an_extremum_beside_its_position_and_a_prologue() -> None:
    check(lambda x: (x * 2).sin().max(1), torch.randn(5, 70))
    check(lambda x: (x.relu() + 1).max(1).values + x.argmin(1), torch.randn(5, 70))


def test_points_that_need_the_extremum_keep_a_pass_of_their_own() -> None:
    fn: Callable[[T], Any] = lambda x: (x - x.amax(1, keepdim=True), x.argmax(1))  # noqa: E731
    check(fn, torch.randn(5, 70))


@pytest.mark.parametrize("fn", [lambda x: x.softmax(1), lambda x: x.log_softmax(1) + 1, lambda x: x.logsumexp(1)])
def test_softmax_over_long_columns_takes_one_pass(fn: Callable[[T], T]) -> None:
    x = torch.randn(3, 45, 20)
    x[0, :, 3] = -torch.inf
    assert any(isinstance(p, OnlineSoftmax) for p in passes_of(fn, x))
    check(fn, torch.nan_to_num(x, neginf=-1e30))
    check(lambda x: x.softmax(1)[1:], x)


# --- pieces ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut rows of a few dozen elements, as those of thousands are."""
    numbers = {"LARGE": 64, "LONG_ROW": 40, "LONG_COLUMN": 40, "PROGRAMS": 8}
    lengths = {"FEWEST_ROWS": 4, "MOST_ROWS": 16, "SHORTEST": 8, "LONGEST": 32}
    for name, number in (numbers | lengths).items():
        monkeypatch.setattr(pieces, name, number)


NORMS: dict[str, tuple[Callable[[T], Any], tuple[int, ...]]] = {
    "group norm": (lambda x: F.group_norm((x * 1.5).sigmoid(), 4), (2, 16, 8, 12)),
    "group norm, uneven": (lambda x: F.group_norm(x + 2, 2), (2, 16, 7, 19)),
    "instance norm as groups": (lambda x: F.group_norm(x, x.shape[1]), (3, 8, 9, 9)),
    "layer norm": (lambda x: F.layer_norm(x.sin(), x.shape[1:]), (3, 8, 7, 11)),
    "variance": (lambda x: torch.var_mean(x, (0, 2, 3)), (4, 8, 7, 11)),
    "variance of joined dimensions": (lambda x: torch.var_mean(x.reshape(1, 24, 7, 11), (0, 2, 3)), (3, 8, 7, 11)),
}


@pytest.mark.sample(5)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("name", "dtype", "memory_format"), [
    *((name, torch.float32, LAST) for name in NORMS),
    *((name, torch.float32, torch.contiguous_format) for name in ("group norm", "layer norm", "variance")),
    ("group norm, uneven", torch.bfloat16, LAST),
    ("variance", torch.bfloat16, torch.contiguous_format),
])  # fmt: skip
def test_moments_of_pieces_equal_eager(name: str, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    fn, sizes = NORMS[name]
    x = torch.randn(sizes).to(dtype).contiguous(memory_format=memory_format)
    check(fn, x, ScheduleContext(H200), 2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.usefixtures("small_pieces")
def test_a_large_mean_costs_no_accuracy() -> None:
    x = (torch.randn(2, 8, 7, 11) * 8 + 1e4).round()
    for got, want in zip(
        triton_run.compiled(lambda x: torch.var_mean(x, (0, 2, 3)), ctx=ScheduleContext(H200))(x),
        torch.var_mean(x.double(), (0, 2, 3)),
        strict=True,
    ):
        assert torch.allclose(got.double(), want, rtol=1e-4)


@pytest.mark.parametrize("rows", [4096, 1 << 16])
def test_a_mean_near_zero_has_no_error_of_the_deviations(rows: int) -> None:
    """The deviations of one exponent are all rounded alike, and their sum would add that to the mean."""
    torch.manual_seed(0)
    x = torch.randn(4, rows)
    run = triton_run.compiled(lambda x: torch.var_mean(x, 1)[1], ctx=ScheduleContext(H200))
    error = (run(x).double() - x.double().mean(1)).abs().max()
    assert error < 2.0**-24 * 6 / rows**0.5  # a sum of n numbers of either sign grows with the root of n


@pytest.mark.usefixtures("small_pieces")
def test_batch_norm_over_rows_without_a_fitting_divisor() -> None:
    x = torch.randn(8 * 31 + 3, 6)
    check(lambda x: F.batch_norm(x, None, None, training=True), x, ScheduleContext(H200))


@pytest.mark.parametrize(("rows", "length"), [(254 * 254, 127), (256 * 256, 256), (8 * 21911, 256), (4096, 64)])
def test_lengths_of_pieces(rows: int, length: int) -> None:
    assert pieces.piece_length(rows, 4, 64, 256) == length


def test_instance_norms_become_group_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_norm, "DEVICES", ("cpu",))
    seen: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        from altbackend import fx_passes  # noqa: PLC0415 - beside its one use
        from altbackend.config.options import Config  # noqa: PLC0415

        fx_passes.pre_grad(gm, Config())
        seen.append(gm)
        return gm

    for layer in (torch.nn.InstanceNorm2d(6, affine=True), torch.nn.InstanceNorm1d(6)):
        torch._dynamo.reset()
        x = torch.randn(2, 6, 5, 4) if isinstance(layer, torch.nn.InstanceNorm2d) else torch.randn(2, 6, 9)
        got = torch.compile(layer, backend=backend)(x.requires_grad_())
        assert torch.allclose(got, layer(x), atol=1e-5)
        assert torch.nn.functional.group_norm in {n.target for n in seen[-1].graph.nodes}
    tracking = torch.nn.InstanceNorm2d(6, track_running_stats=True)
    torch.compile(tracking, backend=backend)(torch.randn(2, 6, 5, 4))
    assert torch.nn.functional.group_norm not in {n.target for n in seen[-1].graph.nodes}


# --- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [
    lambda x: x.sum(0),
    lambda x: x.amax(0),
    lambda x: x.amin(0),
    lambda x: (x > 0).any(0),
    lambda x: (x > -9).all(0),
    lambda x: (x > 0).sum(0),
])  # fmt: skip
def test_parts_of_unequal_length(fn: Callable[[T], T], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "LONG_COLUMN", 100)
    monkeypatch.setattr(split, "SHORTEST_COLUMN", 8)
    x = torch.randn(211, 24) - 3  # a prime number of rows
    assert len(kernels_of(fn, x, ScheduleContext(H200))) == 2
    check(fn, x, ScheduleContext(H200))


def test_a_loss_and_the_gradient_of_a_bias_in_one_kernel() -> None:
    """Targets are read for all classes at once, and their check is as wide as the tile that it guards."""
    targets = torch.tensor([1, 3, 0, 2, 6, 5, 4, 1])

    def fn(x: T, bias: T) -> tuple[T, ...]:
        bias = bias.requires_grad_()
        loss = F.cross_entropy(x + bias, targets)
        return loss.detach(), *torch.autograd.grad(loss, [bias])

    def gradients(x: T, bias: T) -> tuple[T, ...]:
        log = (x + bias).log_softmax(1)
        one_hot = F.one_hot(targets, x.shape[1]).float()
        return (log.exp() - one_hot).div(len(targets)).sum(0), -log.gather(1, targets[:, None]).mean()

    x, bias = torch.randn(8, 7), torch.randn(7)
    got = triton_run.compiled(gradients)(x, bias)
    for a, b in zip(got, reversed(fn(x, bias)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
