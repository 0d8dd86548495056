"""Reading and writing sealed files of the cache folder, by name."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from .. import folders
from ..config import Config
from . import evict, seal

TOUCH_S = 60.0  # how exactly the last use of a file is known


@dataclass(frozen=True)
class Store:
    """Files under `folder`, sealed with `secret` if there is one, of at most `most_bytes` altogether (0: any).

    A name is a path relative to the folder, with slashes; it is part of the seal.
    """

    folder: Path
    secret: bytes = field(default=b"", repr=False)
    most_bytes: int = 0

    def path(self, name: str) -> Path:
        return self.folder / name

    def read(self, name: str) -> bytes | None:
        """The content of a file, if it is whole and ours; anything else is a miss, and will be replaced."""
        held = self.sealed(name)
        if held is None:
            return None
        with contextlib.suppress(OSError):  # a folder that is read only
            if abs(time.time() - self.path(name).stat().st_mtime) > TOUCH_S:
                os.utime(self.path(name))
        return held[: -seal.BYTES]

    def sealed(self, name: str) -> bytes | None:
        """The whole of a file, if it is ours, for another store; it does not count as used."""
        try:
            held = self.path(name).read_bytes()
        except OSError:
            return None
        return held if seal.holds(name, held, self.secret) else None

    def write(self, name: str, content: bytes) -> None:
        """Put a file in place; may remove others that were not used for longest. Raises OSError."""
        self._put(name, seal.seal(name, content, self.secret))

    def put(self, name: str, sealed: bytes) -> None:
        """Put a file in place that holds already. Raises OSError, ValueError."""
        if not seal.holds(name, sealed, self.secret):
            raise ValueError(f"{name} is not sealed as this store's files are")
        self._put(name, sealed)

    def _put(self, name: str, sealed: bytes) -> None:
        folders.write_whole(self.path(name), sealed)
        evict.written(self.folder, len(sealed), self.most_bytes)

    def keep_text(self, name: str, text: str) -> str:
        """Keep a text that an error is about; its path, or what stands for it where it cannot be written."""
        try:
            folders.write_whole(self.path(name), text.encode())
        except OSError as cause:
            return f"not kept ({cause.strerror or cause})"
        return str(self.path(name))


def open_store(cfg: Config) -> Store:
    """The store that the options name. Warns once where its folder cannot be used. Raises BadOptionValue."""
    folder = folders.usable_folder(folders.cache_folder(cfg))
    return Store(folder, seal.secret_in(cfg.cache_key_file), cfg.cache_size << 20)
