"""`masked_scatter`: positions of values, broadcast masks, dtypes, gradients, symbolic and unbacked sizes."""

from __future__ import annotations

import pytest
import torch

from test import triton_run
from test.compare import check, check_gradients, compiled

T = torch.Tensor


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def fn(x: T, mask: T, source: T) -> T:
    return x.masked_scatter(mask, source) * 1


SHAPES = [
    ((4, 5), (4, 5), (20,)),
    ((4, 5), (4, 1), (5, 6)),
    ((5,), (4, 5), (4, 5)),
    ((), (), (3,)),
    ((0, 3), (3,), (0,)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, mask, source = torch.randn(shapes[0]), torch.rand(shapes[1]) > 0.4, torch.randn(shapes[2])
    check(fn, x, mask, source)
    gpu = triton_run.compiled(fn, host=True)
    assert torch.equal(gpu(x, mask, source), fn(x, mask, source))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.complex64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    x, source = (torch.randn(4, 6).to(dtype) for _ in range(2))
    check(fn, x.t(), torch.rand(6, 4) > 0.5, source[:, ::1], tolerance=0)


def test_a_mask_without_elements_needs_no_source() -> None:
    check(fn, torch.randn(3, 2), torch.zeros(3, 2, dtype=torch.bool), torch.randn(0))
    check(fn, torch.randn(3, 2), torch.zeros(3, 2, dtype=torch.bool), torch.randn(1))


def test_gradients() -> None:
    mask = torch.rand(4, 5) > 0.5
    check_gradients(lambda x, s: fn(x, mask, s).sin(), torch.randn(4, 5), torch.randn(7, 3))
    check_gradients(lambda x, s: fn(x, mask[:, :1], s).sin(), torch.randn(4, 5), torch.randn(20))


def test_one_graph_for_all_sizes() -> None:
    run = compiled(fn, dynamic=True)
    for n in (4, 9):
        check(fn, torch.randn(n, 3), torch.rand(n, 3) > 0.5, torch.randn(3 * n), run=run)


def test_a_source_whose_size_data_decides() -> None:
    def selected(x: T, mask: T) -> T:
        return torch.zeros_like(x).masked_scatter(mask, x.masked_select(mask) * 2)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(selected, torch.randn(4, 5), torch.rand(4, 5) > 0.5)


def test_too_few_values_are_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        compiled(fn)(torch.randn(4), torch.ones(4, dtype=torch.bool), torch.randn(3))
