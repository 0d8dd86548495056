"""Random operators: eager's numbers if an option asks for them, else numbers of kernels, set by `manual_seed`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from test import seeded
from test.compare import compiled


def draws(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.rand(3, 5),
        torch.rand_like(x) * 2,
        torch.randn(7) + x[0, 0],
        torch.randn_like(x),
        torch.randint(0, 10, (6,)),
        torch.bernoulli(x.sigmoid()),
        torch.randperm(9),
        F.dropout(x, 0.3),
        F.dropout(x * 2, 0.5).sum(),
        torch.normal(x, 1.0),
        x.new_empty(4).uniform_(-1, 1),
        x.new_empty(4).exponential_(),
        torch.rand(3).argmax(),
    ]


def after_seed(fn: Callable[..., list[torch.Tensor]], x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(5)
    return fn(x), torch.get_rng_state()


def test_values_and_generator_state_equal_eager() -> None:
    x = torch.randn(4, 6)
    want, state = after_seed(draws, x)
    run = compiled(draws, fallback_random=True)
    for _ in range(2):
        got, new_state = after_seed(run, x)
        torch.testing.assert_close(got, want)
        assert torch.equal(new_state, state)


def test_the_setting_of_the_reference_gives_eagers_numbers() -> None:
    """Programs written for TorchInductor ask for eager's numbers in that package's configuration."""
    settings = importlib.import_module("torch._inductor.config")
    x = torch.randn(4, 6)
    want, state = after_seed(draws, x)
    with settings.patch(fallback_random=True):
        got, new_state = after_seed(compiled(draws), x)
    torch.testing.assert_close(got, want)
    assert torch.equal(new_state, state)
    torch._dynamo.reset()
    assert not torch.equal(after_seed(compiled(draws), x)[0][0], want[0])


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_gradient_uses_the_mask_of_the_forward(p: float) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = F.dropout(x.sin(), p)
        return [F.dropout(y * y, p).sum(), y.sum()]

    def gradients(f: Callable[..., list[torch.Tensor]]) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(11)
        x = torch.linspace(-1, 1, 60).reshape(6, 10).requires_grad_()
        outs = f(x)
        return [*outs, *torch.autograd.grad(outs, [x])], torch.get_rng_state()

    (want, state), (got, new_state) = gradients(fn), gradients(compiled(fn, fallback_random=True))
    torch.testing.assert_close(got, want)
    assert torch.equal(new_state, state)


# --- numbers of kernels ------------------------------------------------------------------------------------------

N = 200_000


def seeded_run(run: Callable[..., Any], *inputs: Any, seed: int = 5) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(seed)
    return run(*inputs), torch.get_rng_state()


def kolmogorov_smirnov(cdf: torch.Tensor) -> float:
    """Return sqrt(n) times the Kolmogorov-Smirnov distance of a sample from the distribution function `cdf`."""
    ordered, n = torch.sort(cdf.double()).values, cdf.numel()
    steps = torch.arange(1, n + 1).double() / n
    return math.sqrt(n) * float(torch.maximum((ordered - steps).abs(), (ordered - steps + 1 / n).abs()).max())


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return sqrt(n) times the sample correlation, a standard normal for independent samples."""
    return math.sqrt(x.numel()) * float(torch.corrcoef(torch.stack([x, y]).double())[0, 1])


LIKELY = 5.0  # standard deviations: P < 6e-7
KS_LIKELY = 2.6  # P < 3e-6


def uniform_numbers() -> tuple[torch.Tensor, ...]:
    return torch.rand(N), torch.rand(N, dtype=torch.float64), torch.empty(N).uniform_(-2.0, 6.0)


def normal_numbers() -> tuple[torch.Tensor, ...]:
    return torch.randn(N), torch.randn(N, dtype=torch.float64), torch.empty(N).normal_(3.0, 0.5)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    single, double, scaled = seeded_run(compiled(uniform_numbers))[0]
    for u in (single, double, (scaled + 2) / 8):
        assert float(u.min()) >= 0
        assert float(u.max()) < 1
        assert abs(float(u.double().mean()) - 0.5) < LIKELY / math.sqrt(12 * N)
        assert abs(float(u.double().var()) - 1 / 12) < LIKELY / math.sqrt(180 * N)
        assert kolmogorov_smirnov(u) < KS_LIKELY
        for lag in (1, 2, 3, 4, 64, 4096):
            assert abs(correlation(u[lag:], u[:-lag])) < LIKELY
    assert abs(correlation(single, double)) < LIKELY  # operators of one graph
    assert abs(correlation(single, scaled)) < LIKELY
    assert double.unique().numel() == N


def test_normal_numbers_are_normal_and_independent() -> None:
    single, double, scaled = seeded_run(compiled(normal_numbers))[0]
    for z in (single, double, (scaled - 3) * 2):
        assert abs(float(z.double().mean())) < LIKELY / math.sqrt(N)
        assert abs(float(z.double().var()) - 1) < LIKELY * math.sqrt(2 / N)
        assert abs(float((z.double() ** 4).mean()) - 3) < LIKELY * math.sqrt(96 / N)
        assert kolmogorov_smirnov(torch.special.ndtr(z.double())) < KS_LIKELY
        for lag in (1, 2, 3, 4, 64):
            assert abs(correlation(z[lag:], z[:-lag])) < LIKELY
    assert abs(correlation(single, double)) < LIKELY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_uniform_stays_below_one(dtype: torch.dtype) -> None:
    u, _ = seeded_run(compiled(lambda: torch.rand(N, dtype=dtype)))
    assert u.dtype == dtype
    steps = 2 ** {torch.bfloat16: 8, torch.float16: 11}[dtype]
    counts = torch.bincount((u.double() * steps).long(), minlength=steps)
    assert counts.numel() == steps  # 1 would be one more
    assert float(((counts - N / steps) ** 2 / (N / steps)).sum()) < steps + LIKELY * math.sqrt(2 * steps)


def test_integers_cover_their_range_evenly() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.randint(-3, 7, (N,)),
            torch.randint(5, (N,), dtype=torch.int32),
            torch.randint_like(x, 2, 4),
            torch.randint(-(2**30), 2**30, (N,)),
        ]

    a, b, c, wide = seeded_run(compiled(fn), torch.empty(N))[0]
    assert (a.dtype, b.dtype, c.dtype) == (torch.int64, torch.int32, torch.float32)
    for x, low, high in ((a, -3, 7), (b, 0, 5), (c, 2, 4)):
        assert (int(x.min()), int(x.max())) == (low, high - 1)
        each = N / (high - low)
        counts = torch.bincount((x - low).long())
        assert float((counts - each).abs().max()) < LIKELY * math.sqrt(each)
    assert kolmogorov_smirnov((wide + 2**30) / 2.0**31) < KS_LIKELY


def test_bernoulli_follows_its_probabilities() -> None:
    p = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]).repeat_interleave(N // 5)

    def fn(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.bernoulli(p), torch.empty(N, dtype=torch.bfloat16).bernoulli_(0.25)

    (x, y), _ = seeded_run(compiled(fn), p)
    for k, want in enumerate((0.0, 0.1, 0.5, 0.9, 1.0)):
        rate = float(x[k * N // 5 : (k + 1) * N // 5].mean())
        assert abs(rate - want) <= LIKELY * math.sqrt(want * (1 - want) / (N / 5))
    assert set(y.unique().tolist()) == {0.0, 1.0}
    assert abs(float(y.float().mean()) - 0.25) < LIKELY * math.sqrt(0.1875 / N)


def test_the_seed_decides_the_numbers_and_every_call_has_its_own() -> None:
    run = compiled(lambda x: [torch.rand_like(x), F.dropout(x, 0.5), torch.randn(30)])
    x = torch.ones(50, 8)
    (first, state), (second, _), (other, _) = seeded_run(run, x), seeded_run(run, x), seeded_run(run, x, seed=6)
    following = run(x)
    assert all(map(torch.equal, first, second))
    assert not any(map(torch.equal, first, other))
    assert not any(map(torch.equal, other, following))
    torch.manual_seed(5)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_graph_without_random_operators_leaves_the_generator_alone() -> None:
    run = compiled(lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0))
    _, state = seeded_run(run, torch.ones(8))
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_do_not_depend_on_the_number_of_threads() -> None:
    x = torch.ones(300, 200)
    one, many = (compiled(lambda x: F.dropout(x, 0.3) * torch.randn_like(x), threads=n) for n in (1, 3))
    assert torch.equal(seeded_run(one, x)[0], seeded_run(many, x)[0])


def test_numbers_follow_the_position_whatever_the_strides() -> None:
    run = compiled(lambda x: torch.rand_like(x))
    plain = torch.empty(2, 3, 4, 5)
    last = plain.contiguous(memory_format=torch.channels_last)
    a, b = seeded_run(run, plain)[0], seeded_run(run, last)[0]
    assert b.stride() == last.stride()
    assert torch.equal(a, b)


@pytest.mark.sample(2)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_gradient_is_the_mask_over_its_probability(p: float) -> None:
    run = compiled(lambda x, w: F.dropout(F.gelu(x), p) * w)
    x, w = torch.linspace(-2, 2, 6000).reshape(60, 100).requires_grad_(), torch.randn(60, 100)
    y = run(x, w)
    (got,) = torch.autograd.grad(y.sum(), [x])
    mask = y != 0
    assert abs(float(mask.float().mean()) - (1 - p)) < LIKELY * math.sqrt(p * (1 - p) / x.numel())
    (slope,) = torch.autograd.grad(F.gelu(x).sum(), [x])
    torch.testing.assert_close(got, mask * slope * w / (1 - p), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(y, mask * F.gelu(x) * w / (1 - p), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(p: float) -> None:
    x = torch.randn(20, 6, requires_grad=True)
    y = compiled(lambda x: F.dropout(x * 2, p))(x)
    (got,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(y, (x * 2) * (1 - p))
    assert torch.equal(got, torch.full_like(x, 2 * (1 - p)))


def test_sizes_that_change_take_the_same_kernel() -> None:
    run = compiled(lambda x: F.dropout(x, 0.5) + torch.rand(x.shape[0], 3).sum(), dynamic=True)
    for n in (6, 11, 40):
        x = torch.ones(n, 7)
        a, b = seeded_run(run, x)[0], seeded_run(run, x)[0]
        assert torch.equal(a, b)
        assert (a - a.min()).unique().tolist() == [0.0, 2.0]


def test_a_size_that_data_decides_is_drawn_by_a_call_with_the_numbers_of_a_kernel() -> None:
    unbacked = compiled(lambda x: torch.rand(x.nonzero().shape[0] * 100))
    early = compiled(lambda x: torch.rand(500))
    x = torch.tensor([1, 0, 1, 1, 1, 1])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(seeded_run(unbacked, x)[0], seeded_run(early, x)[0])


def test_what_has_no_form_in_kernels_keeps_the_generator() -> None:
    reasons = seeded.decisions(
        lambda x: [torch.randperm(9), x.clone().exponential_(), torch.randint(0, 2**40, (3,)), torch.rand(3)],
        torch.ones(4),
    )
    assert {(name, verdict) for name, (verdict, _) in reasons.items()} == {
        ("randperm", "library call"),
        ("exponential", "library call"),
        ("randint", "library call"),
        ("rand", "in kernels"),
    }
    assert "2147483648" in reasons["randint"][1]


def _of_every_kind(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        torch.rand_like(x),
        torch.randn_like(x.t()),
        torch.rand_like(x[:, ::2], dtype=torch.float64),
        torch.rand_like(x.expand(2, *x.shape)),
        torch.randint_like(x, 10),
        torch.empty_like(x).uniform_(-1, 1),
        torch.nn.functional.dropout(x, 0.5),
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_eagers_numbers_in_every_layout(dynamic: bool) -> None:
    options: dict[str, Any] = {"strict": True, "fallback_random": True}
    run = torch.compile(_of_every_kind, backend="alt", dynamic=dynamic, options=options)
    for rows in (6, 10):
        x = torch.randn(rows, 8)
        torch.manual_seed(3)
        got = run(x)
        torch.manual_seed(3)
        for result, want in zip(got, _of_every_kind(x), strict=True):
            assert torch.equal(result, want)
            assert result.stride() == want.stride()


@pytest.mark.parametrize("fallback", [False, True])
def test_a_seed_that_is_set_inside(fallback: bool) -> None:
    def draw(x: torch.Tensor) -> list[torch.Tensor]:
        first = torch.rand_like(x)
        torch.manual_seed(7)
        second = torch.rand_like(x)
        torch.default_generator.manual_seed(7)
        return [first, second, torch.rand_like(x)]

    run = torch.compile(draw, backend="alt", options={"strict": True, "fallback_random": fallback})
    x, seen = torch.randn(8), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        first, second, third = run(x)
        assert torch.equal(second, third)
        seen.append((first, second))
        if fallback:
            torch.manual_seed(seed)
            assert all(torch.equal(a, b) for a, b in zip((first, second, third), draw(x), strict=True))
    assert torch.equal(seen[0][1], seen[1][1])
    assert not torch.equal(seen[0][0], seen[1][0])
