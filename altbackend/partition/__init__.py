"""Split the joint graph of a training step into forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import GraphModule, Node

from ..compat import aot_autograd
from ..debug.trace import DecisionKind
from ..fx_passes import cse
from . import budget, cost, replay
from .choose import Chooser
from .liveness import classify, copy_written_inputs
from .placement import bind_effects, is_argument, results_of
from .reorder import demand_order
from .rules import DEFAULT, Rules, rules_of

Decision = Callable[[DecisionKind, str, str, str], None]
Split = tuple[GraphModule, GraphModule]


def split(
    joint: GraphModule,
    num_fwd_outputs: int,
    decision: Decision = lambda *a: None,
    replaced: Sequence[int] = (),
    rules: Rules = DEFAULT,
) -> Split:
    """Return (forward, backward) of a functional joint graph; the forward also returns the values that it saves.

    `replaced`: positions of inputs that are written after the forward. The joint graph has no dead code; common
    subexpressions are eliminated in place. Raises Unbounded if the backward needs a value that can be neither saved nor
    recomputed.
    """
    if aot_autograd.merges_equal_calls():
        cse.eliminate(joint.graph)
    bind_effects(joint.graph)
    replay.capture_states(joint.graph)
    try:
        inputs = [n for n in joint.graph.nodes if is_argument(n)]
        after = [inputs[k] for k in replaced]
        copy_written_inputs(joint, after)
        liveness = classify(joint, num_fwd_outputs, after)
        gradients = frozenset(n for n in results_of(joint)[num_fwd_outputs:] if isinstance(n, Node))
        choice = budget.choose(Chooser(liveness, rules), gradients, decision)
        for n, (size, reason) in choice.saved.items():
            decision(DecisionKind.PARTITION, n.name, "saved", f"{size} bytes: {reason}")
        forward, backward = aot_autograd.extract_halves(joint, choice.saved, num_fwd_outputs)
    except Exception:
        replay.remove(joint.graph)
        raise
    replay.draw_and_save(forward)
    replay.draw_again(backward)
    demand_order(backward)
    return forward, backward


__all__ = ["Rules", "rules_of", "split"]


def saved_bytes(forward: GraphModule, num_fwd_outputs: int) -> int:
    """Return the bytes that a forward saves for its backward beyond its inputs and results, each storage once."""
    liveness = classify(forward, num_fwd_outputs)
    returned = forward.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list)), "a forward returns several values"
    results: list[object] = list(returned)
    alive = {liveness.storage[n] for n in results[:num_fwd_outputs] if isinstance(n, Node)}
    saved = {liveness.storage[n] for n in results[num_fwd_outputs:] if isinstance(n, Node)} - alive
    return sum(cost.nbytes(n) for n in saved if n.op != "placeholder")
