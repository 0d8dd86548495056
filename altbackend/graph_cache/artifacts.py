"""Compiled graphs in the files of `torch.compiler.save_cache_artifacts` and `load_cache_artifacts`.

A process that loads artifacts before it compiles anything must import this module first: torch knows only the kinds of
artifacts that are registered with it.
"""

from __future__ import annotations

import io
import logging

from ..compat import torch_api
from ..config.resolve import resolve
from ..disk_cache.storage import open_store
from ..errors import AltError
from . import archive
from .entry_files import EntryPath

KIND = "altbackend"
logger = logging.getLogger(__name__)
# Entries that this process has loaded. Their files are read when the user saves artifacts.
_loaded: dict[str, EntryPath] = {}


class GraphArtifact(torch_api.CacheArtifact):
    """An artifact of torch with one graph: its entry and the machine code that it needs, as an archive."""

    def __init__(self, key: str, content: bytes) -> None:
        object.__setattr__(self, "key", key)  # the base is frozen
        object.__setattr__(self, "loaded", content)

    loaded: bytes

    @property
    def content(self) -> bytes:
        """Return the archive. It holds no graph if the entry was removed after the graph was loaded."""
        if self.loaded:
            return self.loaded
        with io.BytesIO() as out:
            archive.pack([_loaded[self.key]], out)
            return out.getvalue()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphArtifact) and (self.key, self.loaded) == (other.key, other.loaded)

    def __hash__(self) -> int:
        return hash((self.key, self.loaded))

    @staticmethod
    def type() -> str:
        return KIND

    def populate_cache(self) -> None:
        """Write the graph into the cache folder that this process's environment names.

        Log errors instead of raising them.
        """
        try:
            archive.unpack(open_store(resolve()), io.BytesIO(self.content), f"the artifact {self.key}")
        except (AltError, OSError) as cause:
            logger.warning("%s", cause)


def record(path: EntryPath) -> None:
    """Tell torch of a graph that was loaded or stored. torch asks for its content when the user saves artifacts."""
    key = f"{path.family}/{path.key}"
    _loaded[key] = path
    torch_api.CacheArtifactManager.record_artifact(KIND, key, b"")


torch_api.CacheArtifactFactory.register(GraphArtifact)
