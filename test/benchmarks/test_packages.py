"""Packages beside the reference's: the line of a case stays whole if the reference's process dies. No times here."""

from __future__ import annotations

import sys
from io import StringIO
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks import package_reference, packages
from benchmarks.package_reference import Exported, Reference, ReferenceEnded
from benchmarks.workers import Worker

# A process that answers as the reference's up to a step, and then dies of a segmentation fault.
DIES = """
import os, signal, sys
for line in sys.stdin:
    if line.strip() == '"{step}"':
        os.kill(os.getpid(), signal.SIGSEGV)
    print('answer {{"number": 2.0}}', flush=True)
"""


def dying(step: str) -> Reference:
    reference = Reference("any", "cpu")
    reference._worker = Worker([sys.executable, "-S", "-c", DIES.format(step=step)])
    return reference


def small(*_: str) -> Exported:
    model, x = nn.Linear(4, 2).eval(), torch.ones(3, 4)
    return Exported(model, (x,), {}, torch.export.export(model, (x,)))


@pytest.mark.parametrize(
    ("step", "words"),
    [("build", "before it was built"), ("load", "before it was loaded"), ("call", "before its first call returned")],
)
def test_a_reference_that_dies_leaves_our_figures(step: str, words: str) -> None:
    with patch.object(packages, "exported", small), torch.no_grad():
        line = packages.one("linear", "cpu", 1, dying(step))
    assert f"reference died (exit status -11 ) {words}; {package_reference.CRASH_HINT}; ms package " in line
    assert ("reference built in 2.00 s" in line) == (step != "build")
    assert "jit " in line
    assert "error " in line


def test_a_reference_that_runs_is_timed_in_turns() -> None:
    reference = dying("never")
    with patch.object(packages, "exported", small), torch.no_grad():
        line = packages.one("linear", "cpu", 1, reference)
    reference.stop()
    assert "reference built in 2.00 s" in line
    assert "reference 2.000; error" in line


def test_the_process_says_what_a_step_raised(capsys: pytest.CaptureFixture[str]) -> None:
    package = patch.object(torch._inductor, "aoti_compile_and_package")  # a real one takes half a minute
    with patch.object(package_reference, "exported", small), package, patch.object(sys, "stdin", StringIO('"load"\n')):
        package_reference.serve("linear", "cpu")  # no package was written, so none can be loaded
    line = capsys.readouterr().out.strip()
    reference = Reference("any", "cpu")
    reference._worker = Worker([sys.executable, "-S", "-c", f"input(); print({line!r}, flush=True); input()"])
    with pytest.raises(ReferenceEnded, match=r"reference raised before it was loaded: \S"):
        reference.ask("load")
    reference.stop()
