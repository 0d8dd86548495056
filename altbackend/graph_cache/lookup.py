"""Compiled graphs kept on disk: a process that meets a graph again binds its code without compiling it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.fx import GraphModule

from ..compile_pool import cpp, cuda
from ..compiled import bytecode
from ..compiled.artifact import Code
from ..config.options import Config
from ..debug.trace import GRAPHS, Trace
from ..disk_cache.storage import open_store
from ..errors import AltError
from . import artifacts, entry, entry_files, key
from .json_values import NotCacheable

Bound = TypeVar("Bound")
Around = contextlib.AbstractContextManager[object]
Tell = Callable[[entry_files.Place], None]
NO_RELATIVE = "no graph of these calls is kept"


@dataclass(frozen=True)
class Question:
    """A graph that the cache is asked for."""

    gm: GraphModule
    cfg: Config
    parts: key.Parts
    place: entry_files.Place
    paths: Mapping[int, str]
    sizes: tuple[str, ...]


def through_cache(
    gm: GraphModule,
    cfg: Config,
    trace: Trace,
    job: Mapping[str, Any],
    make: Callable[[], Code],
    bind: Callable[[Code], Bound],
    build: Callable[[Code, Around], Bound],
    kept: Tell | None = None,
) -> Bound:
    """`bind` of the code that is kept for a graph, else `build` of what `make` gives, which is kept then.

    `build` also takes what to build it in: nobody else makes the same graph meanwhile, and when that ends without an
    error, by whatever thread, the code is kept. `job`: what the graph is compiled for, by name; part of the key. `kept`
    is told the place of the entry, if there is one in the end. Raises what `make`, `bind` and `build` raise.
    """
    tell = kept or (lambda _: None)
    with trace.stage("cache"):
        asked = _ask(gm, cfg, job)
    if isinstance(asked, str):
        trace.decision("cache", trace.graph_name, "not cached", asked)
        return build(make(), contextlib.nullcontext())
    call = _found(asked, trace, bind)
    if call is not None:
        tell(asked.place)
        return call
    with contextlib.ExitStack() as lock:
        lock.enter_context(entry_files.lock(asked.place))
        call = _found(asked, trace, bind)
        if call is not None:  # another process has compiled it meanwhile
            tell(asked.place)
            return call
        with trace.stage("cache"):
            trace.decision("cache", trace.graph_name, "miss", why_missed(asked.parts, asked.place))
            lines = key.lines_of(gm)  # as long as it is the graph that was asked for
        code = make()
        with trace.stage("cache"):
            held = _entry(asked, code, lines)
        return build(code, _kept_when_built(asked, held, trace, tell, lock.pop_all()))


@contextlib.contextmanager
def _kept_when_built(
    asked: Question, held: dict[str, Any] | str, trace: Trace, tell: Tell, lock: Around
) -> Iterator[None]:
    """Holds the lock while the kernels are built, and writes the entry afterwards unless that has failed."""
    with lock:
        yield
        reason = held if isinstance(held, str) else entry_files.write(asked.place, held, asked.parts)
        if reason:
            trace.decision("cache", trace.graph_name, "not kept", reason)
        else:
            artifacts.record(asked.place)
            tell(asked.place)


def why_missed(parts: key.Parts, place: entry_files.Place, before: float = math.inf) -> str:
    """What differs from the closest graph of the same calls that was kept before a time (seconds since the epoch)."""
    others = [held for other in entry_files.relatives(place, before) if (held := entry_files.parts(other)) is not None]
    differences = [text for held in others if (text := key.explain_miss(parts, held))]
    return min(differences, key=len) if differences else NO_RELATIVE


def switched_off(cfg: Config) -> str:
    """Why no graph is looked up with these options; "" if they are."""
    if not cfg.cache_graphs:
        return "option cache_graphs is off"
    if cfg.verify_ir or cfg.debug_dir or cfg.log >= GRAPHS or cfg.repro == "always":
        return "the options ask for what every stage makes"
    return ""


def place_of(cfg: Config, family: str, name: str) -> entry_files.Place:
    """Where the entry of a family and a key is."""
    return entry_files.Place(open_store(cfg), family, name)


def _ask(gm: GraphModule, cfg: Config, job: Mapping[str, Any]) -> Question | str:
    """The question, or why the graph is not looked up."""
    if reason := switched_off(cfg):
        return reason
    try:
        parts = key.parts_of(gm, cfg, job)
    except (NotCacheable, AltError) as cause:
        return str(cause)
    except Exception as cause:  # a graph that cannot be described can still be compiled
        return f"its key cannot be made: {type(cause).__name__}: {cause}"
    place = place_of(cfg, key.family_of(parts), key.key_of(parts))
    return Question(gm, cfg, parts, place, entry.attributes(gm), key.conditions_on_sizes(gm))


def _found(asked: Question, trace: Trace, bind: Callable[[Code], Bound]) -> Bound | None:
    start = time.perf_counter()
    held = entry_files.read(asked.place)
    if held is None:
        return None
    try:
        if held["lines"] and held["lines"] != key.lines_of(asked.gm):
            return None
        with trace.stage("cache"):
            code = entry.read(held["code"], asked.gm)
        call = bind(code)
    except Exception as cause:  # whatever is wrong with an entry, compiling anew is right
        trace.decision("cache", trace.graph_name, "unusable", f"{type(cause).__name__}: {cause}")
        return None
    artifacts.record(asked.place)
    trace.decision("cache", trace.graph_name, "hit", f"bound in {(time.perf_counter() - start) * 1e3:.1f} ms")
    return call


def _entry(asked: Question, code: Code, lines: str) -> dict[str, Any] | str:
    """What is to be kept, or why nothing is."""
    if key.conditions_on_sizes(asked.gm) != asked.sizes:
        return "compiling it has put further conditions on its sizes"
    try:
        return {
            "code": entry.write(code, asked.paths),
            "lines": lines if any(c.names_lines for c in code.whole()) else "",
            "binaries": binaries(code, asked.cfg),
        }
    except NotCacheable as cause:
        return str(cause)


def binaries(code: Code, cfg: Config) -> list[str]:
    """Names, in the store, of the machine code that a graph's code needs, and of its host programs' byte code."""
    parts = list(code.whole())
    libraries = [cpp.name_of(c.cpp, cfg) for c in parts if c.cpp]
    cubins = [cuda.name_of(job) for c in parts for job in c.jobs]
    return list(dict.fromkeys([*libraries, *cubins, *(bytecode.name_of(c.python) for c in parts)]))
