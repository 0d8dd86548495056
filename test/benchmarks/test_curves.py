"""The picture of what `benchmarks.scaling` has measured."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import curves, scaling

SVG = "{http://www.w3.org/2000/svg}"


def figures(nodes: int, us: float, kib: float) -> dict[str, float]:
    return {"nodes": nodes, "own": nodes * us / 1e6, "bytes": nodes * kib * 1024}


def test_every_kind_has_a_curve_with_a_point_a_size_in_each_panel(tmp_path: Path) -> None:
    for n, kind in enumerate(("a<b", "flat")):
        rows = {kind: [figures(10000, 200.0, 4.0), figures(100, 100.0, 8.0)]}
        (tmp_path / f"{n}.json").write_text(json.dumps(rows))
    out = tmp_path / "out.svg"
    assert curves.main([str(tmp_path / "0.json"), str(tmp_path / "1.json"), "--out", str(out)]) == 0
    root = ElementTree.parse(out).getroot()
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert len(lines) == 4
    assert all(len(points) == 2 for points in lines)
    # the smaller graph first, at the left; the panel's top is 200 us
    assert lines[0] == [f"0.0,{curves.HEIGHT / 2}", f"{curves.WIDTH}.0,0.0"]
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"a<b", "flat", "us per node", "KiB per node", "1,000", "200"} <= set(texts)


@pytest.mark.parametrize(("x", "want"), [(1, 1), (1.5, 2), (3, 4), (5, 10), (230, 400), (0.3, 0.4)])
def test_axes_end_at_round_numbers(x: float, want: float) -> None:
    assert curves._round_up(x) == pytest.approx(want)


def test_what_is_trained_has_gradients() -> None:
    assert set(scaling.TRAINED) <= set(scaling.KINDS)
    found = scaling.measure("training-linear", 6, False)
    assert found["partition"] > 0
    assert scaling.measure("linear", 6, False)["partition"] == 0
