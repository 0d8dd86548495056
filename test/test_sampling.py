"""The sample of a test's cases: at least one, the same in every process, and all of them on demand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE = """
import pytest
pytestmark = pytest.mark.sample(3)
@pytest.mark.parametrize("n", range(10))
def test_many(n): pass
def test_one(): pass
"""


@pytest.mark.parametrize(("options", "count"), [((), 5), (("--all-cases",), 11)], ids=["sample", "all"])
def test_cases(options: tuple[str, ...], count: int, tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sample\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "test.conftest", "-p", "no:cacheprovider", *options, "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"{count} passed" in done.stdout, done.stdout + done.stderr
