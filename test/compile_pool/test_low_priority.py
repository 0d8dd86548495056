"""Builds in the background leave the processors to the process that asked for them."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from altbackend.compile_pool import children, libraries

AUTOGROUP = Path("/proc/self/autogroup")
PROGRAM = "import os, sys; print(os.nice(0), sys.argv[1:])"


@pytest.mark.skipif(shutil.which("nice") is None, reason="needs nice")
def test_a_command_has_low_priority_and_its_arguments() -> None:
    status, output = children.run([*libraries._LOW_PRIORITY, sys.executable, "-c", PROGRAM, "a b", "$c", ""], 30)
    assert (status, output) == (0, "15 ['a b', '$c', '']")


@pytest.mark.skipif(not AUTOGROUP.exists() or shutil.which("nice") is None, reason="needs groups of sessions")
def test_the_session_of_a_command_has_low_priority() -> None:
    """Linux takes a change every 100 ms, and those of other tests count, unless root asks."""
    for _ in range(20):
        status, output = children.run([*libraries._LOW_PRIORITY, "cat", str(AUTOGROUP)], 30)
        if output.endswith("nice 15"):
            break
        time.sleep(0.05)
    assert status == 0
    assert output.endswith("nice 15")
    assert not AUTOGROUP.read_text().strip().endswith("nice 15")
