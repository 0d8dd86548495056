"""Compiled graphs among what `torch.compiler.save_cache_artifacts` saves and `load_cache_artifacts` loads.

A process that loads before it has compiled anything imports this module first: torch knows only the kinds of artifacts
that were registered with it.
"""

from __future__ import annotations

import io
import logging

from ..compat import torch_api
from ..config.options import resolve
from ..disk_cache.storage import open_store
from ..errors import AltError
from . import archive
from .entry_files import Place

KIND = "altbackend"
logger = logging.getLogger(__name__)
# Graphs that this process has bound. Their files are read when they are saved, if they ever are.
_bound: dict[str, Place] = {}


class GraphArtifact(torch_api.CacheArtifact):
    """A graph's entry with the machine code that it needs: a bundle of one graph."""

    def __init__(self, key: str, content: bytes) -> None:
        object.__setattr__(self, "key", key)  # the base is frozen
        object.__setattr__(self, "loaded", content)

    loaded: bytes

    @property
    def content(self) -> bytes:
        """The bundle; one without a graph where that was removed since it was bound."""
        if self.loaded:
            return self.loaded
        with io.BytesIO() as out:
            archive.pack([_bound[self.key]], out)
            return out.getvalue()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphArtifact) and (self.key, self.loaded) == (other.key, other.loaded)

    def __hash__(self) -> int:
        return hash((self.key, self.loaded))

    @staticmethod
    def type() -> str:
        return KIND

    def populate_cache(self) -> None:
        """Put the graph into the cache folder of this process's environment; what is wrong with it is only logged."""
        try:
            archive.unpack(open_store(resolve()), io.BytesIO(self.content), f"the artifact {self.key}")
        except (AltError, OSError) as cause:
            logger.warning("%s", cause)


def record(place: Place) -> None:
    """Tell torch of a graph that was bound; torch asks for its content when the user saves."""
    key = f"{place.family}/{place.key}"
    _bound[key] = place
    torch_api.CacheArtifactManager.record_artifact(KIND, key, b"")


torch_api.CacheArtifactFactory.register(GraphArtifact)
