"""Whether a compiled call may be replayed from a CUDA graph, and what the recording must know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.options import Config
from ..debug.trace import Trace
from ..ir import expr as ex
from ..ir.loops import Extern, Program, View, writes
from ..runtime import control_flow
from ..runtime.capture import of_device
from ..runtime.cuda import on_device
from ..runtime.cuda_graphs import Recorded, Signature

Call = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Given:
    """What the caller of a graph promises; see `Signature`, whose fields of these names they become."""

    static: tuple[int, ...]
    static_from: int
    user_outputs: int
    follows: bool


@dataclass(frozen=True)
class Facts:
    """What a recording must know of a program.

    `refusal`: why it cannot be replayed, or "". `written`: inputs that it writes. `sized`: whether sizes vary from
    call to call. `device`: number of its GPU.
    """

    refusal: str
    written: tuple[int, ...]
    sized: bool
    device: int


def facts(p: Program) -> Facts:
    """The facts of a program with a tensor on a GPU."""
    written = {o for n in p.nodes for o in writes(n)}
    return Facts(
        why_not(p),
        tuple(k for k, b in enumerate(p.inputs) if b in written),
        any(b not in p.buffers or bool(ex.syms_of(p.buffers[b].extent)) for b in p.inputs),
        next(b.device.index or 0 for b in p.buffers.values() if b.device.type == "cuda"),
    )


def recorded(call: Call, known: Facts, given: Given, cfg: Config, trace: Trace) -> Call:
    """`call`, replayed from CUDA graphs where that is possible; the reason is recorded where it is not."""
    reason = known.refusal
    verdict = "recorded at the second call" if not reason else "not used"
    trace.decision("cudagraphs", trace.graph_name, verdict, reason or "all of its work is on one device")
    if reason:
        return call
    signature = Signature(
        trace.graph_name,
        frozenset(given.static),
        given.static_from,
        frozenset(known.written),
        given.user_outputs,
        known.sized,
        cfg.cudagraph_limit,
        given.follows,
    )
    replayed = on_device(Recorded(call, signature, of_device(known.device)), known.device)
    replayed._boxed_call = True  # type: ignore[attr-defined]
    return replayed


def why_not(p: Program) -> str:
    """Why a program cannot be replayed, or ''."""
    if len(devices := {b.device for b in p.buffers.values() if b.device.type == "cuda"}) > 1:
        return f"it works on {len(devices)} devices"
    for b in p.inputs:
        if b in p.buffers and p.buffers[b].device.type != "cuda":
            return f"input {b} is on the {p.buffers[b].device.type}: its value would be recorded"
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
