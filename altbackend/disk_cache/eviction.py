"""Eviction of the least recently used files when the cache folder exceeds its limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from filelock import FileLock, Timeout

from altbackend.lazy_dataclass import dataclass

LOCKS = "locks"  # folders of that name hold no entries
LEFT = 0.9  # the part of the limit that remains after eviction, so that not every further file starts another one
STALE_S = 3600.0  # age after which a temporary file has lost its writer
OFTEN_S = 600.0  # interval between sweeps of the folder, by whichever process
SHARE = 16  # a process also sweeps after writing this fraction of the limit


@dataclass
class Unit:
    """Files that are removed together, since their names differ only in the suffix. `used`: seconds since the epoch."""

    paths: list[Path] = field(default_factory=list)
    size: int = 0
    used: float = 0.0


def sweep(folder: Path, most_bytes: int, now: float | None = None) -> int:
    """Evict the least recently used files beyond a limit (0: none) and abandoned temporary files.

    Return the number of removed files.
    """
    now = time.time() if now is None else now
    removed = 0
    units: dict[Path, Unit] = {}
    for path, status in _files(folder):
        if path.suffix == ".tmp":
            removed += now - status.st_mtime > STALE_S and _remove(path)
            continue
        unit = units.setdefault(path.with_suffix(""), Unit())
        unit.paths.append(path)
        unit.size += status.st_size
        unit.used = max(unit.used, _last_use(path, status.st_mtime, now))
    total = sum(u.size for u in units.values())
    if most_bytes and total > most_bytes:
        for unit in sorted(units.values(), key=lambda u: u.used):
            if total <= LEFT * most_bytes:
                break
            total -= unit.size
            removed += sum(map(_remove, unit.paths))
    return removed


def size(folder: Path) -> tuple[int, int]:
    """Return (files, bytes) under a folder."""
    sizes = [status.st_size for path, status in _files(folder) if path.suffix != ".tmp"]
    return len(sizes), sum(sizes)


def _last_use(path: Path, used: float, now: float) -> float:
    """Return when a file was last used. Correct times in the future, left by a clock that was set back."""
    if used > now:
        with contextlib.suppress(OSError):
            os.utime(path, (now, now))
    return min(used, now)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files below a folder, while other processes add and remove files."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                if entry.name != LOCKS:
                    yield from _files(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path), entry.stat(follow_symlinks=False)


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        path.parent.rmdir()  # if it is empty
    return True


# --- when ------------------------------------------------------------------------------------------------------------

_written: dict[Path, int] = {}  # bytes written since this process has last swept the folder


def note_written(folder: Path, count: int, most_bytes: int) -> None:
    """Note that this process has written `count` bytes, and sweep the folder if it is due."""
    _written[folder] = _written.get(folder, 0) + count
    stamp = folder / LOCKS / "swept"
    if _written[folder] * SHARE < most_bytes and _recent(stamp):
        return
    _written[folder] = 0
    with contextlib.suppress(OSError, Timeout), FileLock(stamp.with_suffix(".lock"), timeout=0):
        stamp.touch()
        sweep(folder, most_bytes)


def _recent(stamp: Path) -> bool:
    try:
        return 0 <= time.time() - stamp.stat().st_mtime < OFTEN_S
    except OSError:
        return False
