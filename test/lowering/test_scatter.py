"""Stores to data-dependent positions: scatter, index_add, index_put and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from altbackend.report import stats
from test.compare import check, check_gradients, compiled

pytestmark = pytest.mark.sample(3)

aten = torch.ops.aten


def every_scatter(x: torch.Tensor, dim: int, at: torch.Tensor, src: torch.Tensor) -> list[torch.Tensor]:
    unique = at.argsort(dim).argsort(
        dim
    )  # set: each position once, since eager's result is unspecified for repeated ones
    out = [x.scatter(dim, unique, src), x.scatter(dim, at, 2), x.scatter_add(dim, at, src)]
    for how in ("sum", "prod", "amax", "amin", "mean"):
        out += [x.scatter_reduce(dim, at, src, how, include_self=s) for s in (True, False)]
    return out


def fewer(x: torch.Tensor) -> torch.Tensor:
    """Return a shape for the source of a scatter: at most the size of x in each dimension."""
    return x[tuple(slice(0, max(n - 1, 1)) for n in x.shape)]


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.randn(9, 70),
    "transposed": lambda: torch.randn(70, 9).t(),
    "channels last": lambda: torch.randn(2, 5, 4, 3).to(memory_format=torch.channels_last),
    "one": lambda: torch.randn(1, 6),
    "vector": lambda: torch.randn(33),
    "sliced": lambda: torch.randn(12, 40)[::2, 3:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scatter_along_every_dimension(layout: str) -> None:
    x = LAYOUTS[layout]()
    src = torch.randn(fewer(x).shape)
    at = [torch.randint(0, x.shape[d], src.shape) for d in range(x.dim())]
    check(lambda x, src, *at: [t for d, a in enumerate(at) for t in every_scatter(x, d, a, src)], x, src, *at)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float64], ids=str)
def test_scatter_dtypes(dtype: torch.dtype) -> None:
    x, src = (torch.randint(0, 5, (7, 20)).to(dtype) for _ in range(2))
    check(lambda x, at, src: every_scatter(x, 0, at, src), x, torch.randint(0, 7, (7, 20)), src)


def test_low_precision_accumulates_in_float32() -> None:
    x, src = torch.zeros(3, 40, dtype=torch.bfloat16), torch.rand(500, 40).bfloat16()
    at = torch.randint(0, 3, (500,))
    got = compiled(lambda x, at, src: x.index_add(0, at, src))(x, at, src)
    exact = x.double().index_add(0, at, src.double())
    assert ((got.double() - exact).abs() <= exact.abs() * torch.finfo(torch.bfloat16).eps).all()


def test_bool_tensors() -> None:
    x = torch.rand(6, 8) > 0.5
    at = torch.randint(0, 6, (4, 8))
    check(lambda x, at: [x.scatter(0, at, True), x.index_fill(0, at[0, :2], False)], x, at)


def test_empty_and_zero_dimensional() -> None:
    x, none, zero = torch.randn(4, 3), torch.zeros(0, 3, dtype=torch.int64), torch.tensor(0)

    def fn(x: torch.Tensor, none: torch.Tensor, zero: torch.Tensor) -> list[torch.Tensor]:
        y = x[0, 0]
        out = [x.scatter_add(0, none, x), x.index_add(0, none[:, 0], x[:0]), x[:0].index_add(0, none[:, 0], x[:0])]
        out += [y.scatter_add(0, zero, x[1, 1]), y.scatter_reduce(0, zero, x[1, 1], "amax")]
        return [*out, y.index_add(0, zero, x[1, 1]), y.gather(0, zero), y.index_select(0, zero)]

    check(fn, x, none, zero)


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_index_add_copy_reduce_fill() -> None:
    def fn(x: torch.Tensor, at: torch.Tensor, src: torch.Tensor) -> list[torch.Tensor]:
        rows, columns = torch.arange(4).flip(0), at % x.shape[1]
        out = [
            x.index_add(0, at, src),
            x.index_add(0, at, src, alpha=-2),
            x.index_add(1, columns, src.t()[: x.shape[0]]),
        ]
        out += [x.index_copy(0, rows, src[:4]), x.index_fill(1, columns, 3)]
        return out + [
            x.index_reduce(0, at, src, h, include_self=s) for h in ("prod", "amax", "amin") for s in (True, False)
        ]

    check(fn, torch.randn(6, 30), torch.randint(0, 6, (30,)), torch.randn(30, 30))


def test_index_put() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        mask = x[:, 0, 0] > 0
        return [
            x.index_put((i,), v[:, None, None], accumulate=True),
            x.index_put((i, j), v[:, None], accumulate=True),
            x.index_put((i[:, None], j[None, :2]), v[:, None, None], accumulate=True),
            aten.index_put(x, [i, None, j], v[:, None], True),
            aten.index_put(x, [None, j, i % 4], v, True),
            x.index_put((torch.tensor([0, -1]),), v[:2, None, None]),
            x.index_put((mask,), v[0]),
            x.index_put((x > 0,), v[0], accumulate=True),
        ]

    check(fn, torch.randn(6, 5, 4), torch.randint(-6, 6, (9,)), torch.randint(-4, 4, (9,)), torch.randn(9))


def test_embedding_gradient() -> None:
    def fn(weight: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
        f = torch.nn.functional.embedding
        return [f(at, weight), f(at, weight, padding_idx=weight.shape[0] // 2), f(at[0, 0], weight)]

    for shape in ((20, 64), (20, 1), (1, 200), (20, 193)):
        check_gradients(fn, torch.randn(shape), torch.randint(0, shape[0], (3, 17)))
    check_gradients(fn, torch.randn(20, 64).bfloat16(), torch.randint(0, 20, (3, 17)))


def test_gradients_of_gathers_and_scatters() -> None:
    def fn(x: torch.Tensor, src: torch.Tensor, at: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        out = [x.gather(0, at), x.index_select(0, row), x[row], x[row, row % 5], x.scatter_add(0, at, src)]
        return [*out, x.index_add(0, row, src), x.index_put((row,), src, accumulate=True), x.amax(0), *x.cummax(1)]

    check_gradients(
        fn, torch.randn(8, 70), torch.randn(12, 70), torch.randint(0, 8, (12, 70)), torch.randint(0, 8, (12,))
    )


def test_symbolic_sizes() -> None:
    def fn(x: torch.Tensor, at: torch.Tensor, src: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.index_add(0, at, src),
            x.index_put((at, at), src[:, 0], accumulate=True),
            src.cumsum(0),
            src.argmax(0),
        ]

    run = compiled(fn, dynamic=True)
    for n, m in ((6, 9), (5, 4), (70, 80)):
        args = torch.randn(n, n), torch.randint(0, n, (m,)), torch.randn(m, n)
        torch.testing.assert_close(run(*args), fn(*args))


OUT_OF_RANGE: Sequence[tuple[str, Callable[..., torch.Tensor], int]] = [
    ("index", lambda x, at: x[at], 5),
    ("index from the end", lambda x, at: x[at], -6),
    ("gather", lambda x, at: x.gather(0, at), 5),
    ("negative gather", lambda x, at: x.gather(0, at), -1),
    ("index_select", lambda x, at: x.index_select(0, at) + 1, -1),
    ("scatter", lambda x, at: x.scatter(0, at, 1.0), -1),
    ("index_add", lambda x, at: x.index_add(0, at, x[:2]), 5),
    ("index_put", lambda x, at: x.index_put((at,), x[0]), 7),
    ("embedding", lambda x, at: torch.nn.functional.embedding(at, x[:, None]), -1),
]


@pytest.mark.parametrize(("name", "fn", "bad"), OUT_OF_RANGE, ids=[case[0] for case in OUT_OF_RANGE])
def test_index_out_of_range(name: str, fn: Callable[..., Any], bad: int) -> None:
    x, run = torch.randn(5), compiled(fn)
    good = torch.tensor([1, 4])
    torch.testing.assert_close(run(x, good), fn(x, good))
    with pytest.raises((IndexError, RuntimeError)) as eager:
        fn(x, torch.tensor([1, bad]))
    with pytest.raises(eager.type, match=f"index {bad} is out of bounds .* size 5"):
        run(x, torch.tensor([1, bad]))
    torch.testing.assert_close(run(x, good), fn(x, good))  # the error of the last call has been cleared


def test_all_of_it_is_generated() -> None:
    before = stats.snapshot()
    x, at = torch.randn(9, 70), torch.randint(0, 9, (9, 70))
    compiled(lambda x, at: [x.scatter_add(0, at, x), x.scatter(0, at, 1.0), x.index_add(0, at[:, 0], x)])(x, at)
    assert (stats.snapshot() - before).library_calls == 0
