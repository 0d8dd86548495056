"""GPU kernels read and store whole sectors of memory, where two kernels do that and one cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from altbackend.ir import expr as ex
from altbackend.ir import value as va
from altbackend.ir.loops import Extern
from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.loop_mapping import Kind, MappedNode
from test import triton_run
from test.compare import as_list, difference
from test.graphs import schedule, trace

T = torch.Tensor
Functions = Callable[..., Any]


def kernels_of(fn: Functions, *inputs: T) -> list[Kernel]:
    steps = schedule(trace(fn, *inputs)[0], ctx=ScheduleContext(H200)).steps
    return [k for k in steps if not isinstance(k, Extern)]


def row_stride(q: MappedNode, index: ex.Index) -> ex.Index:
    return ex.sub(ex.substitute(index, {q.row: 1}), ex.substitute(index, {q.row: 0}))


def check(fn: Functions, *inputs: T) -> None:
    for got, want in zip(as_list(triton_run.compiled(fn)(*inputs)), as_list(fn(*inputs)), strict=True):
        assert not difference(got, want, strides=False, tolerance=2e-5)


def sums_and_shifts(x: T, y: T) -> tuple[T, T]:
    """Sum columns of each channel, and write the image plain: other loops, whose rows are as many by chance."""
    return (x * y).sum((2, 3)), (x[:, :, :, 1:] * 2 + x[:, :, :, :-1]).contiguous()


def test_columns_and_points_along_rows_are_kernels_of_their_own() -> None:
    x, y = (torch.randn(32, 96, 40, 48).to(memory_format=torch.channels_last) for _ in range(2))
    for k in kernels_of(sums_and_shifts, x, y):
        columns = [q for q in k.nodes if q.kind is Kind.IN_ROW and row_stride(q, va.loads(q.value)[0][1]) == 1]
        assert not columns or all(q.kind is not Kind.POINT or q.points == 1 for q in k.nodes)
    small = [torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last) for _ in range(2)]
    check(sums_and_shifts, *small)


def plain_softmax(x: T) -> T:
    weight = torch.linspace(1, 2, x.shape[1]).view(-1, 1, 1, 1)
    return ((x + weight).softmax(2) * weight).contiguous()


def test_rows_that_are_stored_in_another_order_are_turned_by_a_kernel_of_tiles() -> None:
    x = torch.randn(1, 16, 40, 96, 96).to(memory_format=torch.channels_last_3d)
    for k in kernels_of(plain_softmax, x):
        reduces = any(q.kind is Kind.IN_ROW for q in k.nodes)
        written = {q.node.out for q in k.nodes}
        for q in k.nodes:
            loads = [i for b, i in va.loads(q.value) if b not in written and q.row in ex.vars_of(i) and q.points != 1]
            stores = [q.index] if q.kind is Kind.POINT and q.node.out in k.stored else []
            for index in (*loads, *stores):
                along = any(ex.coefficient(index, v) == 1 for v in q.inner)
                assert along or row_stride(q, index) in (0, 1) or not reduces
    check(plain_softmax, torch.randn(2, 4, 3, 5, 6).to(memory_format=torch.channels_last_3d))


def windows_scanned(x: T) -> T:
    """Add three neighbours of a channels-last image in each step of a scan, whose result is plain."""
    return (x[:, :, 2:] + x[:, :, 1:-1] * 2 + x[:, :, :-2]).cumsum(3).contiguous()


def test_a_scan_numbers_its_rows_as_it_reads() -> None:
    x = torch.randn(2, 64, 70, 82).to(memory_format=torch.channels_last)
    scans = [q for k in kernels_of(windows_scanned, x) for q in k.nodes if q.kind is Kind.SCAN]
    assert scans
    assert all(row_stride(q, i) == 1 for q in scans for _, i in va.loads(q.value))
    check(windows_scanned, torch.randn(2, 6, 5, 9).to(memory_format=torch.channels_last))


def along_the_height(x: T) -> T:
    return (x + 1).softmax(2) * 2


def scanned_along_the_height(x: T) -> T:
    return (x + 1).cumsum(2) * 2


@pytest.mark.parametrize("image", [(8, 8), (7, 7)], ids=str)
@pytest.mark.parametrize("fn", [along_the_height, scanned_along_the_height])
def test_rows_along_a_third_dimension_read_a_copy_that_lies_as_the_result(
    fn: Callable[[T], T], image: tuple[int, int]
) -> None:
    def plain(x: T) -> T:
        return fn(x).contiguous()

    x = torch.randn(700, 64, *image).to(memory_format=torch.channels_last)
    rows = [
        q for k in kernels_of(plain, x) if any(q.kind in (Kind.IN_ROW, Kind.SCAN) for q in k.nodes) for q in k.nodes
    ]
    assert rows
    written = {q.node.out for q in rows}
    reads = [(q, i) for q in rows for b, i in va.loads(q.value) if b not in written]
    assert reads
    assert all(row_stride(q, i) == 1 for q, i in reads)
    check(plain, torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last))


def softmax_along_the_width(x: T) -> T:
    """Normalise rows whose channels are neighbours in memory, and store them plain: rows are neighbours there."""
    weight = torch.linspace(1, 2, x.shape[1]).view(-1, 1, 1)
    return ((x + weight).log_softmax(3) * weight).contiguous()


def test_points_take_the_order_in_which_a_kernel_counts_the_rows_of_its_totals() -> None:
    x = torch.randn(512, 64, 14, 14).to(memory_format=torch.channels_last)
    (kernel,) = kernels_of(softmax_along_the_width, x)
    assert all(row_stride(q, i) == 1 for q in kernel.nodes for b, i in va.loads(q.value) if b.startswith("arg"))
    check(softmax_along_the_width, torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last))


def loss_of_classes(x: T, target: T) -> T:
    return F.cross_entropy(x, target)


@pytest.mark.parametrize(("classes", "passes"), [(3, 1), (80, 2)], ids=["few_classes", "many_classes"])
def test_a_loss_over_few_classes_of_images_reads_them_once(classes: int, passes: int) -> None:
    x, target = torch.randn(4, classes, 512, 512), torch.zeros(4, 512, 512, dtype=torch.long)
    read = [{b for q in k.nodes for b, _ in va.loads(q.value)} for k in kernels_of(loss_of_classes, x, target)]
    assert sum(any(b.endswith("0_1") or b == "x_1" for b in names) for names in read) == passes, read
    check(loss_of_classes, torch.randn(3, 5, 6, 7), torch.randint(0, 5, (3, 6, 7)))


def computed_index(x: T, table: T) -> T:
    """Look up rows of a table by numbers that are computed from data."""
    return F.embedding((x.abs() * 7).long() % len(table), table).sum(-1)


@pytest.mark.parametrize(("rows", "stored"), [(1 << 15, True), (16, False)], ids=["many", "few"])
def test_a_computed_index_that_many_elements_read_is_stored_once(rows: int, stored: bool) -> None:
    x, table = torch.randn(rows), torch.randn(100, 768)
    nodes = [q for k in kernels_of(computed_index, x, table) for q in k.nodes]
    index = [q for q in nodes if any(v.op == "remainder" for v in va.walk(q.value))]
    assert [q.kind is Kind.POINT for q in index] == [stored]
    check(computed_index, torch.randn(9), torch.randn(5, 20))


def flipped_softmax(x: T) -> T:
    return ((x + x.flip(1)) * 2).log_softmax(1)


def test_a_row_that_is_read_backwards_is_one_kernel_with_its_readers() -> None:
    assert len(kernels_of(flipped_softmax, torch.empty(20_000, 512))) == 1
    check(flipped_softmax, torch.randn(5, 70))


def normalised_and_scanned(x: T) -> T:
    """Normalise the columns of an image, store them plain, and scan them."""
    return (x * (x.square().mean(2, keepdim=True) + 1e-5).rsqrt()).contiguous().cumsum(2)


@pytest.mark.parametrize(("channels", "kernels"), [(3, 1), (64, 3)])
def test_a_scan_takes_the_rows_of_its_kernel(channels: int, kernels: int) -> None:
    """A tile of rows holds the whole width of three channels, and stores it plain; it holds one point of 64."""
    x = torch.randn(90_000 // channels, channels, 14, 14).to(memory_format=torch.channels_last)
    assert len(kernels_of(normalised_and_scanned, x)) == kernels
    for shape in ((3, 3, 5, 7), (2, 8, 3, 4), (5, 1, 6, 3)):
        check(normalised_and_scanned, torch.randn(shape).to(memory_format=torch.channels_last))
        check(normalised_and_scanned, torch.randn(shape))
