"""Reductions over every set of dimensions, layout and size; scans; the softmax family."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir import value as va
from altbackend.schedule.kernel import Kernel
from test.compare import check, check_gradients
from test.graphs import schedule, trace

pytestmark = pytest.mark.sample(3)

DIMS = [d for n in (1, 2, 3) for d in itertools.combinations(range(3), n)]
SEVERAL: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "var": torch.var,
    "logsumexp": torch.logsumexp,
    "any": lambda x, dim, keepdim: torch.any(x > 1, dim, keepdim),
    "all": lambda x, dim, keepdim: torch.all(x > -1, dim, keepdim),
    "norm": lambda x, dim, keepdim: torch.linalg.vector_norm(x, 2, dim, keepdim),
}
ONE: dict[str, Callable[..., Any]] = {
    "prod": torch.prod,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "max": lambda x, d, k: torch.max(x, d, k).values,
    "max at": lambda x, d, k: torch.max(x, d, k).indices,
    "min at": lambda x, d, k: torch.min(x, d, k).indices,
}
ROWS: dict[str, Callable[..., Any]] = {
    "softmax": F.softmax,
    "log_softmax": F.log_softmax,
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
}


def layouts() -> dict[str, torch.Tensor]:
    return {
        "contiguous": torch.randn(5, 6, 7),
        "permuted": torch.randn(7, 5, 6).permute(1, 2, 0),
        "strided": torch.randn(5, 12, 7)[:, ::2],
        "expanded": torch.randn(5, 1, 7).expand(5, 6, 7),
        "offset": torch.randn(6, 6, 7)[1:],
    }


def reductions(x: torch.Tensor, skip: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    out = {}
    for name, dims, keep in itertools.product(SEVERAL, DIMS, (False, True)):
        if name not in skip:
            out[f"{name} {dims} keepdim={keep}"] = SEVERAL[name](x, dim=dims, keepdim=keep)
    for name, dim, keep in itertools.product(ONE, (0, 1, 2), (False, True)):
        if name not in skip:
            out[f"{name} {dim} keepdim={keep}"] = ONE[name](x, dim, keep)
    return out


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", list(layouts()))
def test_every_set_of_dimensions(layout: str) -> None:
    x = layouts()[layout]
    check(lambda x: list(reductions(x).values()), x, names=list(reductions(x)))


@pytest.mark.parametrize("layout", list(layouts()))
def test_rows_along_every_dimension(layout: str) -> None:
    x = layouts()[layout]
    names = [f"{n} {d}" for n in ROWS for d in range(3)]
    check(lambda x: [ROWS[n](x, dim=d) for n in ROWS for d in range(3)], x, names=names)


@pytest.mark.sample(4)
@pytest.mark.parametrize("shape", [(1, 6, 7), (5, 1, 7), (5, 6, 1), (1, 1, 1)], ids=str)
def test_dimensions_of_size_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    names = list(reductions(x, ("var",)))
    check(lambda x: list(reductions(x, ("var",)).values()), x, names=names)


@pytest.mark.parametrize("shape", [(0, 6, 7), (5, 0, 7), (5, 6, 0)], ids=str)
def test_dimensions_of_size_zero(shape: tuple[int, ...]) -> None:
    names = [n for n in SEVERAL if n not in ("amax", "amin", "logsumexp", "var")]  # eager warns or raises
    labels = [f"{n} {d}" for n in names for d in DIMS]
    check(lambda x: [SEVERAL[n](x, dim=d, keepdim=False) for n in names for d in DIMS], torch.ones(shape), names=labels)
    kept = [d for d in range(3) if shape[d] != 0]
    check(lambda x: [r(x, d, False) for r in ONE.values() for d in kept], torch.ones(shape))
    check(lambda x: [x.sum(), x.prod(), x.exp(), F.softmax(x, -1), x.cumsum(1)], torch.ones(shape))


def test_scans_of_size_one_and_beside_other_shapes() -> None:
    x = torch.randn(4, 1, 6)
    check(lambda x: [x.cumsum(1), x.reshape(2, 12).cumsum(1), x + 1, x.cumsum(2).reshape(8, 3) * 2, x.cumprod(0)], x)


def test_everything_at_once_and_zero_dimensional() -> None:
    fns: list[Callable[..., Any]] = [
        torch.sum,
        torch.mean,
        torch.prod,
        torch.amax,
        torch.min,
        torch.argmax,
        torch.argmin,
        torch.var,
        torch.any,
    ]
    for x in (torch.randn(3, 4, 5), torch.tensor(2.5), torch.randn(7, 9).t()):
        check(lambda x: [f(x) for f in fns if f is not torch.var or x.dim()], x)
    check(lambda x: [x.sum(0), x.amax(-1), F.softmax(x, 0), x.cumsum(0), x.argmax(0)], torch.tensor(1.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_float_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(5, 6, 7).to(dtype)
    names = [n for n in reductions(x, ("max at", "min at")) if "arg" not in n]

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        made = reductions(x, ("max at", "min at", "argmax", "argmin"))
        return [*(made[n] for n in names), *(ROWS[n](x, dim=d) for n in ROWS for d in range(3))]

    check(fn, x, names=[*names, *(f"{n} {d}" for n in ROWS for d in range(3))])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool], ids=str)
def test_integer_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(60).reshape(3, 4, 5).remainder(11).to(dtype)
    fns: dict[str, Callable[..., Any]] = {"sum": torch.sum, "amax": torch.amax, "amin": torch.amin, "any": torch.any}
    fns |= {"all": torch.all, "prod": torch.prod, "cumsum": torch.cumsum}
    if dtype != torch.bool:  # eager has none of these for bool
        fns |= {"argmax": torch.argmax, "max": torch.max, "cumprod": torch.cumprod}

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        out: list[torch.Tensor] = []
        for f, d in itertools.product(fns.values(), range(3)):
            r = f(x, dim=d)
            out += [*r] if isinstance(r, tuple) else [r]
        return [*out, x.sum(), x.sum(dtype=torch.int32), x.sum(dtype=torch.float32), x.float().mean()]

    check(fn, x)


def test_nan_and_infinity() -> None:
    rows = [
        [1.0, math.nan, 3.0, math.inf],
        [-math.inf, -math.inf, -math.inf, -math.inf],
        [math.inf, math.inf, 1.0, 2.0],
        [math.nan, math.nan, math.nan, math.nan],
        [0.0, -0.0, 0.0, -0.0],
    ]
    x = torch.tensor(rows)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        rows = [x.amax(1), x.amin(1), x.argmax(1), x.argmin(1), x.sum(1), x.prod(1), x.mean(1), x.var(1), x.cumsum(1)]
        softmax = [F.softmax(x, 1), F.log_softmax(x, 1), torch.logsumexp(x, 1), x.amax(0), x.argmax(0), x.any(1)]
        pair = [torch.maximum(x, x.flip(1)), torch.minimum(x, x.flip(1)), torch.fmax(x, x.flip(1)), x.clamp(-1, 1)]
        return [*rows, *softmax, *pair, *x.max(1), *x.min(0)]

    check(fn, x)


def test_first_of_equal_extrema_is_taken() -> None:
    x = torch.tensor([[1, 3, 3, 1], [2, 2, 2, 2], [0, 0, -1, -1]])
    check(lambda x: [x.argmax(1), x.argmin(1), x.argmax(0), *x.max(1), *x.float().min(1), x.argmax()], x)


@pytest.mark.parametrize("options", [{"parallel_threshold": 0, "threads": 3}, {"fuse": False}, {}], ids=str)
def test_long_reductions(options: dict[str, Any]) -> None:
    """More than one block of a float32 sum, and several threads' partial results."""
    x, y = torch.randn(3, 20_000) + 1, torch.randn(20_000, 3) + 1

    def fn(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for t in (x, y):
            out += [t.sum(), t.mean(), t.sum(0), t.sum(1), t.amax(), t.amin(0), t.argmax(0), t.argmax(1), t.argmin()]
            out += [t.var(0), t.var(1), F.softmax(t, 0), F.log_softmax(t, 1), t.cumsum(0), t.cumsum(1), (t > 4).any()]
        return out

    check(fn, x, y, **options)


def test_long_sums_are_as_accurate_as_eagers() -> None:
    x = torch.rand(1 << 20) + 1
    check(lambda x: [x.sum(), x.mean(), (x * x).sum()], x, tolerance=1e-6)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradients(dim: int) -> None:
    x = torch.randn(4, 5, 6)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        several = [f(x, dim=dim, keepdim=False) for n, f in SEVERAL.items() if n not in ("any", "all")]
        return [*several, x.prod(dim), x.max(dim).values, *(f(x, dim=dim) for f in ROWS.values())]

    check_gradients(fn, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_losses(dtype: torch.dtype) -> None:
    x, target = torch.randn(12, 33).to(dtype), torch.randint(0, 33, (12,))

    def fn(x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        return [
            F.cross_entropy(x, target),
            F.cross_entropy(x, target, label_smoothing=0.1, reduction="sum"),
            F.cross_entropy(x, target, ignore_index=3),
            F.mse_loss(x, x.detach() * 0.5),
            F.smooth_l1_loss(x, x.detach() * 0.5),
            F.binary_cross_entropy_with_logits(x, (x.detach() > 0).to(x.dtype)),
            F.kl_div(F.log_softmax(x, -1), F.softmax(x.detach().flip(0), -1), reduction="batchmean"),
        ]

    check_gradients(fn, x, target)


@pytest.mark.parametrize("dims", [(1,), (0, 1)], ids=str)
def test_gradient_of_logsumexp_in_16_bits(dims: tuple[int, ...]) -> None:
    # The largest element of a row decides alone. Its gradient exp(x - logsumexp) is 1 only if both are rounded alike.
    x, w = (torch.randn(6, 40).mul(30).bfloat16(), torch.rand(40).add(1).bfloat16())

    def gradient(f: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        leaf = args[0].detach().requires_grad_()
        return torch.autograd.grad(f(leaf, *args[1:]).sum(), leaf)[0].double()

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(x * w, dims)

    exact, eager = gradient(loss, x.double(), w.double()), gradient(loss, x, w)
    got = gradient(torch.compile(loss, backend="alt"), x, w)
    assert (got - exact).norm() <= 1.5 * (eager - exact).norm() + 0.01 * exact.norm()


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_position_in_one_element_needs_no_operand(name: str) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        position = getattr(torch, name)
        return [position(x.exp(), 1), position(x.sin(), 1, keepdim=True), position(x[:1, :, :1].cos())]

    x = torch.randn(3, 1, 1)
    x[0] = math.nan
    check(fn, x)
    kernels = [k for k in schedule(trace(fn, x)[0]).steps if isinstance(k, Kernel)]
    assert not any(va.loads(q.value) for k in kernels for stage in k.stages for q in stage.members)
