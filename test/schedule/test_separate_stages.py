"""Points that run through memory in different orders do not share a kernel of a GPU where they are large."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from altbackend.schedule.device import H200, ScheduleContext
from altbackend.schedule.kernel import Kernel
from altbackend.schedule.tiling.gpu import separate_stages
from altbackend.schedule.tiling.gpu.blocks import Form
from altbackend.schedule.tiling.gpu.tiled import TiledKernel, tile_steps
from test import triton_run
from test.compare import as_list, difference
from test.graphs import schedule, trace

T = torch.Tensor
LAST = torch.channels_last


def copied_and_pooled(x: T) -> tuple[T, ...]:
    """Copy an image and its maxima into channels-last, and return where the maxima lie."""
    largest, where = F.max_pool2d(x, 3, 1, 1, return_indices=True)
    return (x * 1).contiguous(memory_format=LAST), largest.contiguous(memory_format=LAST), where


def copied_beside_few(x: T) -> tuple[T, ...]:
    """Copy an image into channels-last, and double its first pixels."""
    return (x * 3).contiguous(memory_format=LAST), x[:, :, 0, 0] * 2


def joined_beside_few(x: T) -> tuple[T, ...]:
    """Copy two parts of a concatenation into channels-last by one stage, and double the first pixels of an image."""
    return torch.cat([x * 3, x.relu()], 1).contiguous(memory_format=LAST), x[:, :, 0, 0] * 2


def tiled(*sizes: int, fn: Callable[[T], tuple[T, ...]] = copied_and_pooled) -> list[TiledKernel]:
    """Return the finished kernels of the one step of `fn`."""
    ctx = ScheduleContext(H200)
    s = schedule(trace(fn, torch.empty(sizes))[0], ctx=ctx)
    (step,) = s.steps
    assert isinstance(step, Kernel)
    ((_, kernels),) = tile_steps(s.program, s.deps, s.steps, ctx, lambda *d: None)
    assert isinstance(kernels, list)
    return kernels


@pytest.mark.parametrize("sizes", [(2, 192, 96, 80), (2, 192, 80, 80), (2, 192, 96, 96)], ids=str)
def test_large_stages_are_kernels_of_their_own_in_tiles_over_both_orders(sizes: tuple[int, ...]) -> None:
    kernels = tiled(*sizes)
    assert all(len(k.kernel.stages) == 1 for k in kernels)
    stored_turned = [k for k in kernels if any("clone" in o.target for o in k.kernel.origins)]
    assert stored_turned
    assert all(k.blocks.form is Form.TRANSPOSE for k in stored_turned)


def test_small_stages_share_a_launch() -> None:
    assert len(tiled(2, 24, 9, 8)) == 1


@pytest.mark.parametrize("fn", [copied_beside_few, joined_beside_few])
def test_few_points_leave_a_large_copy_its_tiles(fn: Callable[[T], tuple[T, ...]]) -> None:
    turned, few = tiled(16, 96, 64, 64, fn=fn)
    assert [turned.blocks.form, few.blocks.form] == [Form.TRANSPOSE, Form.FLAT]
    assert len(tiled(2, 24, 9, 8, fn=fn)) == 1
    x = torch.randn(2, 24, 9, 8)
    for got, want in zip(triton_run.compiled(fn)(x), fn(x), strict=True):
        assert not difference(got, want, tolerance=0)


@pytest.mark.parametrize("least", [1, separate_stages.LARGE], ids=["apart", "together"])
def test_equal_to_eager(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate_stages, "LARGE", least)
    x = torch.randn(2, 24, 9, 8)
    results = as_list(triton_run.compiled(copied_and_pooled)(x))
    for got, want in zip(results, as_list(copied_and_pooled(x)), strict=True):
        assert not difference(got, want, strides=False, tolerance=0)
