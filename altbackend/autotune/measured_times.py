"""Measured times, kept in the cache folder and shared by processes: one JSON file for every question."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from ..disk_cache.eviction import LOCKS
from ..disk_cache.folders import one_at_a_time, write_whole

LOCK_S = 300.0  # how long to wait for another process that measures the same

Times = dict[str, float]  # microseconds by the candidate's name


@dataclass(frozen=True)
class MeasuredTimes:
    """Entries under `folder`, which need not exist; one that cannot be written is measured again the next time.

    What it has not is looked for in `beneath`, folders that are only read.
    """

    folder: Path
    lock_s: float = LOCK_S
    beneath: tuple[Path, ...] = ()

    def path(self, question: str) -> Path:
        """Where the answer to `question` is: a text that holds all that the times depend on."""
        key = hashlib.sha256(question.encode()).hexdigest()[:40]
        return self.folder / key[:2] / f"{key}.json"

    def read(self, question: str) -> Times | None:
        """The times, if the entry is whole; anything else is a miss and will be replaced."""
        path = self.path(question).relative_to(self.folder)
        found = (_read(folder / path) for folder in (self.folder, *self.beneath))
        return next((times for times in found if times is not None), None)

    def write(self, question: str, times: Times) -> None:
        path = self.path(question)
        text = json.dumps({"microseconds": times, "digest": _digest(times), "question": question}, indent=1)
        with contextlib.suppress(OSError):  # a full disk costs the next process a measurement
            write_whole(path, text.encode())

    def lock(self, question: str) -> contextlib.AbstractContextManager[None]:
        """One process at a time measures a question; see `folders.one_at_a_time`."""
        return one_at_a_time(self.folder / LOCKS / f"{self.path(question).stem[:2]}.lock", self.lock_s)


def _read(path: Path) -> Times | None:
    try:
        held = json.loads(path.read_text())
        times = {str(k): float(v) for k, v in held["microseconds"].items()}
        return times if held["digest"] == _digest(times) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(times: Times) -> str:
    return hashlib.sha256(repr(sorted((name, float(us)) for name, us in times.items())).encode()).hexdigest()
