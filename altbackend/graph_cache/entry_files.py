"""Entries of compiled graphs in the cache folder: their code, what it depends on, and what else belongs to them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..disk_cache.eviction import LOCKS
from ..disk_cache.folders import one_at_a_time
from ..disk_cache.storage import Store
from .key import Parts

GRAPHS = "graphs"
LOCK_S = 120.0  # how long to wait for another process that compiles the same


@dataclass(frozen=True)
class Place:
    """Where one entry is: `key` names it, `family` the folder of graphs that it may be compared with."""

    store: Store
    family: str
    key: str

    @property
    def name(self) -> str:
        return f"{GRAPHS}/{self.family}/{self.key}.graph"

    @property
    def parts_name(self) -> str:
        return f"{GRAPHS}/{self.family}/{self.key}.parts"

    @property
    def entry(self) -> Path:
        return self.store.path(self.name)


def places(store: Store) -> list[Place]:
    """Every entry of a store's folders, whole or not."""
    paths = sorted(path for folder in store.folders for path in (folder / GRAPHS).glob("*/*.graph"))
    return list(dict.fromkeys(Place(store, path.parent.name, path.stem) for path in paths))


def holds_nothing(store: Store) -> bool:
    """Whether no graph was ever kept where this store looks; False where another host may have kept some."""
    return store.shared is None and not any((folder / GRAPHS).exists() for folder in store.folders)


def read(place: Place) -> dict[str, Any] | None:
    """The entry, if it is whole and of this key; anything else is a miss, and will be replaced."""
    return _read(place.store, place.name)


def write(place: Place, held: dict[str, Any], parts: Parts) -> str:
    """Keep an entry and, to be read by people, its parts. Why it could not be written, or ""."""
    try:
        place.store.write(place.parts_name, json.dumps(parts).encode())
        place.store.write(place.name, json.dumps(held).encode())
    except OSError as cause:  # a full or read-only disk costs the next process a compilation
        return str(cause)
    return ""


def parts(place: Place) -> Parts | None:
    """What the code of an entry depends on."""
    return _read(place.store, place.parts_name)


def relatives(place: Place, before: float = math.inf) -> Iterator[Place]:
    """The other entries of the family that were kept before a time (seconds since the epoch), the newest first."""
    with contextlib.suppress(OSError):
        folders = [folder / GRAPHS / place.family for folder in place.store.folders]
        files = [(p.stat().st_mtime, p.stem) for f in folders for p in f.glob("*.parts") if p.stem != place.key]
        for _, key in sorted((found for found in files if found[0] <= before), reverse=True):
            yield Place(place.store, place.family, key)


def lock(place: Place, seconds: float = LOCK_S) -> contextlib.AbstractContextManager[None]:
    """One process at a time makes an entry; see `folders.one_at_a_time`. Few locks serve all entries."""
    return one_at_a_time(place.store.path(f"{GRAPHS}/{LOCKS}/{place.key[:2]}.lock"), seconds)


def _read(store: Store, name: str) -> dict[str, Any] | None:
    try:
        found = json.loads(store.read(name) or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
