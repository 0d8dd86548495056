"""Split the joint graph of a training step into forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..aten.mutates import is_mutable
from ..aten.name import operator_name
from ..aten.random import is_random
from ..compat import aot_autograd
from ..debug.trace import DecisionKind
from ..fx_passes import cse
from . import cost
from .choose import Chooser, tagged
from .liveness import classify, copy_written_inputs, is_tangent
from .reorder import demand_order

Decision = Callable[[DecisionKind, str, str, str], None]
Split = tuple[GraphModule, GraphModule]
_EFFECTS = ("copy_", "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size")


def split(
    joint: GraphModule,
    num_fwd_outputs: int,
    static: Sequence[int] | None,
    decision: Decision = lambda *a: None,
    replaced: Sequence[int] = (),
) -> Split:
    """Return (forward, backward) of a functional joint graph; the forward also returns the values that it saves.

    `static`: positions of inputs that outlive the step. `replaced`: positions of inputs that are written after the
    forward. The joint graph has no dead code; common subexpressions are eliminated in place. Raises Unbounded if the
    backward needs a value that can be neither saved nor recomputed.
    """
    if aot_autograd.merges_equal_calls():
        cse.eliminate(joint.graph)
    inputs = [n for n in joint.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
    after = [inputs[k] for k in replaced]
    copy_written_inputs(joint, after)
    liveness = classify(joint, num_fwd_outputs, after)
    outliving = frozenset(inputs[k] for k in static or () if k < len(inputs))
    choice = Chooser(liveness, outliving).choose()
    for n, (size, reason) in choice.saved.items():
        decision(DecisionKind.PARTITION, n.name, "saved", f"{size} bytes: {reason}")
    numbers = [n for n in choice.saved if isinstance(n.meta.get("val"), torch.SymInt)]
    tensors = [n for n in choice.saved if not isinstance(n.meta.get("val"), torch.SymInt)]
    forward, backward = aot_autograd.extract_halves(joint, tensors, numbers, num_fwd_outputs)
    demand_order(backward)
    return forward, backward


def left_to_torch(joint: GraphModule) -> str:
    """Return the reason why torch's own partitioner has to split a graph, or "" if `split` can."""
    for n in joint.graph.nodes:
        if n.op == "placeholder":
            if any(part in str(n.target) for part in ("seed", "offset", "rng", "bwd_base", "fwd_base")):
                return f"{n.name} is a state of the random number generator"
            if not isinstance(n.meta.get("val"), (torch.Tensor, torch.SymInt, int, float, bool, type(None))):
                return f"{n.name} is no tensor"
        elif n.op == "get_attr" and not isinstance(n.meta.get("val"), torch.Tensor) and n.users:
            return f"{n.name} is no tensor"
        elif n.op == "call_function" and (reason := _unsupported_call(n)):
            return reason
    return aot_autograd.partition_settings()


def _unsupported_call(n: Node) -> str:
    """Return the reason why `split` cannot handle a call, or ""."""
    if isinstance(n.target, torch._ops.HigherOrderOperator):
        return f"{n.name} has a subgraph or an effect"
    if not isinstance(n.target, torch._ops.OpOverload):
        return ""
    if is_random(n.target) and n.meta.get("recompute") is not None and tagged(n) is not None:
        return f"{n.name} draws random numbers in a checkpointed region"
    if n.target.namespace == "_c10d_functional":
        return f"{n.name} is a collective"
    if is_mutable(n.target) and operator_name(n.target) not in _EFFECTS:
        return f"{n.name} writes to its arguments"
    if n.meta.get("partitioner_tag") == "must_be_in_backward":
        return f"{n.name} is bound to the backward"
    return f"{n.name} has a memory budget" if "memory_budget" in n.meta else ""


__all__ = ["left_to_torch", "split"]


def saved_bytes(forward: GraphModule, num_fwd_outputs: int) -> int:
    """Return the bytes that a forward saves for its backward beyond its inputs and results, each storage once."""
    liveness = classify(forward, num_fwd_outputs)
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    alive = {liveness.storage[n] for n in results[:num_fwd_outputs] if isinstance(n, Node)}
    saved = {liveness.storage[n] for n in results[num_fwd_outputs:] if isinstance(n, Node)} - alive
    return sum(cost.nbytes(n) for n in saved if n.op != "placeholder")
