"""Reading and writing sealed files by name: in the cache folder, in one that can only be read, on a shared server."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config.options import Config
from . import eviction, folders, seal
from .remote import Remote, remote

TOUCH_S = 60.0  # how exactly the last use of a file is known


@dataclass(frozen=True)
class Found:
    """A whole file of ours: its content, and where it lies, or would if the folder had taken it."""

    path: Path
    content: bytes


@dataclass(frozen=True)
class Store:
    """Files under `folder`, sealed with `secret` if there is one, of at most `most_bytes` altogether (0: any).

    A name is a path relative to the folder, with slashes; it is part of the seal. What the folder has not is looked for
    in `beneath`, folders that are only read, then on the server `shared`; what that gives the folder keeps.
    """

    folder: Path
    secret: bytes = field(default=b"", repr=False)
    most_bytes: int = 0
    beneath: tuple[Path, ...] = ()
    shared: Remote | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """In the order in which they are looked at."""
        return (self.folder, *self.beneath)

    @property
    def own(self) -> Store:
        """The same without what lies elsewhere."""
        return replace(self, beneath=(), shared=None)

    @property
    def here(self) -> Store:
        """The same without the server."""
        return self if self.shared is None else replace(self, shared=None)

    def path(self, name: str) -> Path:
        """Where a file is written."""
        return self.folder / name

    def read(self, name: str) -> bytes | None:
        """The content of a file, if it is whole and ours; anything else is a miss, and will be replaced."""
        found = self.find(name)
        return None if found is None else found.content

    def find(self, name: str) -> Found | None:
        """A file, as `read` finds it; it counts as used."""
        located = self._locate(name)
        if located is None:
            return None
        path, held = located
        if path == self.path(name):
            with contextlib.suppress(OSError):  # it may be gone again
                if abs(time.time() - path.stat().st_mtime) > TOUCH_S:
                    os.utime(path)
        return Found(path, held[: -seal.BYTES])

    def sealed(self, name: str) -> bytes | None:
        """The whole of a file, if it is ours, for another store; it does not count as used."""
        located = self._locate(name)
        return None if located is None else located[1]

    def _locate(self, name: str) -> tuple[Path, bytes] | None:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                held = (folder / name).read_bytes()
                if seal.holds(name, held, self.secret):
                    return folder / name, held
        held = (self.shared and self.shared.get(name)) or b""
        if not seal.holds(name, held, self.secret):
            return None
        with contextlib.suppress(OSError):  # a full disk: the next process asks the server again
            self._keep(name, held)
        return self.path(name), held

    def write(self, name: str, content: bytes) -> None:
        """Put a file in place; may remove others that were not used for longest. Raises OSError."""
        self._put(name, seal.seal(name, content, self.secret))

    def put(self, name: str, sealed: bytes) -> None:
        """Put a file in place that holds already. Raises OSError, ValueError."""
        if not seal.holds(name, sealed, self.secret):
            raise ValueError(f"{name} is not sealed as this store's files are")
        self._put(name, sealed)

    def _put(self, name: str, sealed: bytes) -> None:
        if self.shared is not None:  # first, since the folder may refuse it
            self.shared.put(name, sealed)
        self._keep(name, sealed)

    def _keep(self, name: str, sealed: bytes) -> None:
        folders.write_whole(self.path(name), sealed)
        eviction.written(self.folder, len(sealed), self.most_bytes)

    def keep_text(self, name: str, text: str) -> str:
        """Keep a text that an error is about; its path, or what stands for it where it cannot be written."""
        try:
            folders.write_whole(self.path(name), text.encode())
        except OSError as cause:
            return f"not kept ({cause.strerror or cause})"
        return str(self.path(name))


def open_store(cfg: Config) -> Store:
    """The store that the options name. Warns once where its folder cannot be used. Raises BadOptionValue."""
    wanted = folders.cache_folder(cfg)
    folder, secret = folders.usable_folder(wanted), seal.secret_in(cfg.cache_key_file)
    beneath = (wanted,) if folder != wanted and folders.readable(wanted) else ()
    return Store(folder, secret, cfg.cache_size << 20, beneath, remote(cfg.cache_url, secret))
