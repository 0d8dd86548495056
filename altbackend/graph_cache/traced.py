"""The cache of graphs as Dynamo captured them: a hit loads their compiled parts without AOTAutograd.

An entry names the compiled graphs that AOTAutograd made of a captured graph (stored by `graph_cache/lookup.py`) and
holds the plan to call them (`runtime.aot_wrapper.Plan`). Graphs that need more of AOTAutograd than a plan can express
are traced in every process.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from torch.fx import GraphModule

from altbackend.lazy_dataclass import dataclass

from ..compat import torch_api
from ..compiled.artifact import Code
from ..config.options import Config
from ..debug.trace import DecisionKind, Trace
from ..disk_cache.json_object import JsonObject
from ..runtime.aot_wrapper import Alias, Backward, Calling, Plan, Tangent, inference, training
from ..runtime.boxed import BoxedCall, Function, Values
from ..runtime.sharing import Watch, watched
from ..runtime.views import OPERATORS, Step
from . import artifacts, backward_text, entry, entry_files, lookup, own_device, wrapper_plan
from .json_values import NotCacheable
from .key import Parts, key_of
from .traced_key import family_of, lines_of, parts_of

Load = Callable[[Code, JsonObject], BoxedCall]


@dataclass(frozen=True)
class Query:
    """A captured graph that is looked up in the cache.

    `numbers`: its symbolic inputs. `gpu`: see `lookup.Query`. `met`: conditions on floats that Dynamo has met.
    """

    cfg: Config
    path: entry_files.EntryPath
    parts: Parts
    lines: str
    numbers: tuple[torch.SymInt, ...]
    deterministic: bool
    gpu: int | None = None
    met: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GraphRef:
    """A compiled graph by its entry in the cache of compiled graphs, and the job that it was compiled for."""

    family: str
    key: str
    job: JsonObject


def query_of(gm: GraphModule, inputs: Sequence[object], cfg: Config) -> Query | str:
    """Return the query for a graph as captured, before any pass; or the reason why the graph is not looked up."""
    if not cfg.warm_start:
        return "option warm_start is off"
    if cfg.freezing_discard_parameters:
        return "AOTAutograd has to say which parameters may be discarded"
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
    gpu = own_device.number_in(parts)
    parts = own_device.without_number(parts, gpu)
    path = lookup.entry_path(cfg, f"traced-{family_of(gm)}", key_of(parts))
    numbers = tuple(x for x in inputs if isinstance(x, torch.SymInt))
    met = torch_api.conditions_on_floats()
    return Query(cfg, path, parts, lines_of(gm), numbers, torch.are_deterministic_algorithms_enabled(), gpu, met)


def load_cached(
    query: Query, gm: GraphModule, cfg: Config, trace: Trace, load: Load, on_overlap: Function
) -> Function | None:
    """Return the callable of a cached graph, or None on a miss. `load` makes a callable of a part's code and job.

    `on_overlap` is called instead with inputs that share memory, if the graph writes one of them.
    """
    stored = entry_files.read(query.path)
    if stored is None:
        trace.decision(DecisionKind.WARM_START, trace.graph_name, "miss", lookup.miss_reason(query.parts, query.path))
        return None
    try:
        if stored["lines"] and stored["lines"] != query.lines:
            return None
        calls = [_load_part(ref, gm, query, load) for ref in stored["graphs"]]
        plan = read_plan(stored["plan"])
        if not torch_api.conditions_hold(stored["conditions"], query.numbers):
            trace.decision(
                DecisionKind.WARM_START, trace.graph_name, "miss", "conditions on sizes that do not hold here"
            )
            return None
    except Exception as cause:  # an entry with any defect is a miss
        trace.decision(DecisionKind.WARM_START, trace.graph_name, "unusable", f"{type(cause).__name__}: {cause}")
        return None
    artifacts.record(query.path)
    trace.decision(DecisionKind.WARM_START, trace.graph_name, "hit", f"{len(calls)} compiled graphs loaded")
    watch, calling = Watch(frozenset(plan.changed), torch_api.static_inputs(gm)), calling_of(gm)
    call = _wrapped(calls, plan, str(stored["backward"]), query, calling)
    return watched(call, watch, on_overlap, calling.lifted)


def calling_of(gm: GraphModule) -> Calling:
    """Return what calls of a captured graph depend on. Must be called while Dynamo compiles it."""
    lifted = tuple(torch_api.lifted(gm).values())
    return Calling(lifted, bool(torch._C._is_any_autocast_enabled()), torch_api.mark_dynamic)


def _wrapped(calls: Sequence[BoxedCall], plan: Plan, backward: str, query: Query, calling: Calling) -> Function:
    """Return the callable of a captured graph, from the callables of its parts. `backward`: the last one's text."""
    if len(calls) == 1:
        return inference(calls[0], plan, calling)
    compiled = Backward(calls[1], query.deterministic, backward_text.reader(backward, query.gpu))
    return training(calls[0], compiled, plan, calling)


def _load_part(ref: JsonObject, gm: GraphModule, query: Query, load: Load) -> BoxedCall:
    path = lookup.entry_path(query.cfg, ref["family"], ref["key"])
    stored = entry_files.read(path)
    if stored is None:
        raise LookupError(f"the entry of its {ref['job']['kind']} graph is gone")
    artifacts.record(path)
    gpu = stored["gpu"] if query.gpu is None else query.gpu  # a captured graph over several GPUs has numbers in its key
    return load(entry.read(own_device.with_number(stored["code"], gpu), gm), ref["job"])


class Recording:
    """Follows one captured graph through AOTAutograd, and stores its entry once all its parts are compiled.

    A thread of autograd may compile the backward, when it first runs. If `query` is a reason, nothing is stored.
    """

    def __init__(self, query: Query | str, trace: Trace) -> None:
        self.query, self.trace = query, trace
        self.looked_up = query
        self.plan: Plan | None = None
        self.calls: dict[str, BoxedCall] = {}
        self.on_backward: Callable[[], None] | None = None
        self.graphs: dict[str, GraphRef] = {}
        self.conditions: str | None = None
        self.meta: torch_api.ViewAndMutationMeta | None = None
        self.backward = ""
        self._lock = threading.Lock()

    def part(self, kind: str, gm: GraphModule, job: JsonObject) -> Callable[[entry_files.EntryPath], None] | None:
        """Return the callback that is told where a part's code is stored.

        Must be called before the part is compiled.
        """
        if isinstance(self.looked_up, str):
            return None
        try:
            if kind == "backward":
                if self.plan is None:
                    return None
                assert self.meta is not None, "AOTAutograd gave no metadata of the forward"
                self.plan = replace(self.plan, detached=wrapper_plan.detached(self.meta, gm))
                self.backward = backward_text.write(gm, self.looked_up.gpu)
            else:
                self.meta = torch_api.traced_metadata()
                assert self.meta is not None, "AOTAutograd gave no metadata"
                self.plan = wrapper_plan.plan_of(self.meta, gm, training=kind == "forward")
        except Exception as cause:  # torch's metadata may change between versions; then the graph is not cached
            self.plan = None
            self._give_up(f"{type(cause).__name__}: {cause}" if not isinstance(cause, NotCacheable) else str(cause))
            return None
        if isinstance(self.query, str):
            return None
        return lambda path: self._add(kind, GraphRef(path.family, path.key, dict(job)))

    def built(self, kind: str, call: BoxedCall) -> None:
        """Note the callable of a part that is compiled."""
        self.calls[kind] = call
        if kind == "backward" and self.on_backward is not None:
            self.on_backward()
            self.on_backward = None

    def replaced(self, call: Function, calling: Calling, inputs: int) -> Function:
        """Return the callable that a warm start makes of this graph, in place of AOTAutograd's `call`.

        It starts a call 10 to 100 us earlier. A graph with a backward has it once the backward is compiled, which
        is when it first runs. Graphs without a plan keep `call`. `inputs`: the number of the graph's inputs.
        """
        count = len(getattr(self.meta, "input_info", ()))
        if self.plan is None or isinstance(self.looked_up, str) or count != len(calling.lifted) + inputs:
            return call  # with other counts, AOTAutograd has merged inputs
        own = functools.partial(self._own, self.looked_up, calling)
        current = [own() or call]
        if "inference" in self.calls:
            return current[0]

        def take_own() -> None:
            current[0] = own() or call

        self.on_backward = take_own
        return lambda *args: current[0](*args)

    def _own(self, query: Query, calling: Calling) -> Function | None:
        """Return the callable of the parts; None without a plan or before all parts are compiled."""
        kinds = ("inference",) if "inference" in self.calls else ("forward", "backward")
        if self.plan is None or not {*kinds} <= {*self.calls}:
            return None
        return _wrapped([self.calls[kind] for kind in kinds], self.plan, self.backward, query, calling)

    def finish(self) -> None:
        """Note all conditions on sizes. Must be called when AOTAutograd has returned."""
        if isinstance(self.query, str):
            return
        if float_conditions := torch_api.conditions_on_floats() - self.query.met:
            self._give_up(f"it holds for some numbers alone, which no size tells: {min(float_conditions)}")
            return
        try:
            self.conditions = torch_api.conditions(self.query.numbers)
        except Exception as cause:
            self._give_up(f"conditions on its sizes cannot be written down: {type(cause).__name__}: {cause}")
        self._write()

    def _add(self, kind: str, ref: GraphRef) -> None:
        self.graphs[kind] = ref
        self._write()

    def _give_up(self, reason: str) -> None:
        self.trace.decision(DecisionKind.WARM_START, self.trace.graph_name, "not stored", reason)
        self.query = reason

    def _write(self) -> None:
        """Write the entry once the last part is compiled."""
        kinds = ("inference",) if "inference" in self.graphs else ("forward", "backward")
        with self._lock:
            query = self.query
            if isinstance(query, str) or self.conditions is None or self.plan is None or not {*kinds} <= {*self.graphs}:
                return None
            self.query = "its entry is being stored"
        lines = False
        for kind in kinds:
            ref = self.graphs[kind]
            stored = entry_files.read(lookup.entry_path(query.cfg, ref.family, ref.key))
            if stored is None or entry.takes_constants(stored["code"]):
                return self._give_up(f"constants of its {kind} graph have no name in the captured graph")
            lines |= bool(stored["lines"])
        content = {
            "graphs": [asdict(self.graphs[kind]) for kind in kinds],
            "plan": asdict(self.plan),
            "backward": self.backward,
            "conditions": self.conditions,
            "lines": query.lines if lines else "",
            "binaries": [],  # the entries of the compiled graphs name them
        }
        reason = entry_files.write(query.path, content, query.parts)
        if not reason:
            artifacts.record(query.path)
        self.trace.decision(
            DecisionKind.WARM_START, self.trace.graph_name, "not stored" if reason else "stored", reason
        )
        return None


def read_plan(stored: JsonObject) -> Plan:
    """Return the plan that `asdict` wrote. Raise ValueError, KeyError or TypeError if the JSON value is malformed."""
    tangents = tuple(
        Tangent(_number(t["result"]), str(t["format"]), _numbers(t["size"]), _numbers(t["stride"]))
        for t in stored["tangents"]
    )
    return Plan(
        tuple(_number(k, least=-1) for k in stored["same"]),
        tuple(map(_numbers, stored["dynamic"])),
        _numbers(stored["written"]),
        _numbers(stored["fixed"]),
        _numbers(stored["unviewed"]),
        _numbers(stored["detached"]),
        _number(stored["unchecked"]),
        _number(stored["sizes"]),
        tangents,
        tuple(map(_alias, stored["views"])),
        _numbers(stored["changed"]),
    )


def _alias(stored: JsonObject) -> Alias:
    steps = stored["steps"]
    view_steps = None if steps is None else tuple(map(_step, steps))
    return Alias(_number(stored["result"]), _number(stored["base"]), stored["requires_grad"] is True, view_steps)


def _step(stored: JsonObject) -> Step:
    name, part = stored["name"], _number(stored["part"], least=-1)
    if name not in OPERATORS:
        raise ValueError(f"{name!r} is not a view operator")
    return Step(name, tuple(map(_argument, stored["args"])), part)


def _argument(stored: object) -> object:
    """Return an argument of a view operator."""
    if stored is None or type(stored) in (bool, int):
        return stored
    if isinstance(stored, str):
        if not isinstance(getattr(torch, stored), torch.dtype):
            raise ValueError(f"{stored!r} is not a dtype")
        return stored
    if not isinstance(stored, list):
        raise TypeError(f"{stored!r} is no argument of a view operator")
    return tuple(_number(n, least=-sys.maxsize) for n in stored)


def _numbers(stored: Values) -> tuple[int, ...]:
    return tuple(map(_number, stored))


def _number(x: object, least: int = 0) -> int:
    if type(x) is not int or x < least:
        raise ValueError(f"{x!r} is not an integer of at least {least}")
    return x
