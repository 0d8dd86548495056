"""Random operators that a checkpointed region recomputes with eager's generator: the backward restores its state.

Before the cut, a call `op(x)` becomes `replayed(state, op, x)`, where the saved value `state` is read just before.
After the split, the forward's call draws and returns the state it had before; the backward's draws from that state and
leaves the generator as it was. Random operators that are functions of seeds need none of this: the seeds are saved.
"""

from __future__ import annotations

import operator

import torch
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx import Graph, GraphModule, Node

from ..aten.random import is_random
from ..fx_passes.graph import fake_mode
from .policy import RECOMPUTE, tagged

_STATE_BYTES_OF_A_GPU = 16


def generator_state(device: torch.device) -> object:
    """Stand for the state of a device's generator, until the graph is split."""
    raise AssertionError("a graph with this call must be split before it runs")


def replayed(state: object, op: object, *args: object, **kwargs: object) -> object:
    """Stand for a random call whose numbers the backward draws again, until the graph is split."""
    raise AssertionError("a graph with this call must be split before it runs")


def capture_states(graph: Graph) -> None:
    """Let each random call that a policy recomputes depend on the state of its generator."""
    for n in list(graph.nodes):
        if is_random(n.target) and tagged(n) is RECOMPUTE:
            with graph.inserting_before(n):
                state = graph.call_function(generator_state, (_device(n),))
                call = graph.call_function(replayed, (state, n.target, *n.args), dict(n.kwargs))
            state.meta["val"] = _fake_state(graph, _device(n))
            call.meta.update(n.meta)
            n.replace_all_uses_with(call)
            graph.erase_node(n)


def draw_and_save(forward: GraphModule) -> None:
    """Turn the stand-ins of a forward graph into draws, which return the state before them if it is saved."""
    graph = forward.graph
    for call in graph.find_nodes(op="call_function", target=replayed):
        state, op, *args = call.args
        saved = any(u is not call for u in state.users)
        with graph.inserting_before(call):
            drawn = graph.call_function(run_and_save_rng_state if saved else op, (op, *args) if saved else tuple(args))
            drawn.kwargs = call.kwargs
            if saved:
                drawn.meta["val"] = (state.meta["val"], call.meta["val"])
                before, result = (graph.call_function(operator.getitem, (drawn, k)) for k in (0, 1))
                before.meta.update(state.meta)
                state.replace_all_uses_with(before, lambda u, own=call: u is not own)
                drawn = result
        drawn.meta.update(call.meta)
        call.replace_all_uses_with(drawn)
        graph.erase_node(call)
        graph.erase_node(state)


def draw_again(half: GraphModule) -> None:
    """Turn the stand-ins of a backward graph into draws from the saved states."""
    for call in half.graph.find_nodes(op="call_function", target=replayed):
        call.target = run_with_rng_state


def remove(graph: Graph) -> None:
    """Turn the stand-ins of a joint graph that could not be split into the random calls that they stand for."""
    for call in graph.find_nodes(op="call_function", target=replayed):
        state, op, *args = call.args
        call.target, call.args = op, tuple(args)
        graph.erase_node(state)


def _device(n: Node) -> torch.device:
    val = n.meta["val"]
    first = next(x for x in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(x, torch.Tensor))
    return first.device


def _fake_state(graph: Graph, device: torch.device) -> torch.Tensor:
    on_gpu = device.type == "cuda"
    mode = fake_mode(graph)
    assert mode is not None
    size = _STATE_BYTES_OF_A_GPU if on_gpu else torch.default_generator.get_state().numel()
    with mode:
        return torch.empty(size, dtype=torch.uint8)


__all__ = ["capture_states", "draw_again", "draw_and_save", "remove"]
