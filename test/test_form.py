"""The code stays as readable as it has become: figures of `tools.form` with their limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import form

MOST = {
    "longest function (lines)": 80,
    "functions of more than 6 parameters": 28,
    "cycles of imports": 0,
    "`Any`": 250,
    "`type: ignore`": 29,
    "docstrings that begin with a question word": 0,
    "words of architecture.md": 1500,
    "uses of replaced names": 0,
}


@pytest.fixture(scope="module")
def facts() -> dict[str, str]:
    return form.facts(Path(__file__).parents[1])


@pytest.mark.parametrize("name", MOST)
def test_figures_stay_within_their_limits(name: str, facts: dict[str, str]) -> None:
    assert int(facts[name]) <= MOST[name]


def test_a_cycle_is_found(tmp_path: Path) -> None:
    folder = tmp_path / form.PACKAGE
    folder.mkdir()
    for name, text in (
        ("__init__", ""),
        ("a", "from .b import x\n"),
        ("b", "from . import a\n"),
        ("c", "from . import a\n"),
    ):
        (folder / f"{name}.py").write_text(text)
    assert form._cycles(form.modules(tmp_path)) == 1
