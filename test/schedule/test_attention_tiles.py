"""Tiles of attention kernels: within registers and shared memory, for every head size, dtype and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from altbackend.errors import Unsupported
from altbackend.ir import value as va
from altbackend.ir.attention import SCORE, WHOLE, Attention
from altbackend.ir.loops import Buffer, Program, View
from altbackend.schedule import attention
from altbackend.schedule.attention import Tiles, backward_tiles, forward_tiles, splits_of
from altbackend.schedule.device import H200, Gpu

A100 = replace(H200, sms=108, shared_memory=166912, l2=40 << 20, capability=80)
SMALL = replace(H200, sms=40, shared_memory=101376, l2=4 << 20, capability=86)


def call(rows: int, depth: int, dtype: torch.dtype, columns: int = 2048, **options: int) -> tuple[Program, Attention]:
    views = {
        name: View(name, (2, 8, n, depth), (8 * n * depth, n * depth, depth, 1))
        for name, n in (("q", rows), ("k", columns), ("v", columns))
    }
    buffers = {name: Buffer(name, dtype, v.sizes, v.strides) for name, v in views.items()}
    everywhere = va.const(True, torch.bool)
    out = ("out", None, None)
    operands = views["q"], views["k"], views["v"]
    form = Attention(*operands, out, SCORE, everywhere, 1.0, (), (WHOLE, WHOLE), None, options)
    return Program(buffers, (), (), ()), form


@pytest.mark.parametrize("device", [H200, A100, SMALL], ids=["H200", "A100", "small"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exact", [True, False])
def test_tiles_fit(device: Gpu, dtype: torch.dtype, exact: bool) -> None:
    for depth in (8, 64, 80, 128, 256):
        for rows in (1, 100, 4096):
            p, form = call(rows, depth, dtype)
            forward = forward_tiles(p, form, device, exact and dtype == torch.float32)
            assert attention.forward_bytes(p, form, forward) <= device.shared_memory
            chosen = [forward]
            for by_keys in (True, False):
                t = backward_tiles(p, form, device, exact and dtype == torch.float32, by_keys)
                assert attention.backward_bytes(p, form, t, by_keys) <= device.shared_memory
                chosen.append(t)
            assert all(t.depth >= depth and min(t.rows, t.columns, t.depth) >= attention.LEAST for t in chosen)
            assert forward.rows <= max(attention.padded(rows), attention.EXACT_SIDE)


def test_no_tiles_fit() -> None:
    p, form = call(128, 256, torch.float32)
    with pytest.raises(Unsupported, match="shared memory"):
        forward_tiles(p, form, replace(H200, shared_memory=16 << 10), exact=True)


def test_tiles_of_the_user() -> None:
    """Options that are possible count, with the name of the direction before them or without."""
    p, form = call(4096, 64, torch.bfloat16, fwd_BLOCK_M=32, BLOCK_N=128, num_warps=2)
    assert forward_tiles(p, form, H200, exact=False) == Tiles(32, 128, 2, 3, 64, 64)
    rule = forward_tiles(*call(4096, 64, torch.bfloat16), H200, exact=False)
    for impossible in ({"BLOCK_M": 48}, {"BLOCK_M": 8}, {"BLOCK_N": 4096}, {"num_stages": 100}):
        p, form = call(4096, 64, torch.bfloat16, **impossible)
        assert forward_tiles(p, form, H200, exact=False) == rule


def test_splits() -> None:
    """Few tiles of queries share many keys; enough tiles, or few keys, are not shared."""
    for rows, columns, least, most in ((1, 65536, 8, 64), (1, 256, 1, 1), (8192, 8192, 1, 1)):
        p, form = call(rows, 64, torch.bfloat16, columns)
        splits = splits_of(form, forward_tiles(p, form, H200, exact=False), H200)
        assert least <= splits <= most
        assert splits & (splits - 1) == 0


@pytest.mark.parametrize("by_keys", [True, False])
def test_gradients_of_128_elements_run_on_one_group_of_warps(by_keys: bool) -> None:
    """The tensor cores of capability 9.0 take 64 rows from four warps; those before it take 16 from each."""
    p, form = call(4096, 128, torch.bfloat16)
    assert backward_tiles(p, form, H200, False, by_keys) == Tiles(64, 64, 4, 2, 128, 128)
    assert backward_tiles(p, form, A100, False, by_keys).warps == 8
    assert backward_tiles(*call(4096, 256, torch.bfloat16), H200, False, by_keys).warps == 8
    assert backward_tiles(*call(4096, 128, torch.float32), H200, False, by_keys).warps == 8
