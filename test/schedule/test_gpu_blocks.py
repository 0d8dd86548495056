"""Blocks of GPU kernels: windows, tiles that stay in registers, and the direction in which rows lie. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.codegen.triton import print_triton
from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.rows import ROW_TILE
from altbackend.schedule.tiling.gpu.blocks import WARP, Blocks, Form
from altbackend.schedule.tiling.gpu.choose import choose_blocks
from altbackend.schedule.tiling.gpu.tiled import tile_kernel
from test import triton_run
from test.compare import difference
from test.graphs import schedule, trace

pytestmark = pytest.mark.sample(2)

T = torch.Tensor
ON_GPU = ScheduleContext(H200)
SMALL_GPU = ScheduleContext(replace(H200, sms=1))  # filled by 128 columns


def blocks_of(fn: Callable[[T], Any], x: T) -> list[Blocks]:
    scheduled = schedule(trace(fn, x)[0], ctx=ON_GPU)
    return [choose_blocks(scheduled.program, k, H200) for k in scheduled.steps if isinstance(k, Kernel)]


def elements_of_thread(b: Blocks) -> int:
    return b.xblock * max(b.rblocks.values(), default=1) // (WARP * b.warps)


def image(dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> T:
    return torch.empty(8, 64, 112, 112, dtype=dtype).to(memory_format=memory_format)


@pytest.mark.parametrize(
    ("stride", "dtype", "elements"),
    [(1, torch.float32, 2), (1, torch.bfloat16, 4), (2, torch.float32, 2), (2, torch.bfloat16, 2)],
    ids=str,
)
def test_threads_of_a_pool_lie_close_together(stride: int, dtype: torch.dtype, elements: int) -> None:
    (b,) = blocks_of(lambda x: F.max_pool2d(x, 3, stride, 1), image(dtype))
    assert elements_of_thread(b) == elements


def test_windows_of_whole_vectors_are_read_as_such() -> None:
    x = image(torch.bfloat16, torch.channels_last)
    (b,) = blocks_of(lambda x: F.max_pool2d(x, 3, 1, 1), x)
    assert elements_of_thread(b) >= 8


def test_threads_of_wide_windows_have_registers_for_their_loads() -> None:
    weight = torch.empty(64, 6, 3, 3, dtype=torch.bfloat16)
    x = torch.empty(8, 384, 21, 21, dtype=torch.bfloat16)
    (b,) = blocks_of(lambda x: F.conv2d(x, weight.to(x.device), padding=1, groups=64), x)
    assert elements_of_thread(b) == 2


@pytest.mark.parametrize(
    ("fn", "width", "elements"),
    [
        (lambda x: x[:, :1001].relu(), 1008, 4),
        (lambda x: x + x[0], 1001, 4),
        (lambda x: x.flip(1), 1001, 4),
        (lambda x: F.pad(x, (0, 7)), 1001, 16),  # neighbours share a row, and so its division
        (lambda x: x[:, :1000].relu(), 1008, 16),  # vectors
        (lambda x: x.relu(), 1001, 16),
    ],
    ids=["slice", "bias", "flip", "pad", "slice of vectors", "whole"],
)
def test_threads_read_few_elements_of_odd_rows(fn: Callable[[T], T], width: int, elements: int) -> None:
    (b,) = blocks_of(fn, torch.empty(2000, width, dtype=torch.bfloat16))
    assert b.form is Form.FLAT
    assert elements_of_thread(b) == elements


def test_corners_at_no_constant_distance_are_no_window() -> None:
    (b,) = blocks_of(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), image(torch.bfloat16))
    assert elements_of_thread(b) >= 8


def heavy(x: T) -> T:
    """Return a norm over dimension 1 of values that need several registers each."""
    y = (x.abs() * 7).long() % 100
    return F.rms_norm((y.to(x.dtype) * x).transpose(1, 2), (x.shape[1],)).transpose(1, 2)


def test_tiles_of_columns_stay_in_registers() -> None:
    light, costly = (
        blocks_of(fn, torch.empty(512, 500, 256))[-1] for fn in (lambda x: x.softmax(1), lambda x: heavy(x))
    )
    assert light.xblock == 16  # two sectors of float32
    assert 8 <= costly.xblock <= 16


def normalised(x: T) -> T:
    """Return sums over columns of what numbers of each point of a row, contiguous along it, shift."""
    y = x.log_softmax(2) + 1
    return (y.square() + 1).rsqrt().log_softmax(1).sum()


def test_small_operands_do_not_decide_the_direction_of_rows() -> None:
    _, columns, _ = blocks_of(normalised, torch.empty(40, 1632, 1024))
    assert columns.xblock == 64  # neighbouring columns of one program
    assert columns.looped(1632)


@pytest.mark.parametrize(
    ("fn", "are_columns"),
    [
        (lambda x: x[:, :, ::2].amax(1), True),
        (lambda x: x[:, :, 3::4].amin(1), True),
        (lambda x: x.flip(2).sum(1), True),
        (lambda x: x[:, :, ::5].sum(1), False),  # rows in sectors of their own
        (lambda x: x[:, :64, ::2].amax(1), False),  # a tile of short rows reads whole sectors
        (lambda x: x[:, :, ::2].amax(2), False),
    ],
    ids=["halves", "quarters", "backwards", "fifths", "short", "along"],
)
def test_columns_a_few_elements_apart_are_read_side_by_side(fn: Callable[[T], T], are_columns: bool) -> None:
    b, *_ = blocks_of(fn, torch.empty(64, 2048, 1024))
    assert (b.xblock * max(b.rblocks.values()) > ROW_TILE) == are_columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_a_few_elements_apart_are_equal_to_eager(dtype: torch.dtype) -> None:
    def fn(x: T) -> tuple[T, ...]:
        return x[:, :, ::2].amax(1), x[:, :, 1::3].softmax(1), x.flip(2).sum(1), F.avg_pool1d(x, 2).amin(1)

    x = torch.rand(2, 70, 38).to(dtype)
    for got, want in zip(triton_run.compiled(fn, ctx=ON_GPU)(x), fn(x), strict=True):
        assert not difference(got, want, strides=False, tolerance=1e-5 if dtype == torch.float32 else 1e-2)


def test_columns_that_begin_anywhere_take_registers_for_their_addresses() -> None:
    (odd,) = blocks_of(lambda x: x.log_softmax(1), torch.empty(64, 500, 505))
    assert odd.xblock == 32


@pytest.mark.parametrize(("points", "dtype", "columns"), [
    (32, torch.float32, 64),
    (128, torch.float32, 32),
    (248, torch.float32, 16),
    (248, torch.bfloat16, 32),
])  # fmt: skip
def test_tall_columns_are_read_in_two_sectors_or_fill_a_tile(points: int, dtype: torch.dtype, columns: int) -> None:
    (blocks,) = blocks_of(lambda x: x.softmax(1), torch.empty(1484, points, 256, dtype=dtype))
    assert blocks.xblock == columns


@pytest.mark.parametrize(("points", "width", "dtype", "tile"), [
    (64, 256, torch.bfloat16, (64, 2)),
    (16, 256, torch.bfloat16, (128, 1)),
    (200, 250, torch.float32, (16, 4)),  # two neighbours at a time
    (13, 36, torch.float32, (128, 1)),
    (13, 63, torch.float32, (128, 8)),  # single elements
    (25, 63, torch.float32, (128, 8)),
    (200, 63, torch.bfloat16, (32, 4)),
    (200, 63, torch.float32, (64, 16)),
])  # fmt: skip
def test_few_warps_share_columns(points: int, width: int, dtype: torch.dtype, tile: tuple[int, int]) -> None:
    (blocks,) = blocks_of(lambda x: x.log_softmax(1), torch.empty(4096, points, width, dtype=dtype))
    assert (blocks.xblock, blocks.warps) == tile


def test_totals_that_are_read_elsewhere_do_not_make_columns_unaligned() -> None:
    x = torch.empty(50_000, 3, 12, 12).to(memory_format=torch.channels_last)
    (blocks,) = blocks_of(lambda x: x.log_softmax(2).contiguous(), x)
    assert (blocks.xblock, blocks.warps) == (128, 1)


@pytest.mark.parametrize(("width", "tile"), [(64, (64, 1)), (63, (128, 4))])
def test_few_warps_share_columns_in_each_turn(width: int, tile: tuple[int, int]) -> None:
    """A cross entropy over channels is one loop over columns in each program."""
    target = torch.zeros(512, width, dtype=torch.int64)
    (blocks, *_) = blocks_of(lambda x: F.cross_entropy(x, target), torch.empty(512, 16, width, dtype=torch.bfloat16))
    assert blocks.form is Form.PERSISTENT
    assert (blocks.xblock, blocks.warps) == tile


def test_what_columns_share_does_not_make_them_unaligned() -> None:
    """A softmax over embedded words reads a place of the table for each word, and neighbouring columns there."""
    words = torch.zeros(50_000, 13, dtype=torch.int64)
    table = torch.empty(100, 32)
    blocks = blocks_of(lambda x: F.embedding(x, table).softmax(1), words)
    assert (blocks[-1].xblock, blocks[-1].warps) == (128, 2)


@pytest.mark.parametrize(("dtype", "rows"), [(torch.float32, 16), (torch.bfloat16, 32)], ids=str)
def test_scanned_rows_that_are_stored_side_by_side_fill_two_sectors(dtype: torch.dtype, rows: int) -> None:
    x = torch.empty(3307, 72, 14, 14, dtype=dtype).to(memory_format=torch.channels_last)
    (blocks,) = blocks_of(lambda x: x.cumsum(1).contiguous(), x)
    assert (blocks.xblock, blocks.warps) == (rows, 4)


@pytest.mark.parametrize(("width", "tile"), [(320, (64, 16, 1)), (321, (128, 32, 4))], ids=str)
def test_threads_that_scan_unaligned_columns_have_one(width: int, tile: tuple[int, int, int]) -> None:
    (blocks,) = blocks_of(lambda x: x.cumsum(2), torch.empty(152, 8, 321, width))
    assert (blocks.xblock, max(blocks.rblocks.values()), blocks.warps) == tile


def test_a_long_row_fills_its_blocks() -> None:
    def fn(x: T) -> T:
        return F.layer_norm(x, x.shape[1:]).relu()

    (short,), (long,) = (blocks_of(fn, torch.empty(4576, n, dtype=torch.bfloat16)) for n in (16384, 16896))
    assert max(long.rblocks.values()) == 4096
    assert max(short.rblocks.values()) == 16384


def products(x: T) -> T:
    """Return sums over points of an image times one of the other layout."""
    return (x * x.to(memory_format=torch.channels_last).sigmoid()).sum((2, 3))


def mixed(x: T, y: T) -> T:
    return (x * y).sum((2, 3))


def test_long_rows_that_lie_in_both_directions_are_read_in_squares() -> None:
    x = torch.empty(56, 256, 56, 56)
    y = x.to(memory_format=torch.channels_last)
    scheduled = schedule(trace(mixed, x, y)[0], ctx=ON_GPU)
    (k,) = (k for k in scheduled.steps if isinstance(k, Kernel))
    b = choose_blocks(scheduled.program, k, H200)
    assert b.xblock == 64
    assert b.looped(56 * 56)


def test_points_of_few_long_rows_that_share_nothing_with_the_totals_have_a_kernel_of_their_own() -> None:
    def fn(x: T, t: T) -> T:
        return x + t.sum(1)[:, None]

    x, t = torch.empty(448, 100_352), torch.empty(448, 32)
    scheduled = schedule(trace(fn, x, t)[0], ctx=ON_GPU)
    assert sum(isinstance(k, Kernel) for k in scheduled.steps) == 2
    many = schedule(trace(fn, torch.empty(4480, 30_000), torch.empty(4480, 32))[0], ctx=ON_GPU)
    assert sum(isinstance(k, Kernel) for k in many.steps) == 1


def test_long_rows_are_not_stored_in_parts_of_sectors() -> None:
    def fn(x: T) -> T:
        y = F.instance_norm(x)
        return y.contiguous(memory_format=torch.channels_last)

    scheduled = schedule(trace(fn, torch.empty(32, 16, 176, 176))[0], ctx=ON_GPU)
    kernels = [k for k in scheduled.steps if isinstance(k, Kernel)]
    assert choose_blocks(scheduled.program, kernels[-1], H200).form is Form.TRANSPOSE


def test_a_copy_between_short_loops_is_a_tile_of_both() -> None:
    x = torch.empty(512, 144, 8, 8).to(memory_format=torch.channels_last)
    (b,) = blocks_of(lambda x: x.permute(1, 2, 0, 3).contiguous(), x)
    assert b.form is Form.TRANSPOSE
    assert b.xblock * max(b.rblocks.values()) == 4096


@pytest.mark.parametrize(
    ("fn", "shape"),
    [(products, (2, 8, 40, 40)), (lambda x: x.log_softmax(2), (2, 3, 37, 45)), (lambda x: x.amax(2), (3, 5, 33, 9))],
    ids=["both directions", "columns", "narrow columns"],
)
def test_odd_columns_and_mixed_layouts_are_equal_to_eager(fn: Callable[[T], T], shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    got = triton_run.compiled(fn, ctx=ON_GPU)(x)
    assert not difference(got, fn(x), strides=False, tolerance=1e-5)


@pytest.mark.parametrize("fn", [normalised, heavy], ids=["normalised", "heavy"])
def test_equal_to_eager(fn: Callable[[T], T]) -> None:
    x = torch.rand(3, 40, 24)
    got = triton_run.compiled(fn, ctx=ON_GPU)(x)
    assert not difference(got, fn(x), strides=False, tolerance=1e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("sizes", "order", "columns"),
    [
        ((40, 30, 5, 7, 9), (4, 3, 1, 0, 2), 200),  # loads run on along dimension 3, stores along dimension 0
        ((9, 4, 6, 200), (0, 3, 1, 2), 24),  # rows and columns of one transposition
        ((6, 50, 3, 5), (0, 3, 2, 1), None),  # too short to be a side: elements in the order of the stores
    ],
    ids=str,
)
def test_sides_of_transposing_tiles_are_several_short_loops(
    sizes: tuple[int, ...], order: tuple[int, ...], columns: int | None
) -> None:
    def fn(x: T) -> T:
        return x.permute(order).contiguous()

    x = torch.randn(sizes)
    (b,) = blocks_of(fn, x)
    assert b.form is (Form.TRANSPOSE if columns else Form.FLAT)
    assert list(b.rblocks) == ([columns] if columns else [])
    assert torch.equal(triton_run.compiled(fn, ctx=ON_GPU)(x), fn(x))


# --- scans of columns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "rows"), [((1024, 880, 64), 64), ((64, 880, 129), 16)], ids=str)
def test_a_program_scans_several_columns_block_by_block(shape: tuple[int, ...], rows: int) -> None:
    (b,) = blocks_of(lambda x: x.cumsum(1), torch.empty(shape))
    assert b.xblock == rows
    assert b.looped(880)


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [10, 494, 4000])
def test_threads_scan_columns_alone(n: int) -> None:
    """A warp lies along columns, also where a result is the total of what it scans."""
    for fn in (lambda x: x.cumsum(1), lambda x: x.cumsum(1).norm(dim=1)):
        (b, *_) = blocks_of(fn, torch.empty(128, n, 512))
        assert (b.warps, b.xblock) == (1, WARP * b.run)
        assert b.looped(n) == (n > 10)


def test_columns_share_an_operand_of_their_points() -> None:
    seen: list[triton_run.Step] = []
    fn = lambda x, w: (x * w[:, :, None]).cumsum(1)  # noqa: E731
    inputs = torch.randn(3, 20, 128), torch.randn(3, 20)
    got = triton_run.compiled(fn, ctx=SMALL_GPU, seen=seen)(*inputs)
    assert not difference(got, fn(*inputs), strides=False, tolerance=2e-5)
    ((kernel, *_),) = (s for s in seen if not isinstance(s, Extern))
    assert "(program // 2) * 20 + r0" in kernel.source


def test_scanned_columns_leave_registers_for_what_reads_them() -> None:
    """Columns that begin anywhere: beside a scan, a thread has as many elements as the work on them leaves room for."""

    def gated(x: T, a: T, b: T) -> T:
        return x.flip(1).cumsum(1).flip(1) * a.relu() - b.exp() * a

    x = torch.empty(64, 96, 43, 43)
    (alone,) = blocks_of(lambda x: x.cumsum(1), x)
    assert (alone.xblock, *alone.rblocks.values()) == (128, 32)
    s = schedule(trace(gated, x, *(torch.empty_like(x) for _ in range(2)))[0], ctx=ON_GPU)
    (b,) = (choose_blocks(s.program, k, H200) for k in s.steps if isinstance(k, Kernel))
    assert (b.xblock, *b.rblocks.values()) == (128, 16)


@pytest.mark.parametrize(
    ("fn", "size", "warps"),
    [
        (lambda x: x.mean(2), 18, 1),
        (lambda x: x.amax(2), 13, 1),
        (lambda x: x.mean(2), 20, 1),  # columns that begin at whole vectors
        (lambda x: x.argmax(2), 18, 1),
        (lambda x: x.softmax(2), 18, 8),
    ],
    ids=["mean", "maximum", "aligned", "position", "softmax"],
)
def test_one_warp_totals_many_short_columns(fn: Callable[[T], T], size: int, warps: int) -> None:
    (b,) = blocks_of(fn, torch.empty(2500, 128, size, size))
    assert b.warps == warps
    x = torch.randn(3, 4, size, size)
    assert not difference(triton_run.compiled(fn, ctx=SMALL_GPU)(x), fn(x), strides=False, tolerance=2e-5)


def test_a_normalisation_of_scanned_columns_is_a_kernel_of_its_own() -> None:
    scan, *others = blocks_of(lambda x: x.cumsum(1).log_softmax(1), torch.empty(64, 880, 64))
    assert scan.looped(880)
    assert min(b.xblock for b in (scan, *others)) > 1


def test_readers_of_a_16_bit_scan_take_half_the_bytes() -> None:
    scheduled = schedule(trace(lambda x: x.cumsum(1).flip(1), image(torch.bfloat16))[0], ctx=ON_GPU)
    kernels = [k for k in scheduled.steps if isinstance(k, Kernel)]
    stored = {scheduled.program.buffers[b].dtype for k in kernels for b in k.stored}
    assert stored == {torch.bfloat16}


# the operations, and on a small GPU those of which each thread scans columns
SCANS: dict[str, tuple[Callable[[T], T], tuple[int, ...]]] = {
    "columns": (lambda x: x.cumsum(1), (2, 600, 5)),
    "flipped columns": (lambda x: (x.flip(1) * 2).cumsum(1).flip(1), (2, 600, 5)),
    "few columns": (lambda x: x.cumsum(0) + 1, (530, 3)),
    "a softmax": (lambda x: (x / 64).cumsum(1).log_softmax(1), (2, 520, 4)),
    "short columns": (lambda x: x.cumsum(1).amax(1), (3, 70, 6)),
    "a total": (lambda x: (x / 64).cumsum(1).norm(dim=1), (5, 37, 30)),
    "products": (lambda x: x.clamp(-1, 1).cumprod(1), (5, 16, 37)),
    "logarithms": (lambda x: x.logcumsumexp(1).sin(), (5, 19, 37)),
    "one number a row": (lambda x: x[:, :, :1].expand(-1, -1, 64).cumsum(1), (5, 19, 2)),
}


@pytest.mark.sample(4, every_value=True)
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_scanned_columns_are_equal_to_eager(name: str, dtype: torch.dtype, small: bool) -> None:
    torch.manual_seed(0)
    fn, shape = SCANS[name]
    x = torch.randn(shape).to(dtype)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    ctx = SMALL_GPU if small else triton_run.TARGET
    assert not difference(triton_run.compiled(fn, ctx=ctx)(x), fn(x), strides=False, tolerance=tolerance)


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(("window", "elements"), [(8, 2), (9, 2), (13, 1), (20, 1)])
def test_windows_beside_a_reduction_stay_in_the_cache(window: int, elements: int) -> None:
    def fn(x: T) -> T:
        return F.rms_norm(F.avg_pool1d(x, window, window), (7,))

    (b,) = blocks_of(fn, torch.empty(512, 400, 7 * window))
    assert elements_of_thread(b) == elements
    assert b.warps & (b.warps - 1) == 0
    x = torch.randn(6, 5, 7 * window)
    assert not difference(triton_run.compiled(fn)(x), fn(x), strides=False, tolerance=2e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("side", [13, 56, 80, 130])
def test_long_rows_of_windows_are_read_in_blocks(side: int) -> None:
    def fn(x: T) -> T:
        return F.avg_pool2d(x, 3, 1, 1).mean((2, 3)) + 1

    (b,) = blocks_of(fn, torch.empty(16, 96, side, side))
    assert elements_of_thread(b) == 2
    assert b.warps <= 8
    x = torch.randn(2, 3, side, side)
    assert not difference(triton_run.compiled(fn)(x), fn(x), strides=False, tolerance=2e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("side", [56, 80, 130])
def test_rows_of_windows_behind_statistics_fit_a_program(side: int) -> None:
    def fn(x: T) -> T:
        return F.instance_norm(F.avg_pool2d(x, 3, 1, 1))

    (b,) = blocks_of(fn, torch.empty(16, 96, side, side))
    assert b.warps * WARP <= H200.threads_per_sm // 2
    x = torch.randn(2, 3, side, side)
    assert not difference(triton_run.compiled(fn)(x), fn(x), strides=False, tolerance=2e-5)


def test_divisions_beside_wide_windows_have_registers() -> None:
    def fn(x: T) -> T:
        taps = [x[:, k : k + 1024] * float(k + 2) for k in range(0, 80, 4)]
        return sum(taps[1:], taps[0]) / (x[:, :1024].abs() + 1).sqrt()

    (b,) = blocks_of(fn, torch.empty(4096, 1104))
    assert elements_of_thread(b) <= 2


def test_loads_under_way_fit_in_shared_memory() -> None:
    """Each read of one tensor has a tile of its own in every stage of a loop's pipeline."""

    def fn(x: T) -> tuple[T, T]:
        y = sum((x[k : k + 65536] * float(k + 1) for k in range(10)), x.new_zeros(())).softmax(1)
        return y, y.sum(0)

    scheduled = schedule(trace(fn, torch.empty(65546, 64))[0], ctx=ON_GPU)
    loops = []
    for k in (k for k in scheduled.steps if isinstance(k, Kernel)):
        tiled = tile_kernel(scheduled.program, k, ON_GPU)
        if tiled.blocks.form is Form.PERSISTENT:
            source = print_triton.emit(scheduled.program, tiled)[0].source
            stages = re.search(r"num_stages=(\d)", source)
            loops.append((int(stages.group(1)) if stages else 1) - 1)
            tile = tiled.blocks.xblock * max(tiled.blocks.rblocks.values()) * 4
            assert loops[-1] * source.count("tl.load(in0 + (x * 64") * tile <= H200.shared_memory
            assert source.count("tl.load(in0 + (x * 64") == 10
    assert loops


@pytest.mark.parametrize(("points", "rows"), [(5, 32), (64, 4), (129, 4), (300, 2)])
def test_a_scan_along_short_rows_runs_in_one_warp(points: int, rows: int) -> None:
    (b,) = blocks_of(lambda x: x.cumsum(1), torch.empty(100_000, points))
    assert (b.xblock, b.warps) == (rows, 1)


def test_transposing_normalisations_take_runs_of_rows() -> None:
    x = torch.empty(512, 128, 11, 11).to(memory_format=torch.channels_last)
    (b,) = blocks_of(lambda x: x.log_softmax(1).contiguous(), x)
    assert b.xblock == 64


def test_windows_of_long_columns_are_read_in_blocks() -> None:
    def fn(x: T) -> T:
        y = sum((x[:, k : k + x.shape[1] - 9] * float(k + 1) for k in range(9)), x.new_zeros(()))
        return (y - y.mean(1, keepdim=True)).square().mean(1)

    (b, *_) = blocks_of(fn, torch.empty(64, 1000, 256))
    assert b.looped(991)
    assert elements_of_thread(b) <= 8
    x = torch.randn(2, 90, 12)
    assert not difference(triton_run.compiled(fn)(x), fn(x), strides=False, tolerance=2e-5)


def test_rows_that_are_read_across_and_stored_along_are_blocks() -> None:
    """A plain result of channels-last images and of totals of parts takes squares, not whole planes."""
    parts = torch.randn(40, 328, 192)
    x = torch.randn(328, 192, 32, 32).contiguous(memory_format=torch.channels_last)
    (b,) = blocks_of(lambda x: (x - parts.sum(0)[:, :, None, None]).contiguous(), x)
    assert b.long == {1024}
    assert (b.xblock, b.rblocks[1024]) == (64, 64)


@pytest.mark.parametrize(("images", "side", "rows"), [(128, 28, 8), (8192, 8, 512)])
def test_means_of_windows_take_tiles_where_a_thread_a_row_leaves_the_device_idle(
    images: int, side: int, rows: int
) -> None:
    weight = torch.empty(32, 1, 3, 3)

    def fn(x: T) -> T:
        return F.conv2d(x, weight.to(x.device), padding=1, groups=32).mean((2, 3))

    x = torch.empty(images, 32, side, side).to(memory_format=torch.channels_last)
    assert rows in {b.xblock for b in blocks_of(fn, x)}


def test_few_long_rows_that_are_stored_across_are_a_program_each() -> None:
    def fn(x: T) -> T:
        return F.instance_norm(x).sigmoid().contiguous(memory_format=torch.channels_last)

    blocks = blocks_of(fn, torch.empty(14, 3, 100, 100))
    assert all(b.xblock < 64 and isinstance(b.programs, int) and b.programs >= 42 for b in blocks)


@pytest.mark.parametrize(("width", "kernels"), [(8, 2), (64, 1)])
def test_windows_that_columns_read_in_short_runs_are_a_kernel_of_their_own(width: int, kernels: int) -> None:
    weight = torch.empty(96, 1, 3, 3)

    def fn(x: T) -> tuple[T, T]:
        y = F.conv2d(x, weight.to(x.device), padding=1, groups=96)
        return y, y.square().mean(2)

    assert len(blocks_of(fn, torch.empty(2048, 96, 8, width))) == kernels


def halves(x: T) -> T:
    return (x[:, ::2] + x[:, 1::2]).argmin(-1)


@pytest.mark.parametrize(
    ("fn", "shape", "dtype", "rows", "warps"),
    [
        (lambda x: x.mean(-1), (99_968, 49), torch.float32, 32, 1),
        (lambda x: x.argmax(-1), (99_968, 67), torch.bfloat16, 16, 1),
        (lambda x: x.softmax(-1), (99_968, 67), torch.float32, 8, 1),
        (lambda x: x.softmax(-1), (99_968, 66), torch.bfloat16, 8, 1),  # pairs
        (lambda x: x.softmax(-1), (99_968, 201), torch.float32, 4, 1),
        (lambda x: x.softmax(-1), (2_112, 201), torch.float32, 2, 1),  # fewer rows, so that programs fill the device
        (halves, (99_968, 128), torch.float32, 4, 1),  # elements that are apart
        (lambda x: x.flip(-1).softmax(-1), (99_968, 64), torch.float32, 4, 1),
        (lambda x: x.softmax(-1), (99_968, 64), torch.float32, 32, 4),  # whole vectors
        (lambda x: x.softmax(-1), (99_968, 501), torch.float32, 4, 4),
        (lambda x: x.softmax(-1), (99_968, 25), torch.float32, 64, 4),  # a warp has the whole row
    ],
)
def test_a_warp_has_whole_rows_of_which_threads_take_few_elements_at_once(
    fn: Callable[[T], T], shape: tuple[int, int], dtype: torch.dtype, rows: int, warps: int
) -> None:
    (b,) = blocks_of(fn, torch.empty(shape, dtype=dtype))
    assert (b.xblock, b.warps) == (rows, warps)
    x = torch.randn(37, shape[1]).to(dtype)
    assert not difference(triton_run.compiled(fn, ctx=SMALL_GPU)(x), fn(x), tolerance=1e-2 if x.itemsize == 2 else 1e-6)


@pytest.mark.parametrize(("width", "rows", "warps"), [(67, 4, 1), (33, 8, 1), (64, 64, 8), (200, 4, 2)])
def test_programs_with_totals_over_such_rows_have_one_warp(width: int, rows: int, warps: int) -> None:
    def totals(x: T) -> tuple[T, T]:
        y = x * (x * 2).mean(-1, keepdim=True)
        return y, y.sum(0)

    b = blocks_of(totals, torch.empty(99_968, width))[0]
    assert (b.form, b.xblock, b.warps) == (Form.PERSISTENT, rows, warps)
    x = torch.randn(37, width)
    for own, expected in zip(triton_run.compiled(totals, ctx=SMALL_GPU)(x), totals(x), strict=True):
        assert not difference(own, expected, tolerance=2e-5)


def test_one_warp_totals_columns_of_up_to_64_points() -> None:
    def fn(x: T) -> T:
        return x.argmin(1)

    (b,) = blocks_of(fn, torch.empty(3000, 34, 128, dtype=torch.bfloat16))
    assert (b.xblock, b.warps) == (32, 1)
    (short,) = blocks_of(fn, torch.empty(3000, 7, 512))
    assert (short.xblock, short.warps) == (256, 1)
    (few,) = blocks_of(fn, torch.empty(30, 34, 128, dtype=torch.bfloat16))
    assert few.warps > 1
    x = torch.randn(5, 34, 40)
    assert torch.equal(triton_run.compiled(fn, ctx=SMALL_GPU)(x), fn(x))


@pytest.mark.parametrize("dim", [4, 2])
def test_rows_of_a_volume_are_counted_as_its_statistics_lie(dim: int) -> None:
    """A softmax over the width, stored plain, is one kernel: depth and height are one part of a row's number."""

    def fn(x: T, b: T) -> T:
        return (x + b).exp().softmax(dim)

    def volume(*size: int) -> T:
        return torch.rand(size).contiguous(memory_format=torch.channels_last_3d)

    s = schedule(
        trace(fn, torch.empty(808, 8, 8, 8, 192).permute(0, 4, 1, 2, 3), torch.empty(192, 1, 1, 1))[0], ctx=ON_GPU
    )
    assert s.kernels == (1 if dim == 4 else 2)
    x, b = volume(2, 16, 3, 4, 5), torch.randn(16, 1, 1, 1)
    assert not difference(triton_run.compiled(fn, ctx=SMALL_GPU)(x, b), fn(x, b), strides=False, tolerance=1e-6)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("channels", "tile"), [(256, (4, 256)), (64, (16, 64)), (96, (8, 128)), (3, None)])
def test_rows_at_looked_up_places_are_tiles(channels: int, tile: tuple[int, int] | None) -> None:
    """Each row's place is computed once; plain images, whose columns are looked up, are not tiled."""

    def fn(x: T) -> T:
        return F.interpolate(x, scale_factor=2.0, mode="bilinear")

    (b,) = blocks_of(fn, torch.empty(40, 64, 64, channels).permute(0, 3, 1, 2))
    assert ((b.xblock, *b.rblocks.values()) if b.form is Form.TRANSPOSE else None) == tile
    if tile:
        (narrow,) = blocks_of(fn, torch.empty(40, 64, 64, channels, dtype=torch.bfloat16).permute(0, 3, 1, 2))
        assert (b.warps, narrow.warps) == (2, 1), "a thread stores 64 bytes"
    (plain,) = blocks_of(fn, torch.empty(40, channels, 64, 64))
    assert plain.form is Form.FLAT
    x = torch.randn(2, channels, 5, 7).contiguous(memory_format=torch.channels_last)
    small = ScheduleContext(replace(H200, sms=0))  # filled by any tile
    assert not difference(triton_run.compiled(fn, ctx=small)(x), fn(x), tolerance=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_that_are_scanned_across_and_stored_along_run_block_by_block(dtype: torch.dtype) -> None:
    def fn(x: T) -> T:
        return (x + 1).permute(1, 0).cumsum(1, dtype=dtype)

    (b,) = blocks_of(fn, torch.empty(624, 119_808, dtype=dtype))
    assert (b.xblock, *b.rblocks.values(), b.warps) == (64, 16, 1)
    x = torch.randn(530, 140).to(dtype)
    own, expected = triton_run.compiled(fn, ctx=SMALL_GPU)(x), fn(x)
    assert not difference(own, expected, fn(x.double()) if dtype != torch.float32 else None, tolerance=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_rows_that_are_read_across_and_stored_along_are_one_warps(dtype: torch.dtype) -> None:
    def fn(x: T, b: T) -> T:
        return (x + b).exp().softmax(4)

    def volume(*size: int) -> T:
        return torch.rand(size).to(dtype).contiguous(memory_format=torch.channels_last_3d)

    large = torch.empty(808, 8, 8, 8, 192, dtype=dtype).permute(0, 4, 1, 2, 3)
    s = schedule(trace(fn, large, torch.empty(192, 1, 1, 1, dtype=dtype))[0], ctx=ON_GPU)
    (b,) = (choose_blocks(s.program, k, H200) for k in s.steps if isinstance(k, Kernel))
    assert (b.xblock, *b.rblocks.values(), b.warps) == (64, 8, 1)
    x, bias = volume(2, 16, 3, 4, 5), torch.randn(16, 1, 1, 1).to(dtype)
    own, expected, exact = triton_run.compiled(fn, ctx=SMALL_GPU)(x, bias), fn(x, bias), fn(x.double(), bias.double())
    assert not difference(own, expected, exact, strides=False)


def test_windows_of_seven_over_volumes_are_summed_by_a_loop() -> None:
    def fn(x: T) -> T:
        return F.conv3d(x, torch.ones(96, 1, 7, 7, 7), padding=3, groups=96)

    b = max(blocks_of(fn, torch.empty(35, 96, 19, 19, 19)), key=lambda b: len(b.rblocks))
    assert (b.xblock, *b.rblocks.values(), b.warps) == (512, 1, 8)
