"""Times candidates in a process of its own, so that one that crashes or hangs the device costs nothing but itself."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

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
        self.process: subprocess.Popen[bytes] | None = None
        self.fresh = True
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
        process = self._started()
        assert process.stdin is not None
        limit = self.start_s if self.fresh else self.trial_s
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            answer = self._line(process, limit)
        except OSError as cause:
            answer = str(cause)
        if not answer.endswith("\n"):
            self.stop()
            raise MeasurerDied(f"the measuring process ended or took more than {limit:.0f} s {answer}".rstrip())
        self.fresh = False
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            package = str(Path(__file__).parents[2])
            path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
            self.process = subprocess.Popen(
                self.command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path},
            )
            self.fresh = True
            atexit.register(self.stop)
        return self.process

    @staticmethod
    def _line(process: subprocess.Popen[bytes], limit: float) -> str:
        """What the process writes until the end of a line; cut short where it ends or the time is over."""
        assert process.stdout is not None
        end, text, pipe = time.monotonic() + limit, b"", process.stdout.fileno()
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0))
            part = os.read(pipe, 1 << 16) if ready else b""
            if not part:
                break
            text += part
        return text.decode(errors="replace")

    def stop(self) -> None:
        process, self.process = self.process, None
        atexit.unregister(self.stop)
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


@functools.cache
def on_device(index: int) -> Measurer:
    """The measurer of one GPU, shared by all graphs of this process."""
    return Measurer((sys.executable, "-m", "altbackend.autotune.worker", str(index)))
