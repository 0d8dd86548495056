"""`python -m altbackend passes`: the table of graph passes, with the file and line of each."""

from __future__ import annotations

import inspect
from pathlib import Path

import altbackend
from altbackend.fx_passes.context import Pass, Phase
from altbackend.fx_passes.table import PASSES


def run() -> int:
    """Print the table to stdout."""
    print(page(), end="")
    return 0


def page() -> str:
    """Return the passes in the order in which they run: a block per phase, a line per pass."""
    return "\n".join(_block(phase) for phase in Phase)


def _block(phase: Phase) -> str:
    rows = [row for row in PASSES if row.phase is phase]
    return f"{phase.value}\n" + "".join(map(_line, rows))


def _line(row: Pass) -> str:
    devices, modes = ("/".join(row.devices), "/".join(row.modes))
    return f"  {row.name:24} {devices:8} {modes:11} {place(row)}\n"


def place(row: Pass) -> str:
    """Return `file:line` of the function of a pass, relative to the folder of the package."""
    path = Path(inspect.getsourcefile(row.run) or "").relative_to(Path(altbackend.__file__).parents[1])
    return f"{path.as_posix()}:{inspect.getsourcelines(row.run)[1]}"
