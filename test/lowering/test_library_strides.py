"""Library calls get arguments with the strides that tracing gave them, gaps between rows included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from test.compare import compiled

T = torch.Tensor


@torch.library.custom_op("test_library_strides::room", mutates_args=())
def room(x: T) -> T:
    """Return the strides of a tensor, and whether its storage holds the gap behind its last row, and all points."""
    held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    rows = [step * n for step, n in zip(x.stride(), x.shape, strict=True)]
    last = sum(rows) - sum(x.stride())
    return torch.tensor([*x.stride(), held >= max(rows), held > last])


@room.register_fake
def _(x: T) -> T:
    return torch.empty(x.dim() + 2, dtype=torch.int64)


def rows_with_gaps(x: T) -> T:
    return room(F.pad(x.sin(), (0, 15))[..., :49])


def repeated_rows_with_gaps(x: T) -> T:
    return room(F.pad(x.sin(), (0, 15))[..., :49].expand(5, 3, 49, 49))


def columns_with_gaps(x: T) -> T:
    return room(F.pad(x.cos(), (0, 0, 0, 7))[..., :49, :].mT)


def windows_that_overlap(x: T) -> T:
    return room(x.flatten().sin().as_strided((40, 9), (3, 1)))


@pytest.mark.parametrize("fn", [windows_that_overlap, rows_with_gaps, repeated_rows_with_gaps, columns_with_gaps])
@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_gaps_are_kept_and_belong_to_the_storage(fn: object, numerics: str) -> None:
    x = torch.randn(1, 3, 49, 49)
    want = fn(x)  # type: ignore[operator]
    assert torch.equal(compiled(fn, numerics=numerics)(x), want)  # type: ignore[arg-type]
