"""The cache of compiled graphs: a lookup is a `Hit` with code to load, a `Miss`, or `Uncacheable`."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping

from torch.fx import GraphModule

from altbackend.lazy_dataclass import dataclass

from ..compile_pool import cpp, cuda
from ..compiled import bytecode
from ..compiled.artifact import Code
from ..config.options import Config
from ..debug.trace import GRAPHS, DecisionKind, Trace
from ..disk_cache.storage import open_store
from ..errors import AltError
from . import artifacts, entry, entry_files, key, own_device
from .json_values import NotCacheable

OnStored = Callable[[entry_files.EntryPath], None]
NO_FAMILY = "the cache holds no graph with these calls"


@dataclass(frozen=True)
class Query:
    """A graph that is looked up, described before compiling changes it.

    `attribute_paths` names its constants by identity, `sizes` the conditions on symbolic sizes so far. `gpu` is the
    number of its GPU, which `parts` leave out; None for a graph without a GPU or over several.
    """

    gm: GraphModule
    cfg: Config
    parts: key.Parts
    path: entry_files.EntryPath
    attribute_paths: Mapping[int, str]
    sizes: tuple[str, ...]
    gpu: int | None = None

    @functools.cached_property
    def lines(self) -> str:
        """Return the digest of the user's lines behind the nodes. Must be read before compiling changes the graph."""
        return key.lines_of(self.gm)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Let one process at a time compile this graph."""
        return entry_files.lock(self.path)


@dataclass(frozen=True)
class Hit:
    """The code of an equal graph. `start` is the time of the lookup in seconds (`time.perf_counter`)."""

    query: Query
    code: Code
    start: float

    def record_loaded(self, trace: Trace, on_stored: OnStored) -> None:
        """Record that the code was loaded."""
        artifacts.record(self.query.path)
        trace.decision(
            DecisionKind.CACHE, trace.graph_name, "hit", f"loaded in {(time.perf_counter() - self.start) * 1e3:.1f} ms"
        )
        on_stored(self.query.path)


@dataclass(frozen=True)
class Miss:
    """No usable entry exists. `reason` is "" if there is none at all; `miss_reason` then compares with other graphs."""

    query: Query
    reason: str = ""


@dataclass(frozen=True)
class Uncacheable:
    """A graph that is neither looked up nor stored."""

    reason: str


def lookup(gm: GraphModule, cfg: Config, job: Mapping[str, object], trace: Trace) -> Hit | Miss | Uncacheable:
    """Look a functional graph up. `job`: the fields of the compilation job, which are part of the key."""
    with trace.stage("cache"):
        query = _query(gm, cfg, job)
    return query if isinstance(query, Uncacheable) else find(query, trace)


def find(query: Query, trace: Trace) -> Hit | Miss:
    """Read the entry of a query. An entry that cannot be used is a miss."""
    start = time.perf_counter()
    stored = entry_files.read(query.path)
    if stored is None:
        return Miss(query)
    try:
        if stored["lines"] and stored["lines"] != query.lines:
            return Miss(query, "errors of the cached graph name other lines")
        with trace.stage("cache"):
            return Hit(query, entry.read(own_device.with_number(stored["code"], query.gpu), query.gm), start)
    except Exception as cause:  # an entry with any defect is a miss
        return unusable(query, cause, trace)


def unusable(query: Query, cause: Exception, trace: Trace) -> Miss:
    """Return the miss of an entry that cannot be read or loaded, and record why."""
    reason = f"{type(cause).__name__}: {cause}"
    trace.decision(DecisionKind.CACHE, trace.graph_name, "unusable", reason)
    return Miss(query, reason)


@dataclass(frozen=True)
class NewEntry:
    """The entry of a graph that has been translated. `content` is a reason if the graph cannot be stored."""

    path: entry_files.EntryPath
    parts: key.Parts
    content: dict[str, object] | str

    @contextlib.contextmanager
    def stored_after(
        self, lock: contextlib.AbstractContextManager[object], trace: Trace, on_stored: OnStored
    ) -> Iterator[None]:
        """Hold `lock` while the kernels are built, in whatever thread, and write the entry unless that raises."""
        with lock:
            yield
            if reason := self.content if isinstance(self.content, str) else self._write(self.content):
                trace.decision(DecisionKind.CACHE, trace.graph_name, "not stored", reason)
                return
            artifacts.record(self.path)
            on_stored(self.path)

    def _write(self, content: dict[str, object]) -> str:
        return entry_files.write(self.path, content, self.parts)


def new_entry(query: Query, code: Code, lines: str, trace: Trace) -> NewEntry:
    """Return the entry of `code`. `lines` is `query.lines`, read before the graph was compiled."""
    with trace.stage("cache"):
        return NewEntry(query.path, query.parts, _content(query, code, lines))


def _content(query: Query, code: Code, lines: str) -> dict[str, object] | str:
    if key.conditions_on_sizes(query.gm) != query.sizes:
        return "compiling it has put further conditions on its sizes"
    try:
        return {
            "code": own_device.without_number(entry.write(code, query.attribute_paths), query.gpu),
            "gpu": query.gpu,
            "lines": lines if any(c.names_lines for c in code.with_subgraphs()) else "",
            "binaries": binaries(code, query.cfg),
        }
    except NotCacheable as cause:
        return str(cause)


def binaries(code: Code, cfg: Config) -> list[str]:
    """Return the store's names of the machine code and the byte code that a graph needs."""
    parts = list(code.with_subgraphs())
    libraries = [cpp.name_of(c.cpp, cfg) for c in parts if c.cpp]
    cubins = [cuda.name_of(job) for c in parts for job in c.jobs]
    return list(dict.fromkeys([*libraries, *cubins, *(bytecode.name_of(c.python) for c in parts)]))


def miss_reason(parts: key.Parts, path: entry_files.EntryPath, before: float = math.inf) -> str:
    """Return how the closest graph with the same calls differs, of those stored before a time.

    `before` is in seconds since the epoch.
    """
    members = (entry_files.parts(other) for other in entry_files.family_members(path, before))
    differences = [text for cached in members if cached is not None and (text := key.differences(parts, cached))]
    return min(differences, key=len) if differences else NO_FAMILY


def switched_off(cfg: Config) -> str:
    """Return why graphs are not looked up with these options, or ""."""
    if not cfg.cache_graphs:
        return "option cache_graphs is off"
    if cfg.verify_ir or cfg.debug_dir or cfg.log >= GRAPHS or cfg.repro == "always":
        return "the options ask for the output of every stage"
    return ""


def entry_path(cfg: Config, family: str, name: str) -> entry_files.EntryPath:
    """Return the path of an entry by its family and its key."""
    return entry_files.EntryPath(open_store(cfg), family, name)


def _query(gm: GraphModule, cfg: Config, job: Mapping[str, object]) -> Query | Uncacheable:
    if reason := switched_off(cfg):
        return Uncacheable(reason)
    try:
        parts = key.parts_of(gm, cfg, job)
    except (NotCacheable, AltError) as cause:
        return Uncacheable(str(cause))
    except Exception as cause:  # a graph that cannot be described can still be compiled
        return Uncacheable(f"its key cannot be made: {type(cause).__name__}: {cause}")
    gpu = own_device.number_in(parts)
    parts = own_device.without_number(parts, gpu)
    path = entry_path(cfg, key.family_of(parts), key.key_of(parts))
    return Query(gm, cfg, parts, path, entry.attributes(gm), key.conditions_on_sizes(gm), gpu)
