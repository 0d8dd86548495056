"""Pooling of every form, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.report import stats
from altbackend.schedule.kernel import Kernel
from test import graphs, triton_run
from test.compare import check, check_gradients, compiled, difference

pytestmark = pytest.mark.sample(3)

IMAGES: dict[str, Callable[[], torch.Tensor]] = {
    "batch": lambda: torch.randn(2, 3, 13, 17),
    "channels last": lambda: torch.randn(2, 5, 12, 9).to(memory_format=torch.channels_last),
    "unbatched": lambda: torch.randn(3, 9, 8),
    "sliced": lambda: torch.randn(1, 2, 20, 30)[..., ::2],
}


def max_pools(x: torch.Tensor) -> list[torch.Tensor]:
    forms: list[tuple[Any, Any, Any, int, bool]] = [
        (3, 2, 1, 1, False),
        (2, 2, 0, 1, True),
        (3, 1, 1, 2, False),
        ((2, 3), (1, 2), (1, 1), 1, True),
    ]
    out: list[torch.Tensor] = []
    for k, s, p, d, ceil in forms:
        out += F.max_pool2d(x, k, s, p, d, ceil, return_indices=True)
    return [*out, F.max_pool2d(x, (5, 1), 1)]


def avg_pools(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        F.avg_pool2d(x, 3, 2, 1),
        F.avg_pool2d(x, 3, 2, 1, True, False),
        F.avg_pool2d(x, 2, 2, 1, True, True),
        F.avg_pool2d(x, 3, 2, 0, True, True, 5),
        F.avg_pool2d(x, (2, 4), (1, 3)),
        F.avg_pool2d(x, 7, 2),  # beyond the unrolled windows
        F.avg_pool2d(x, 7, 2, 3),  # of padded ones, the library's
    ]


def adaptive_pools(x: torch.Tensor) -> list[torch.Tensor]:
    sizes = [(5, 4), (1, 3), (1, 1), (16, 20), (3, 3)]
    return [F.adaptive_avg_pool2d(x, size) for size in sizes]


def other_ranks(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """`x` [n, c, l], `y` [n, c, d, h, w]"""
    out = [F.avg_pool1d(x, 3, 2, 1, True, False), F.adaptive_avg_pool1d(x, 5), F.max_pool1d(x, 3)]
    out += [F.avg_pool3d(y, 3, 2, 1, True, False), F.avg_pool3d(y, 4, 1, 1), F.adaptive_avg_pool3d(y, (3, 4, 5))]
    return [*out, *F.max_pool3d(y, 2, 2, 1, return_indices=True)]


def adaptive_max_pools(x: torch.Tensor) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    for size in [(5, 4), (16, 20), (3, 3)]:
        out += F.adaptive_max_pool2d(x, size, return_indices=True)
    return out


@pytest.mark.parametrize("image", IMAGES)
def test_adaptive_max(image: str) -> None:
    check(adaptive_max_pools, IMAGES[image]())
    check_gradients(lambda x: adaptive_max_pools(x)[::2], IMAGES[image]())


def test_adaptive_in_other_dimensions() -> None:
    x, y = torch.randn(2, 3, 19), torch.randn(1, 2, 5, 6, 7)
    x[0, 1, 4] = float("nan")
    before = stats.snapshot()
    check_gradients(lambda x, y: [F.adaptive_max_pool1d(x, 5), F.adaptive_max_pool3d(y, (3, 4, 5))], x, y)
    assert (stats.snapshot() - before).library_calls == 0


@pytest.mark.parametrize("size", [(3, 4), (11, 2)])
def test_adaptive_average_of_symbolic_sizes(size: tuple[int, int]) -> None:
    before = stats.snapshot()
    check_gradients(lambda x: F.adaptive_avg_pool2d(x, size), torch.randn(2, 3, 9, 8), dynamic=True)
    assert (stats.snapshot() - before).library_calls == 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("image", IMAGES)
def test_images(image: str) -> None:
    check(lambda x: [*max_pools(x), *avg_pools(x), *adaptive_pools(x)], IMAGES[image]())


@pytest.mark.sample(4)
@pytest.mark.parametrize("image", IMAGES)
def test_gradients(image: str) -> None:
    check_gradients(lambda x: [*max_pools(x)[::2], *avg_pools(x), *adaptive_pools(x)], IMAGES[image]())


def test_one_and_three_dimensions() -> None:
    x, y = torch.randn(2, 3, 19), torch.randn(2, 3, 7, 9, 8)
    check(other_ranks, x, y)
    check_gradients(lambda x, y: other_ranks(x, y)[:-1], x, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 9, 11).to(dtype)
    check(lambda x: [*max_pools(x), *avg_pools(x), *adaptive_pools(x), *adaptive_max_pools(x)], x)


def test_nan_and_infinity() -> None:
    x = torch.randn(1, 2, 8, 8)
    x[0, 0, 2, 2] = x[0, 0, 2, 3] = x[0, 1, 5, 5] = float("nan")
    x[0, 1, :3, :3] = float("-inf")
    x[0, 0, 6, 6] = float("inf")
    check(max_pools, x)


def test_generated() -> None:
    before = stats.snapshot()
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    outs = compiled(lambda x: [*max_pools(x)[::2], *avg_pools(x)[:-1], *adaptive_pools(x)])(x)
    torch.autograd.grad([o.sum() for o in outs], [x])
    assert (stats.snapshot() - before).library_calls == 0


@pytest.mark.parametrize("size", [(3, 4), (6, 7)], ids=str)
def test_gradients_of_adaptive_averages_are_divided_once(size: tuple[int, int]) -> None:
    """Shares of fewer windows than elements are stored; the values are eager's."""
    x, g = torch.randn(2, 3, 8, 7), torch.randn(2, 3, *size)

    def fn(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._adaptive_avg_pool2d_backward(g, x)
        return y

    s = graphs.schedule(graphs.trace(fn, x, g)[0], ctx=triton_run.TARGET)
    text = [triton_run.emit(s.program, k)[0].source for k in s.steps if isinstance(k, Kernel)]
    assert sum(t.count("div_rn(") + t.count("quotient(t") for t in text) == (2 if size == (3, 4) else 8)
    assert not difference(triton_run.compiled(fn)(x, g), fn(x, g), tolerance=1e-6)
    check_gradients(lambda x: F.adaptive_avg_pool2d(x, size), x)
