"""Times candidates in a child process, so that a candidate that crashes or hangs the device harms no other process."""

from __future__ import annotations

import functools
import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..compile_pool.children import Child, ChildFailed, python

START_S = 120.0  # limit for the first answer: the process imports torch and makes a context
TRIAL_S = 20.0


class TrialFailed(Exception):
    """Raised if one candidate could not be measured; the message says why. Other candidates can be."""


class MeasurerDied(Exception):
    """Raised if the measuring process was killed or did not answer in time."""


class Measurer:
    """Measures trials in microseconds, in a process that starts with the first one.

    `command` starts the process. It answers each line that names a file with a trial by a line of JSON. `start_s`
    and `trial_s` limit the time of the first and of each further answer, in seconds.
    """

    def __init__(self, command: Sequence[str], start_s: float = START_S, trial_s: float = TRIAL_S) -> None:
        self.command, self.start_s, self.trial_s = command, start_s, trial_s
        self.child: Child | None = None
        self.lock = threading.Lock()  # several threads may compile graphs

    def __call__(self, trial: Mapping[str, object]) -> float:
        """Return the microseconds of a trial. Raise TrialFailed or MeasurerDied."""
        with self.lock, tempfile.TemporaryDirectory(prefix="altbackend-trial-") as folder:
            path = Path(folder) / "trial.json"
            path.write_text(json.dumps(trial))
            try:
                answer = json.loads(self._ask(str(path)))
            except ValueError as cause:
                self.stop()
                raise MeasurerDied(f"the measuring process sent a malformed answer: {cause}") from None
        if "ended" in answer:
            self.stop()
        if "error" in answer:
            raise TrialFailed(answer["error"])
        return float(answer["microseconds"])

    def _ask(self, line: str) -> str:
        fresh = self.child is None or not self.child.is_own
        try:
            if self.child is None or not self.child.is_own:
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
    """Return the measurer of one GPU, which all graphs of this process share."""
    return Measurer(python("altbackend.autotune.worker", str(index)))
