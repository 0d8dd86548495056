"""Entries on disk: written whole or not at all, checked when read, made once by processes that start together."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..folders import one_at_a_time, write_whole
from .key import Parts

LOCK_S = 120.0  # how long to wait for another process that compiles the same
FORMAT = "altbackend-graph-1"


@dataclass(frozen=True)
class Place:
    """Where one entry is: `key` names it, `family` the folder of graphs that it may be compared with."""

    folder: Path
    family: str
    key: str

    @property
    def entry(self) -> Path:
        return self.folder / self.family / f"{self.key}.graph"

    @property
    def parts(self) -> Path:
        return self.folder / self.family / f"{self.key}.parts"


def places(folder: Path) -> list[Place]:
    """Every entry of a folder, whole or not."""
    return [Place(folder, path.parent.name, path.stem) for path in sorted(folder.glob("*/*.graph"))]


def read(place: Place) -> dict[str, Any] | None:
    """The entry, if it is whole and of this key; anything else is a miss, and will be replaced."""
    held = _read(place.entry)
    return held["held"] if held is not None and held.get("key") == place.key else None


def write(place: Place, held: dict[str, Any], parts: Parts) -> str:
    """Keep an entry and, to be read by people, its parts. Why it could not be written, or ""."""
    try:
        _write(place.parts, parts)
        _write(place.entry, {"key": place.key, "held": held})
    except OSError as cause:  # a full or read-only disk costs the next process a compilation
        return str(cause)
    return ""


def relatives(place: Place) -> Iterator[Parts]:
    """Parts of the other entries of the family, the newest first."""
    with contextlib.suppress(OSError):
        files = [p for p in (place.folder / place.family).glob("*.parts") if p != place.parts]
        for path in sorted(files, key=lambda p: p.stat().st_mtime, reverse=True):
            found = _read(path)
            if found is not None:
                yield found


def lock(place: Place, seconds: float = LOCK_S) -> contextlib.AbstractContextManager[None]:
    """One process at a time makes an entry; see `folders.one_at_a_time`."""
    return one_at_a_time(place.entry.with_suffix(".lock"), seconds)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        if head.decode("ascii") != _head(body):
            return None
        found = json.loads(body)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, held: Any) -> None:
    body = json.dumps(held).encode()
    write_whole(path, f"{_head(body)}\n".encode() + body)


def _head(body: bytes) -> str:
    return f"{FORMAT} {hashlib.sha256(body).hexdigest()}"
