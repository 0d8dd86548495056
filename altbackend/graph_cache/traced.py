"""Graphs as Dynamo captured them: how their compiled parts are called is kept, so that a later process binds them.

Without an entry AOTAutograd traces such a graph, and what it makes is compiled. An entry says which compiled graphs
came of it (`graph_cache/lookup.py` keeps those) and how they are called (`runtime.wrapped.Plan`). Only graphs that need
nothing else of AOTAutograd are kept; the others take the longer way in every process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from ..compat import torch_api
from ..config.options import Config
from ..debug.trace import Trace
from ..runtime.aot_wrapper import Alias, Plan, Tangent, inference, training
from ..runtime.sharing import Watch, watched
from ..runtime.views import OPERATORS, Step
from . import artifacts, entry, entry_files, lookup, wrapper_plan
from .json_values import NotCacheable
from .key import Parts, key_of
from .traced_key import family_of, lines_of, parts_of

Call = Callable[[list[Any]], Sequence[Any]]
Bind = Callable[[Any, Mapping[str, Any]], Call]


@dataclass(frozen=True)
class Question:
    """A captured graph that the cache is asked for."""

    cfg: Config
    place: entry_files.Place
    parts: Parts
    lines: str
    numbers: tuple[Any, ...]
    deterministic: bool


@dataclass(frozen=True)
class Half:
    """A compiled graph by its entry in the graphs' cache, and what it was compiled for."""

    family: str
    key: str
    job: Mapping[str, Any]


def ask(gm: GraphModule, inputs: Sequence[Any], cfg: Config) -> Question | str:
    """The question, or why the graph is not looked up. Takes the graph as captured, before any pass."""
    if not cfg.warm_start:
        return "option warm_start is off"
    if any(isinstance(x, torch.Tensor) and x.is_mkldnn for x in inputs):
        return "an input has oneDNN's own layout"
    if reason := lookup.switched_off(cfg):
        return reason
    try:
        parts = parts_of(gm, inputs, cfg)
    except NotCacheable as cause:
        return str(cause)
    except Exception as cause:  # a graph that cannot be described can still be compiled
        return f"its key cannot be made: {type(cause).__name__}: {cause}"
    place = lookup.place_of(cfg, f"traced-{family_of(gm)}", key_of(parts))
    numbers = tuple(x for x in inputs if isinstance(x, torch.SymInt))
    return Question(cfg, place, parts, lines_of(gm), numbers, torch.are_deterministic_algorithms_enabled())


def find(
    asked: Question, gm: GraphModule, cfg: Config, trace: Trace, bind: Bind, otherwise: Callable[..., Any]
) -> Callable[..., Any] | None:
    """The callable of a graph that is kept, or None. `bind` makes one of a compiled graph's code and its job.

    `otherwise` is called with inputs that overlap, if one of them is written.
    """
    held = entry_files.read(asked.place)
    if held is None:
        trace.decision("warm start", trace.graph_name, "miss", lookup.why_missed(asked.parts, asked.place))
        return None
    try:
        if held["lines"] and held["lines"] != asked.lines:
            return None
        calls = [_bound(half, gm, cfg, bind) for half in held["halves"]]
        plan = read_plan(held["plan"])
        if not torch_api.conditions_hold(held["conditions"], asked.numbers):
            trace.decision("warm start", trace.graph_name, "miss", "conditions on sizes that do not hold here")
            return None
    except Exception as cause:  # whatever is wrong with an entry, compiling anew is right
        trace.decision("warm start", trace.graph_name, "unusable", f"{type(cause).__name__}: {cause}")
        return None
    artifacts.record(asked.place)
    trace.decision("warm start", trace.graph_name, "hit", f"{len(calls)} compiled graphs bound")
    watch, before = Watch(frozenset(plan.changed), torch_api.static_inputs(gm)), tuple(torch_api.lifted(gm).values())
    if len(calls) == 1:
        call = inference(calls[0], plan, torch_api.mark_dynamic, before)
    else:
        call = training(calls[0], calls[1], plan, torch_api.mark_dynamic, asked.deterministic, before)
    return watched(call, watch, otherwise, before)


def _bound(half: Mapping[str, Any], gm: GraphModule, cfg: Config, bind: Bind) -> Call:
    place = lookup.place_of(cfg, half["family"], half["key"])
    held = entry_files.read(place)
    if held is None:
        raise LookupError(f"the entry of its {half['job']['kind']} graph is gone")
    artifacts.record(place)
    return bind(entry.read(held["code"], gm), half["job"])


class Recording:
    """Follows one captured graph through AOTAutograd, and keeps how it is called once all its parts are compiled.

    A backward is compiled when it first runs, by a thread of autograd perhaps; `asked` a text records nothing.
    """

    def __init__(self, asked: Question | str, trace: Trace) -> None:
        self.asked, self.trace = asked, trace
        self.plan: Plan | None = None
        self.halves: dict[str, Half] = {}
        self.conditions: str | None = None
        self.meta: Any = None
        self._lock = threading.Lock()

    def part(self, kind: str, gm: GraphModule, job: Mapping[str, Any]) -> Callable[[entry_files.Place], None] | None:
        """To be told where a part's code is kept; asked before it is compiled."""
        if isinstance(self.asked, str):
            return None
        try:
            if kind == "backward":
                if self.plan is None:
                    return None
                self.plan = replace(self.plan, detached=wrapper_plan.detached(self.meta, gm))
            else:
                self.meta = torch_api.traced_metadata()
                self.plan = wrapper_plan.plan_of(self.meta, gm, training=kind == "forward")
        except Exception as cause:  # torch's metadata may change; nothing is kept then
            self._give_up(f"{type(cause).__name__}: {cause}" if not isinstance(cause, NotCacheable) else str(cause))
            return None
        return lambda place: self._kept(kind, Half(place.family, place.key, dict(job)))

    def finish(self) -> None:
        """AOTAutograd has returned: all conditions on sizes are known."""
        if isinstance(self.asked, str):
            return
        try:
            self.conditions = torch_api.conditions(self.asked.numbers)
        except Exception as cause:
            self._give_up(f"conditions on its sizes cannot be written down: {type(cause).__name__}: {cause}")
        self._write()

    def _kept(self, kind: str, half: Half) -> None:
        self.halves[kind] = half
        self._write()

    def _give_up(self, reason: str) -> None:
        self.trace.decision("warm start", self.trace.graph_name, "not kept", reason)
        self.asked, self.plan = reason, None

    def _write(self) -> None:
        """Keep the entry when its last part has come."""
        kinds = ("inference",) if "inference" in self.halves else ("forward", "backward")
        with self._lock:
            asked = self.asked
            if isinstance(asked, str) or self.conditions is None or self.plan is None or not {*kinds} <= {*self.halves}:
                return None
            self.asked = "kept"
        lines = False
        for kind in kinds:
            half = self.halves[kind]
            held = entry_files.read(lookup.place_of(asked.cfg, half.family, half.key))
            if held is None or entry.takes_constants(held["code"]):
                return self._give_up(f"constants of its {kind} graph have no name in the captured graph")
            lines |= bool(held["lines"])
        entry_ = {
            "halves": [asdict(self.halves[kind]) for kind in kinds],
            "plan": asdict(self.plan),
            "conditions": self.conditions,
            "lines": asked.lines if lines else "",
            "binaries": [],  # the compiled graphs name those
        }
        reason = entry_files.write(asked.place, entry_, asked.parts)
        if not reason:
            artifacts.record(asked.place)
        self.trace.decision("warm start", self.trace.graph_name, "not kept" if reason else "kept", reason)
        return None


def read_plan(held: Mapping[str, Any]) -> Plan:
    """The plan that `asdict` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    tangents = tuple(
        Tangent(_number(t["result"]), str(t["format"]), _numbers(t["size"]), _numbers(t["stride"]))
        for t in held["tangents"]
    )
    return Plan(
        tuple(_number(k, least=-1) for k in held["same"]),
        tuple(map(_numbers, held["dynamic"])),
        _numbers(held["written"]),
        _numbers(held["fixed"]),
        _numbers(held["unviewed"]),
        _numbers(held["detached"]),
        _number(held["unchecked"]),
        _number(held["sizes"]),
        tangents,
        tuple(map(_alias, held["views"])),
        _numbers(held["changed"]),
    )


def _alias(held: Mapping[str, Any]) -> Alias:
    steps = held["steps"]
    made = None if steps is None else tuple(map(_step, steps))
    return Alias(_number(held["result"]), _number(held["base"]), held["requires_grad"] is True, made)


def _step(held: Mapping[str, Any]) -> Step:
    name, part = held["name"], _number(held["part"], least=-1)
    if name not in OPERATORS:
        raise ValueError(f"{name!r} is no view operator")
    return Step(name, tuple(map(_argument, held["args"])), part)


def _argument(held: Any) -> Any:
    """An argument of a view operator."""
    if held is None or type(held) in (bool, int):
        return held
    if isinstance(held, str):
        if not isinstance(getattr(torch, held), torch.dtype):
            raise ValueError(f"{held!r} is no dtype")
        return held
    return tuple(_number(n, least=-sys.maxsize) for n in held)


def _numbers(held: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(_number, held))


def _number(x: Any, least: int = 0) -> int:
    if type(x) is not int or x < least:
        raise ValueError(f"{x!r} where a number from {least} belongs")
    return x
