"""Files of compiled graphs in the cache folder: an entry with the graph's code, and the parts of its key."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from altbackend.lazy_dataclass import dataclass

from ..disk_cache.eviction import LOCKS
from ..disk_cache.folders import exclusive
from ..disk_cache.json_object import JsonObject
from ..disk_cache.storage import Store
from .key import Parts

GRAPHS = "graphs"
LOCK_S = 120.0  # how long to wait for another process that compiles the same graph


@dataclass(frozen=True)
class EntryPath:
    """The files of one entry. `key` names the entry; `family` is the folder of entries that a miss is compared with."""

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
    def file(self) -> Path:
        return self.store.path(self.name)


def entry_paths(store: Store) -> list[EntryPath]:
    """Return every entry in the folders of a store, damaged ones included."""
    paths = sorted(path for folder in store.folders for path in (folder / GRAPHS).glob("*/*.graph"))
    return list(dict.fromkeys(EntryPath(store, path.parent.name, path.stem) for path in paths))


def is_empty(store: Store) -> bool:
    """Return whether no graph was ever stored in these folders. False if the store has a server."""
    return store.shared is None and not any((folder / GRAPHS).exists() for folder in store.folders)


def read(path: EntryPath) -> JsonObject | None:
    """Return the entry, or None if it is missing, damaged or sealed for another key."""
    return _read(path.store, path.name)


def write(path: EntryPath, content: Mapping[str, object], parts: Parts) -> str:
    """Write an entry and, for people to read, the parts of its key. Return why that failed, or ""."""
    try:
        path.store.write(path.parts_name, json.dumps(parts).encode())
        path.store.write(path.name, json.dumps(content).encode())
    except OSError as cause:  # a full or read-only disk costs the next process a compilation
        return str(cause)
    return ""


def parts(path: EntryPath) -> Parts | None:
    """Return the key parts of an entry: all that its code depends on."""
    return _read(path.store, path.parts_name)


def family_members(path: EntryPath, before: float = math.inf) -> Iterator[EntryPath]:
    """Yield the family's other entries written before a time (seconds since the epoch), newest first."""
    with contextlib.suppress(OSError):
        folders = [folder / GRAPHS / path.family for folder in path.store.folders]
        files = [(p.stat().st_mtime, p.stem) for f in folders for p in f.glob("*.parts") if p.stem != path.key]
        for _, key in sorted((file for file in files if file[0] <= before), reverse=True):
            yield EntryPath(path.store, path.family, key)


def lock(path: EntryPath, seconds: float = LOCK_S) -> contextlib.AbstractContextManager[None]:
    """Let one process at a time make an entry; see `folders.exclusive`. All entries share a few lock files."""
    return exclusive(path.store.path(f"{GRAPHS}/{LOCKS}/{path.key[:2]}.lock"), seconds)


def _read(store: Store, name: str) -> JsonObject | None:
    try:
        content = json.loads(store.read(name) or b"null")
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
