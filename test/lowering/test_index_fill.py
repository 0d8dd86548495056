"""`index_fill`: values of every kind, layouts that the result keeps, and gradients through repeated indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test.compare import check, check_gradients

REPEATED = [0, 2, -1, 2]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def layouts() -> dict[str, torch.Tensor]:
    wide = torch.randn(4, 6)
    return {
        "contiguous": torch.randn(4, 3),
        "transposed": torch.randn(3, 4).t(),
        "gaps": wide[:, ::2],
        "expanded": torch.randn(3).expand(4, 3),
        "0-dim": torch.randn(()),
    }


@pytest.mark.sample(3, every_value=True)
@pytest.mark.parametrize("name", list(layouts()))
@pytest.mark.parametrize("value", [2, 0.5, torch.tensor(7), torch.tensor(0.25, dtype=torch.float64)], ids=str)
def test_values_and_layouts(name: str, value: Any) -> None:
    x = layouts()[name]
    at = torch.tensor([0, 2] if x.dim() else [0])
    check(lambda x, i, j: (x.index_fill(0, i, value), x.index_fill(-1, j, value)), x, at, at[0].clone())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.bfloat16, torch.complex64], ids=str)
def test_the_value_takes_the_dtype(dtype: torch.dtype) -> None:
    x, i = torch.ones(3, 4).to(dtype), torch.tensor(REPEATED)
    check(lambda x, i: (x.index_fill(1, i, 0), x.index_fill(1, i, torch.tensor(3))), x, i)


def test_in_place() -> None:
    def fill(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.t().index_fill_(0, i, 3.0).sum()

    check(fill, torch.randn(3, 4), torch.tensor(REPEATED))


@pytest.mark.parametrize("name", ["contiguous", "transposed", "0-dim"])
def test_gradient_of_a_filled_tensor(name: str) -> None:
    i = torch.tensor([0, 2, 2]) if name != "0-dim" else torch.tensor([0, 0])
    check_gradients(lambda x, i: x.sin().index_fill(-1, i, 2.0), layouts()[name], i)


def test_gradient_of_the_value() -> None:
    """The gradient counts repeated indices once; the number of distinct indices depends on data."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fn = lambda x, v, i: x.index_fill(1, i, v)  # noqa: E731
        check_gradients(fn, torch.randn(3, 4), torch.tensor(2.0), torch.tensor([0, 2, 2, 2]))
