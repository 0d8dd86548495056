"""Rules for replaying a compiled call from a CUDA graph, and the facts that the recording needs."""

from __future__ import annotations

from altbackend.lazy_dataclass import dataclass

from ..config.options import Config
from ..debug.trace import DecisionKind, Trace
from ..ir import expr as ex
from ..ir.loops import Extern, Program, View, writes
from ..runtime import control_flow
from ..runtime.boxed import BoxedCall, boxed
from ..runtime.capture import of_device
from ..runtime.cuda import on_device
from ..runtime.cuda_graphs import Recorded, Signature


@dataclass(frozen=True)
class CallFacts:
    """Properties of a graph's calls; `Signature` has fields of the same names."""

    static: tuple[int, ...]
    static_from: int
    user_outputs: int
    follows: bool


@dataclass(frozen=True)
class Facts:
    """Properties of a program that a recording needs.

    `refusal`: why the program cannot be replayed, or "". `written`: indices of the inputs that it writes. `sized`:
    whether sizes vary between calls. `device`: number of its GPU.
    """

    refusal: str
    written: tuple[int, ...]
    sized: bool
    device: int


def facts(p: Program) -> Facts:
    """Return the facts of a program with a tensor on a GPU."""
    written = {o for n in p.nodes for o in writes(n)}
    return Facts(
        refusal_of(p),
        tuple(k for k, b in enumerate(p.inputs) if b in written),
        any(b not in p.buffers or bool(ex.syms_of(p.buffers[b].extent)) for b in p.inputs),
        next(b.device.index or 0 for b in p.buffers.values() if b.device.type == "cuda"),
    )


def recorded(call: BoxedCall, facts: Facts, call_facts: CallFacts, cfg: Config, trace: Trace) -> BoxedCall:
    """Return `call` replayed from CUDA graphs if its program allows that; otherwise return `call` and record why."""
    reason = facts.refusal
    verdict = "recorded at the second call" if not reason else "not used"
    trace.decision(DecisionKind.CUDAGRAPHS, trace.graph_name, verdict, reason or "all of its work is on one device")
    if reason:
        return call
    signature = Signature(
        trace.graph_name,
        frozenset(call_facts.static),
        call_facts.static_from,
        frozenset(facts.written),
        call_facts.user_outputs,
        facts.sized,
        cfg.cudagraph_limit,
        call_facts.follows,
    )
    return boxed(on_device(Recorded(call, signature, of_device(facts.device)), facts.device))


def refusal_of(p: Program) -> str:
    """Return why a program cannot be replayed, or ""."""
    if len(devices := {b.device for b in p.buffers.values() if b.device.type == "cuda"}) > 1:
        return f"it works on {len(devices)} devices"
    for b in p.inputs:
        if b in p.buffers and p.buffers[b].device.type != "cuda":
            return f"input {b} is on the {p.buffers[b].device.type}: the recording would contain its value"
        if b in p.buffers and p.buffers[b].negative:
            return f"input {b} has a negative bit, which copies do not keep"
    for o in p.outputs:
        if isinstance(o, View) and p.buffers[o.buffer].device.type != "cuda":
            return f"result {o.buffer} is on the {p.buffers[o.buffer].device.type}"
    for n in p.nodes:
        if isinstance(n, Extern) and n.defines:
            return f"data decides {', '.join(n.defines)}"
        if isinstance(n, Extern) and n.target in control_flow.DATA_DECIDES:
            return f"data decides what {n.origins[-1].node if n.origins else n.target.__name__} does"
        if isinstance(n, Extern) and any(o in p.buffers and p.buffers[o].device.type != "cuda" for o in n.outs if o):
            return f"{n.target} brings a result to the CPU"
    return ""
