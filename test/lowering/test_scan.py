"""Running sums, products and extrema, and positions of extrema."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from test.compare import check, check_gradients
from test.graphs import schedule, trace

pytestmark = pytest.mark.sample(2)

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "wide rows": lambda: torch.randn(3, 200),
    "tall": lambda: torch.randn(130, 7),
    "three": lambda: torch.randn(20, 9, 66),
    "transposed": lambda: torch.randn(6, 50, 4).permute(2, 0, 1),
    "one": lambda: torch.randn(1, 5, 1),
    "scalar": lambda: torch.randn(()),
}


def scans(x: torch.Tensor) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    for d in range(max(x.dim(), 1)):
        out += [x.cumsum(d), x.cumprod(d), *x.cummax(d), *x.cummin(d)]
        out += [x.logcumsumexp(d)] if x.is_floating_point() else []
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    check(scans, LAYOUTS[layout]())


def test_gradients() -> None:
    check_gradients(lambda x: [x.cumsum(0), x.logcumsumexp(0), x.cumsum(1), x.cummax(1)[0]], torch.randn(9, 40))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.randint(0, 3, (5, 70)).to(dtype)
    sums = [torch.cumsum, torch.cumprod]
    check(lambda x: [f(x, d) for f in sums for d in (0, 1)] + [x.cumsum(0, dtype=torch.float32)], x)
    check(lambda x: [*x.cummax(0), *x.cummin(1)], x)


def test_special_values_and_ties() -> None:
    rows = [[1.0, 3.0, 3.0, 2.0, float("nan"), 9.0], [0.0, -0.0, float("-inf"), float("inf"), float("inf"), 1.0]]
    x = torch.tensor(rows)
    check(lambda x: [*x.cummax(1), *x.cummin(1), *x.cummax(0), x.cumsum(1), x.logcumsumexp(1)], x)


def test_scans_between_other_operators() -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = (x * 2 + 1).cumsum(1)
        z = (y - y.mean(1, keepdim=True)).cumsum(2) * x
        return [z, z.sum(2), (z.cumsum(0) - y).amax(1)]

    for shape in ((4, 8, 32), (2, 33, 96), (1, 3, 1)):
        check(fn, torch.randn(shape))


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_of_extrema(layout: str) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        out = [x.argmax(), x.argmin()]
        for d in range(max(x.dim(), 1)):
            out += [x.argmax(d), x.argmin(d, keepdim=True), *x.max(d), *x.min(d, keepdim=True)]
        return out

    x = LAYOUTS[layout]()
    for y in (x, x.round(), x.round().to(torch.int32), torch.where(x > 1, float("nan"), x)):
        check(fn, y)
    check(lambda x: [(x * 2 + x.sum()).argmax(0), x.sin().max(x.dim() - 1)[1]], x)


@pytest.mark.parametrize("shape", [(9, 70), (3, 5, 33)], ids=str)
def test_scans_of_costly_terms(shape: tuple[int, ...]) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * torch.sigmoid(x)
        return [y.cumsum(-1), y.exp().cumsum(0), (y + 1).cumprod(-1).log_softmax(-1), x.tanh().cummax(-1)[0]]

    check(fn, torch.randn(shape))


def test_costly_terms_of_a_scan_along_neighbours_have_a_loop_of_their_own() -> None:
    def stages(fn: Callable[[torch.Tensor], torch.Tensor]) -> int:
        (k,) = schedule(trace(fn, torch.randn(64, 192))[0]).steps
        return len(k.stages)

    assert stages(lambda x: (x.sigmoid() * x).cumsum(1)) == 2
    assert stages(lambda x: (x + 1).cumsum(1)) == 1
    assert stages(lambda x: x.sigmoid().cumsum(0)) == 1  # columns side by side are a vector
    long_row = schedule(trace(lambda x: x.sigmoid().cumsum(0), torch.randn(1 << 20))[0])
    assert long_row.kernels == 2  # the terms run on all threads
