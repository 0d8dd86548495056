"""Times candidates in a process of its own, so that one that crashes or hangs the device costs nothing but itself."""

from __future__ import annotations

import functools
import json
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from ..compile_pool.children import Child, ChildFailed, python
from .trial import Trial

START_S = 120.0  # until the first answer: the process imports torch and makes a context
TRIAL_S = 20.0


class TrialFailed(Exception):
    """One candidate could not be measured; the text says why. Others can."""


class MeasurerDied(Exception):
    """The measuring process was killed or did not answer in time."""


class Measurer:
    """Microseconds of trials, by a process that is started with the first one.

    `command`: the process, which answers every line that names a file with a trial by a line of JSON. `start_s`,
    `trial_s`: how long the first and each further answer may take, in seconds.
    """

    def __init__(self, command: Sequence[str], start_s: float = START_S, trial_s: float = TRIAL_S) -> None:
        self.command, self.start_s, self.trial_s = command, start_s, trial_s
        self.child: Child | None = None
        self.lock = threading.Lock()  # graphs may be compiled in several threads

    def __call__(self, trial: Trial) -> float:
        """Raises TrialFailed or MeasurerDied."""
        with self.lock, tempfile.TemporaryDirectory(prefix="altbackend-trial-") as folder:
            path = Path(folder) / "trial.json"
            path.write_text(json.dumps(trial))
            try:
                answer = json.loads(self._ask(str(path)))
            except ValueError as cause:
                self.stop()
                raise MeasurerDied(f"the measuring process answered nonsense: {cause}") from None
        if "ended" in answer:
            self.stop()
        if "error" in answer:
            raise TrialFailed(answer["error"])
        return float(answer["microseconds"])

    def _ask(self, line: str) -> str:
        fresh = self.child is None or not self.child.mine
        try:
            if self.child is None or not self.child.mine:
                self.child = Child(self.command)
            return self.child.ask(line, self.start_s if fresh else self.trial_s)
        except (OSError, ChildFailed) as cause:
            self.stop()
            raise MeasurerDied(f"the measuring process failed: {cause}") from None

    def stop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.end()


@functools.cache
def on_device(index: int) -> Measurer:
    """The measurer of one GPU, shared by all graphs of this process."""
    return Measurer(python("altbackend.autotune.worker", str(index)))
