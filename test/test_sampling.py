"""The sample of a test's cases: at least one, the same in every process, and all of them on demand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from test import fresh

ROOT = Path(__file__).parent.parent
FILE = """
import pytest
pytestmark = pytest.mark.sample(3)
@pytest.mark.parametrize("n", range(10))
def test_many(n): pass
def test_one(): pass
"""
PARAMETERS = """
import pytest
@pytest.fixture(scope="session")
def seen():
    values = [set(), set(), set()]
    yield values
    assert [len(v) for v in values] == [5, 3, 2]
@pytest.mark.sample(6, every_value=True)
@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", ["x", "y", "z"])
@pytest.mark.parametrize(("c", "d"), [(1, 2), (3, 4)])
def test_many(seen, a, b, c, d):
    for values, value in zip(seen, (a, b, c)):
        values.add(value)
"""


@pytest.mark.parametrize(
    ("text", "options", "count"),
    [(FILE, (), 5), (FILE, ("--all-cases",), 11), (PARAMETERS, (), 5)],
    ids=["sample", "all", "every value"],
)
def test_cases(text: str, options: tuple[str, ...], count: int, tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sample\n")
    words = ["-m", "pytest", "-q", "-p", "test.conftest", "-p", "no:cacheprovider", *options, "."]
    done = fresh.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert f"{count} passed" in done.stdout, done.stdout + done.stderr
