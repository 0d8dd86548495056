"""The table of graph passes."""

from __future__ import annotations

import inspect

import pytest

from altbackend.cli import passes
from altbackend.fx_passes.context import Context, Pass, Phase
from altbackend.fx_passes.table import PASSES


def test_phases_are_in_order() -> None:
    order = list(Phase)
    ranks = [order.index(row.phase) for row in PASSES]
    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(len(order)))


@pytest.mark.parametrize("row", PASSES, ids=lambda row: f"{row.phase.name}-{row.name}")
def test_row(row: Pass) -> None:
    parameters = inspect.signature(row.run, eval_str=True).parameters
    assert [p.annotation for p in parameters.values()][1] is Context
    assert (row.run.__doc__ or "").strip()
    assert set(row.devices) <= {"cpu", "gpu"}
    assert set(row.modes) <= {"fast", "eager"}


def test_the_command_prints_every_pass_with_its_place() -> None:
    page = passes.page()
    for row in PASSES:
        assert row.name in page
    assert "altbackend/fx_passes/simplify.py:" in page
