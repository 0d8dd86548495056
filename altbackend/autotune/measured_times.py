"""Measured times in the cache folder, shared by processes: one JSON file for each question."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from altbackend.lazy_dataclass import dataclass

from ..disk_cache.eviction import LOCKS
from ..disk_cache.folders import exclusive, write_atomically

LOCK_S = 300.0  # how long to wait for another process that measures the same question

Times = dict[str, float]  # microseconds by the candidate's name


@dataclass(frozen=True)
class MeasuredTimes:
    """Files of times under `folder`, which need not exist. Times that cannot be written are measured again next time.

    Times that the folder lacks are looked for in the `read_only` folders.
    """

    folder: Path
    lock_s: float = LOCK_S
    read_only: tuple[Path, ...] = ()

    def path(self, question: str) -> Path:
        """Return the path of a question's times. The question's text contains all that the times depend on."""
        key = hashlib.sha256(question.encode()).hexdigest()[:40]
        return self.folder / key[:2] / f"{key}.json"

    def read(self, question: str) -> Times | None:
        """Return the times of a question; None if they are missing or damaged."""
        path = self.path(question).relative_to(self.folder)
        answers = (_read(folder / path) for folder in (self.folder, *self.read_only))
        return next((times for times in answers if times is not None), None)

    def write(self, question: str, times: Times) -> None:
        path = self.path(question)
        text = json.dumps({"microseconds": times, "digest": _digest(times), "question": question}, indent=1)
        with contextlib.suppress(OSError):  # a full disk costs the next process a measurement
            write_atomically(path, text.encode())

    def lock(self, question: str) -> contextlib.AbstractContextManager[None]:
        """Let one process at a time measure a question; see `folders.exclusive`."""
        return exclusive(self.folder / LOCKS / f"{self.path(question).stem[:2]}.lock", self.lock_s)


def _read(path: Path) -> Times | None:
    try:
        stored = json.loads(path.read_text())
        times = {str(k): float(v) for k, v in stored["microseconds"].items()}
        return times if stored["digest"] == _digest(times) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(times: Times) -> str:
    return hashlib.sha256(repr(sorted((name, float(us)) for name, us in times.items())).encode()).hexdigest()
