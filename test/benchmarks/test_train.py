"""The training benchmark: its model learns, checkpoints change nothing, and its table and picture hold the figures."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.lines import picture_of_lines
from benchmarks.train import Run, Size, Trained, table, train

SMALL = Size(layers=1, width=16, heads=2, length=16, batch=4)


def test_the_model_learns_and_a_checkpoint_changes_nothing() -> None:
    plain, checkpointed = (train(Run(checkpointed=c), SMALL, 45, "cpu") for c in (False, True))
    assert plain.losses[-1] < plain.losses[0] - 0.5
    assert checkpointed.losses == pytest.approx(plain.losses)


def test_the_table_compares_with_eager() -> None:
    rows = table({"eager": Trained([3.0, 2.0], 0.1), "alt": Trained([3.0, 2.5], 0.2, 1)}, 2).splitlines()
    assert rows[2] == "| eager | 2.500 | 0.0e+00 | 100 | 0 |"
    assert rows[3] == "| alt | 2.750 | 5.0e-01 | 200 | 1 |"


def test_a_picture_has_a_line_for_each_run() -> None:
    lines = {"eager": [(1.0, 3.0), (2.0, 2.0)], "alt & co": [(1.0, 3.0), (2.0, 1.0)]}
    picture = ET.fromstring(picture_of_lines(lines, "step", "loss"))
    assert len(picture.findall(".//{*}polyline")) == 2
    assert "alt & co" in {t.text for t in picture.iter() if t.tag.endswith("text")}
