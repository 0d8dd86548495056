"""Sums of bfloat16 rows by bags: results and gradients equal eager's, whose fast path returns no bags."""

from __future__ import annotations

import pytest
import torch

from altbackend.config.resolve import resolve
from altbackend.debug.trace import Trace
from altbackend.fx_passes import embedding_bags
from altbackend.fx_passes.context import Context
from test.compare import compiled
from test.graphs import trace


@pytest.mark.sample(2, every_value=True)
@pytest.mark.parametrize("integer", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("last_offset", [False, True], ids=["starts", "starts and end"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_gradients_equal_eager(weighted: bool, last_offset: bool, integer: torch.dtype) -> None:
    torch.manual_seed(0)
    module = torch.nn.EmbeddingBag(50, 8, mode="sum", dtype=torch.bfloat16, include_last_offset=last_offset)
    run = compiled(module, dynamic=True)
    for n in (25, 31):  # two empty bags, and one of all other indices
        indices = torch.randint(0, 50, (n,), dtype=integer)
        offsets = torch.tensor([0, 4, 4, 9, 20, *([n] if last_offset else [])], dtype=integer)
        scales = torch.randn(n, dtype=torch.bfloat16, requires_grad=True) if weighted else None
        leaves = [module.weight, *([] if scales is None else [scales])]
        want, got = (f(indices, offsets, per_sample_weights=scales) for f in (module, run))
        torch.testing.assert_close(got, want)
        towards = torch.randn_like(want)
        for a, b in zip(*(torch.autograd.grad(y, leaves, towards) for y in (got, want)), strict=True):
            torch.testing.assert_close(a, b)


def test_only_the_fast_path_of_bfloat16_changes() -> None:
    indices, offsets = torch.randint(0, 9, (6,)), torch.tensor([0, 2, 2])
    cfg = resolve()
    ctx = Context(cfg, Trace("test", cfg), device="cpu")
    for dtype, mode, padding, changes in (
        (torch.bfloat16, 0, -1, 1),
        (torch.float32, 0, -1, 0),
        (torch.bfloat16, 1, -1, 0),
        (torch.bfloat16, 0, 3, 0),
    ):
        arguments = torch.randn(9, 4, dtype=dtype), indices, offsets
        options = False, mode, False, None, False, padding
        (gm,) = trace(lambda *xs: torch.ops.aten._embedding_bag(*xs, *options)[1], *arguments)  # noqa: B023
        assert embedding_bags.run(gm, ctx) == changes
        gm.recompile()
        if changes:
            assert gm(*arguments)[0].tolist() == [0, 0, 2, 2, 2, 2]
