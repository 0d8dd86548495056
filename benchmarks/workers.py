"""A process that answers requests one by one, line for line in JSON, and is replaced when it dies or is late."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ANSWER = "answer "  # begins the line of an answer; what else the process prints is dropped


@dataclass(frozen=True)
class Ended:
    """No answer: the process was `late`, or died. `words`: its exit status and the last line of its stderr."""

    late: bool
    words: str


@dataclass
class Worker:
    """`command` is started at the first request. An answer is an object; `"broken": true` in it ends the process."""

    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    process: subprocess.Popen[str] | None = None
    errors: Any = None

    def start(self) -> subprocess.Popen[str]:
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - outlives this call
        return subprocess.Popen(
            list(self.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
            env=None if self.environment is None else dict(self.environment),
        )

    def ask(self, request: Any, seconds: float) -> dict[str, Any] | Ended:
        """The answer, or how the process ended without one."""
        self.process = self.process or self.start()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        late = threading.Event()
        process = self.process

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(max(seconds, 1.0), end)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith(ANSWER):
                    answer: dict[str, Any] = json.loads(line[len(ANSWER) :])
                    if answer.pop("broken", False):
                        self.stop()
                    return answer
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        status, words = self.stop()
        return Ended(late.is_set(), f"exit status {status} {words}")

    def stop(self) -> tuple[int, str]:
        """Exit status of the process, ended if it runs still, and the last line that it wrote to stderr."""
        if self.process is None:
            return 0, ""
        process, self.process = self.process, None
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:
            pass  # closes its pipes
        with self.errors as held:
            held.seek(0)
            lines = [line.strip() for line in held.read()[-4000:].splitlines() if line.strip()]
        return process.wait(), lines[-1][:300] if lines else ""
