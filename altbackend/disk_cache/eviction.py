"""What was not used for longest leaves the cache folder when it has grown beyond its limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

LOCKS = "locks"  # folders of that name hold no entries
LEFT = 0.9  # of the limit: what remains after files were removed, so that not every further one costs a look at all
STALE_S = 3600.0  # after which a file that was never put in place has lost its writer
OFTEN_S = 600.0  # how often the folder is looked at, by whichever process
SHARE = 16  # and whenever a process has written this part of the limit


@dataclass
class Unit:
    """Files that are removed together, since they differ in their suffix only. `used`: seconds since the epoch."""

    paths: list[Path] = field(default_factory=list)
    size: int = 0
    used: float = 0.0


def sweep(folder: Path, most_bytes: int, now: float | None = None) -> int:
    """Remove what a limit asks for (0: none), and what writers that ended have left. How many files were removed."""
    now = time.time() if now is None else now
    removed = 0
    units: dict[Path, Unit] = {}
    for path, held in _files(folder):
        if path.suffix == ".tmp":
            removed += now - held.st_mtime > STALE_S and _remove(path)
            continue
        unit = units.setdefault(path.with_suffix(""), Unit())
        unit.paths.append(path)
        unit.size += held.st_size
        unit.used = max(unit.used, _at_most(path, held.st_mtime, now))
    total = sum(u.size for u in units.values())
    if most_bytes and total > most_bytes:
        for unit in sorted(units.values(), key=lambda u: u.used):
            if total <= LEFT * most_bytes:
                break
            total -= unit.size
            removed += sum(map(_remove, unit.paths))
    return removed


def size(folder: Path) -> tuple[int, int]:
    """(files, bytes) under a folder."""
    sizes = [held.st_size for path, held in _files(folder) if path.suffix != ".tmp"]
    return len(sizes), sum(sizes)


def _at_most(path: Path, used: float, now: float) -> float:
    """When a file was used. A clock that was set back leaves times to come, which would never grow old."""
    if used > now:
        with contextlib.suppress(OSError):
            os.utime(path, (now, now))
    return min(used, now)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Regular files below a folder; other processes add and remove some meanwhile."""
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

_written: dict[Path, int] = {}  # bytes, since this process has last looked


def written(folder: Path, count: int, most_bytes: int) -> None:
    """Tell that a process has written `count` bytes; now and then that makes it look whether there are too many."""
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
