"""Column sums of a GPU stay whole where a kernel of rows totals them, and are split elsewhere; fusion runs once."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from altbackend.config.resolve import resolve
from altbackend.lowering.graph import lower_graph
from altbackend.schedule.device import H200
from altbackend.schedule.fusion import fuse
from altbackend.schedule.loop_mapping import Kind
from altbackend.schedule.split_and_fuse import Fused, split_and_fuse
from test.graphs import trace

T = torch.Tensor


def fused(fn: Callable[..., list[T]], *inputs: T) -> tuple[Fused, list[tuple[str, ...]]]:
    """Return the fused program, and the decisions in order."""
    (gm,) = trace(fn, *inputs)
    gm.graph.eliminate_dead_code()
    decisions: list[tuple[str, ...]] = []
    program, _ = lower_graph(gm, resolve(), on_gpu=True)
    return split_and_fuse(program, resolve(), H200, lambda *d: decisions.append(d)), decisions


def norm_gradients(g: T, x: T, w: T) -> list[T]:
    scaled = g * w
    return [scaled - x * (scaled * x).mean(-1, keepdim=True), (g * x).sum(0), g.sum(0)]


def behind_a_product(g: T, x: T, w: T) -> list[T]:
    return [(y := norm_gradients(g, x, w)[0] @ w.diag()), y.sigmoid().sum(0)]


def of_rolled_rows(g: T, x: T, w: T) -> list[T]:
    y = norm_gradients(g, x, w)[0].view(128, 64, 768).roll(3, 1)
    return [y, y.sum((0, 1))]


@pytest.mark.parametrize(
    ("fn", "totals", "split", "fusions"),
    [(norm_gradients, 2, 0, 1), (behind_a_product, 0, 1, 1), (of_rolled_rows, 0, 1, 2)],
)
def test_totals_are_predicted(
    fn: Callable[..., list[T]], totals: int, split: int, fusions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Mock(wraps=fuse.fuse)
    monkeypatch.setattr(fuse, "fuse", counted)
    result, decisions = fused(fn, torch.empty(8192, 768), torch.empty(8192, 768), torch.empty(768))
    kinds = [q.kind for g in result.groups for q in g.mapped]
    assert kinds.count(Kind.CROSS_ROW) == totals
    assert sum(b.endswith("_parts") for b in result.program.buffers) == split
    assert counted.call_count == fusions
    assert len(set(decisions)) == len(decisions), "decisions of a fusion that was discarded are reported"


def test_totals_are_split_where_nothing_is_fused() -> None:
    (gm,) = trace(norm_gradients, torch.empty(8192, 768), torch.empty(8192, 768), torch.empty(768))
    gm.graph.eliminate_dead_code()
    cfg = resolve(options={"fuse": False})
    program, _ = lower_graph(gm, cfg, on_gpu=True)
    result = split_and_fuse(program, cfg, H200, lambda *d: None)
    assert sum(b.endswith("_parts") for b in result.program.buffers) == 2
