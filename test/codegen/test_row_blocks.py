"""Rows of a CPU kernel that lie across the memory they read or write are read and written in blocks of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from test.compare import check, compiled

pytestmark = pytest.mark.sample(2)

T = torch.Tensor


def norm_across(x: T) -> T:
    """Rows along a dimension that is not the last in memory, with a plain result."""
    y = x.transpose(1, 2)
    return torch.nn.functional.layer_norm(y, y.shape[-1:]) + y.new_ones(y.shape[1:])


def to_columns(x: T) -> T:
    """Rows as memory lies, with the result turned over."""
    return torch.softmax(x, -1).transpose(1, 2).contiguous()


def both(x: T) -> tuple[T, T]:
    y = x.transpose(1, 2)
    total = y.contiguous().cumsum(-1) + torch.softmax(y.contiguous(), -1)
    return total.transpose(1, 2).contiguous(), total


def instance_norm(x: T) -> T:
    return torch.nn.functional.instance_norm(x.unsqueeze(-1).to(memory_format=torch.channels_last)).contiguous()


def few_rows_of_many_columns(x: T) -> T:
    return x.reshape(3, -1, 40).repeat(1, 400, 1).abs().sum(0).transpose(0, 1) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize(
    "sizes", [(3, 40, 121), (2, 75, 33), (1, 1000, 16), (2, 64, 1024), (2, 500, 1030), (3, 33, 700)], ids=str
)
@pytest.mark.sample(12, every_value=True)
@pytest.mark.parametrize("threads", [1, 2])
def test_values(sizes: tuple[int, int, int], dtype: torch.dtype, threads: int) -> None:
    x = torch.randn(sizes) if dtype.is_floating_point else torch.randint(-9, 9, sizes)
    x = x.to(dtype)
    count = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for fn in (norm_across, to_columns, both, instance_norm):
            if dtype.is_floating_point:
                check(fn, x)
        check(lambda x: x.transpose(1, 2).contiguous().cumsum(-1).amax(-1), x)
    finally:
        torch.set_num_threads(count)


def test_parts_of_a_larger_tensor() -> None:
    """A row that begins inside of a storage, with neighbours that belong to others."""
    x = torch.randn(4, 50, 90)[1:3, 4:44, 3:80]
    check(norm_across, x)
    check(to_columns, x)


def test_sums_of_few_rows() -> None:
    check(few_rows_of_many_columns, torch.randn(3, 40, 80))
    check(lambda x: x.sum(0), torch.randn(4, 256, 256))
    check(lambda x: (x.exp().sum(0), x * 2), torch.randn(4, 256, 256))
    check(lambda x: x.sum((0, 2)).amax(0), torch.randn(4, 256, 3, 256))


def test_blocks_are_used(tmp_path: Path) -> None:
    compiled(both, debug_dir=str(tmp_path), cache_graphs=False)(torch.randn(2, 64, 1024))
    text = "".join(p.read_text() for p in tmp_path.glob("*/*kernels.cpp"))
    assert "* const q0 = b0 + " in text


def test_short_rows_are_turned_over_too(tmp_path: Path) -> None:
    compiled(to_columns, debug_dir=str(tmp_path), cache_graphs=False)(torch.randn(3, 50, 75))
    assert "alt::transpose(" in "".join(p.read_text() for p in tmp_path.glob("*/*kernels.cpp"))


WIDTHS = [torch.bool, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.sample(8, every_value=True)
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 64, 28), (3, 32, 10), (5, 24, 5), (2, 8, 17), (1, 130, 9), (2, 33, 31)], ids=str)
def test_pointwise_kernels_between_layouts(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch, channels, side = sizes
    x = torch.randn(batch, channels, side, side).mul(3).to(dtype)
    check(lambda x: torch.where(x > 0, x, ~x if dtype == torch.bool else -x).to(memory_format=torch.channels_last), x)
    check(lambda x: (x == x.flip(2)).contiguous(), x.to(memory_format=torch.channels_last))
    check(lambda x: x.flip(0, 1).permute(0, 3, 2, 1).contiguous().ne(0), x)


def test_tiles_of_symbolic_sizes(tmp_path: Path) -> None:
    run = compiled(
        lambda x: (x * 2).transpose(0, 1).contiguous(), dynamic=True, debug_dir=str(tmp_path), cache_graphs=False
    )
    for rows, columns in ((130, 70), (64, 64), (16, 200), (17, 65), (3, 9)):
        x = torch.randn(rows, columns)
        assert torch.equal(run(x), (x * 2).t())
    assert "alt::transpose(p0 + " in "".join(p.read_text() for p in tmp_path.glob("*/*kernels.cpp"))


def test_totals_lie_as_their_operands_do(tmp_path: Path) -> None:
    """A softmax along the height of a channels-last image has a total for each channel of a line, side by side."""

    def fn(x: T) -> T:
        return (x * 2).softmax(2).mean(2) + x.amax(2)

    x = torch.randn(2, 24, 9, 11).to(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(fn, debug_dir=str(tmp_path), cache_graphs=False)(x), fn(x))
    assert "= in_row sum(i0) " in "".join(p.read_text() for p in tmp_path.glob("*/*kernels.txt"))


def test_no_kernel_of_two_orders_runs_on_one_thread(tmp_path: Path) -> None:
    """The maximum of windows channels-last and its positions plain are two kernels, each with parallel rows."""

    def fn(x: T) -> tuple[T, T]:
        values, positions = F.max_pool2d(x, 3, 1, 1, return_indices=True)
        return values.to(memory_format=torch.channels_last), positions

    x = torch.randn(8, 24, 14, 14)
    check(fn, x)
    compiled(fn, debug_dir=str(tmp_path), cache_graphs=False)(x)
    assert "const int threads = 1;" not in "".join(p.read_text() for p in tmp_path.glob("*/*kernels.cpp"))


ORDERS = [
    ((52, 8, 128), (2, 1, 0)),
    ((30, 5, 33), (2, 1, 0)),
    ((32, 6, 5, 48), (3, 1, 2, 0)),
    ((17, 4, 3, 19), (3, 2, 1, 0)),
]


@pytest.mark.sample(8, every_value=True)
@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize(("sizes", "order"), ORDERS, ids=str)
def test_the_first_and_the_last_dimension_exchanged(
    sizes: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(sizes).mul(3).to(dtype)
    y, small = x.permute(order).contiguous().flip(0), x[..., :1].permute(order)
    check(lambda x: x.permute(order).contiguous(), x)
    check(lambda x, y: torch.where(x.permute(order) == y, x.permute(order), y), x, y)
    check(lambda x, y, z: (x.permute(order).ne(y).logical_or(z), y.permute(order).contiguous()), x, y, small)


def test_rows_of_exchanged_dimensions_are_turned_over(tmp_path: Path) -> None:
    """Loads along the last dimension lie along rows whose neighbours are neighbours in memory."""
    run = compiled(lambda x: x.permute(2, 1, 0).contiguous(), debug_dir=str(tmp_path), cache_graphs=False)
    run(torch.randn(64, 6, 48))
    assert "alt::transpose(" in "".join(p.read_text() for p in tmp_path.glob("*/*kernels.cpp"))


def test_exchanged_dimensions_of_symbolic_sizes() -> None:
    run = compiled(lambda x: (x * 2).permute(2, 1, 0).contiguous(), dynamic=True, cache_graphs=False)
    for sizes in ((40, 7, 50), (64, 3, 64), (9, 12, 130), (33, 2, 5)):
        x = torch.randn(sizes)
        assert torch.equal(run(x), (x * 2).permute(2, 1, 0))


def test_columns_of_less_than_a_cache_line_keep_their_rows(tmp_path: Path) -> None:
    """Rows in another order would write parts of cache lines that lie far apart."""
    run = compiled(lambda x: x.permute(2, 1, 0).contiguous(), debug_dir=str(tmp_path), cache_graphs=False)
    x = torch.randn(12, 6, 48)
    assert torch.equal(run(x), x.permute(2, 1, 0))
    assert "alt::transpose(" not in "".join(p.read_text() for p in tmp_path.glob("*/*kernels.cpp"))
