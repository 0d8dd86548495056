"""Sealed files by name: in the cache folder, in read-only folders, and on a shared server."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import field, replace
from pathlib import Path

from altbackend.lazy_dataclass import dataclass

from ..config.options import Config
from . import eviction, folders, seal
from .remote import Remote, remote

TOUCH_S = 60.0  # precision of the time of a file's last use


@dataclass(frozen=True)
class StoredFile:
    """A valid file: its content, and its path in the store."""

    path: Path
    content: bytes


@dataclass(frozen=True)
class Store:
    """Files under `folder`, sealed with `secret` if there is one, of at most `most_bytes` in total (0: no limit).

    A name is a path relative to the folder, with slashes; it is part of the seal. A file that the folder lacks is
    looked for in `read_only` folders, then on the server `shared`. A file from the server is stored in the folder.
    """

    folder: Path
    secret: bytes = field(default=b"", repr=False)
    most_bytes: int = 0
    read_only: tuple[Path, ...] = ()
    shared: Remote | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return the folders in the order in which they are searched."""
        return (self.folder, *self.read_only)

    @property
    def own(self) -> Store:
        """Return this store without read-only folders and the server."""
        return replace(self, read_only=(), shared=None)

    @property
    def local(self) -> Store:
        """Return this store without the server."""
        return self if self.shared is None else replace(self, shared=None)

    def path(self, name: str) -> Path:
        """Return the path at which a file is written."""
        return self.folder / name

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it is missing or its seal is invalid."""
        file = self.find(name)
        return None if file is None else file.content

    def find(self, name: str) -> StoredFile | None:
        """Return a file like `read`, with its path, and mark it as used."""
        located = self._locate(name)
        if located is None:
            return None
        path, sealed = located
        if path == self.path(name):
            with contextlib.suppress(OSError):  # another process may have removed it
                if abs(time.time() - path.stat().st_mtime) > TOUCH_S:
                    os.utime(path)
        return StoredFile(path, sealed[: -seal.BYTES])

    def sealed(self, name: str) -> bytes | None:
        """Return a valid file with its seal, for another store, without marking it as used."""
        located = self._locate(name)
        return None if located is None else located[1]

    def _locate(self, name: str) -> tuple[Path, bytes] | None:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                sealed = (folder / name).read_bytes()
                if seal.is_valid(name, sealed, self.secret):
                    return folder / name, sealed
        sealed = (self.shared and self.shared.get(name)) or b""
        if not seal.is_valid(name, sealed, self.secret):
            return None
        with contextlib.suppress(OSError):  # the disk is full: the next process asks the server again
            self._store(name, sealed)
        return self.path(name), sealed

    def write(self, name: str, content: bytes) -> None:
        """Seal and write a file, and evict the least recently used files if it is time. Raise OSError."""
        self._put(name, seal.seal(name, content, self.secret))

    def put(self, name: str, sealed: bytes) -> None:
        """Write a file that is sealed already. Raise OSError; ValueError if its seal is invalid."""
        if not seal.is_valid(name, sealed, self.secret):
            raise ValueError(f"{name} is not sealed as this store's files are")
        self._put(name, sealed)

    def _put(self, name: str, sealed: bytes) -> None:
        if self.shared is not None:  # first, since the folder may refuse it
            self.shared.put(name, sealed)
        self._store(name, sealed)

    def _store(self, name: str, sealed: bytes) -> None:
        folders.write_atomically(self.path(name), sealed)
        eviction.note_written(self.folder, len(sealed), self.most_bytes)

    def write_text(self, name: str, text: str) -> str:
        """Write a text that an error refers to. Return its path, or a note that it cannot be written."""
        try:
            folders.write_atomically(self.path(name), text.encode())
        except OSError as cause:
            return f"not written ({cause.strerror or cause})"
        return str(self.path(name))


def open_store(cfg: Config) -> Store:
    """Return the store that the options name, with one warning if its folder is unusable. Raise BadOptionValue."""
    preferred = folders.cache_folder(cfg)
    folder, secret = folders.usable_folder(preferred), seal.secret_in(cfg.cache_key_file)
    read_only = (preferred,) if folder != preferred and folders.readable(preferred) else ()
    return Store(folder, secret, cfg.cache_size << 20, read_only, remote(cfg.cache_url, secret))
