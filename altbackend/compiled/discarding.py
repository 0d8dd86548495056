"""Option `freezing_discard_parameters`: which inputs of a captured graph give up their memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from ..compat import torch_api
from ..debug.trace import DecisionKind, Trace
from ..runtime.boxed import Function
from ..runtime.discarded import Originals, discard


def with_originals(
    call: Function, gm: GraphModule, inputs: Sequence[object], meta: torch_api.ViewAndMutationMeta | None, trace: Trace
) -> Function:
    """Discard the parameters among the inputs of a captured graph; return the callable that holds their memory.

    `meta` is AOTAutograd's metadata of the graph. Must run while Dynamo compiles: its guards are then made for the
    discarded tensors, so the next call does not compile again.
    """
    reason = _refusal(gm, inputs, meta)
    originals = {} if reason or meta is None else _discarded(gm, inputs, meta)
    outcome = ("kept", reason) if reason else ("discarded", f"{len(originals)} tensors")
    trace.decision(DecisionKind.FREEZING, "parameters", *outcome)
    trace.write()
    return Originals(call, originals).run if originals else call


def _discarded(
    gm: GraphModule, inputs: Sequence[object], meta: torch_api.ViewAndMutationMeta
) -> dict[int, torch.Tensor]:
    """Discard parameters and buffers; return the tensors of their memory by the numbers of their inputs."""
    originals: dict[int, torch.Tensor] = {}
    for k, n in enumerate(gm.graph.find_nodes(op="placeholder")):
        t = inputs[k]
        if _discardable(n, t, k, meta) and isinstance(t, torch.Tensor):
            original = discard(t, readable_name(n))
            if original is not None:
                originals[k] = original
    return originals


def _refusal(gm: GraphModule, inputs: Sequence[object], meta: torch_api.ViewAndMutationMeta | None) -> str:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "a graph of training reads them in its backward"
    if torch_api.lifted(gm):
        return "Dynamo made them attributes of the graph, which AOTAutograd holds (prepare_freezing)"
    if meta is None or len(meta.input_info) != len(inputs):
        return "AOTAutograd merged inputs of the graph"
    return ""


def _discardable(n: Node, t: object, k: int, meta: torch_api.ViewAndMutationMeta) -> bool:
    """Return whether input `k` is a parameter, or a buffer of a module, that the graph neither writes nor returns."""
    if type(t) not in (torch.nn.Parameter, torch.Tensor) or not isinstance(t, torch.Tensor) or torch_api.is_fake(t):
        return False
    if not isinstance(t, torch.nn.Parameter) and "_buffers_" not in str(n.target):
        return False
    info = meta.input_info[k]
    returned = any(out.base_idx == k for out in meta.output_info)
    return t.layout == torch.strided and not info.mutates_data and not info.mutates_metadata and not returned


def readable_name(n: Node) -> str:
    """Return the qualified name of a parameter from the name of its input: `L_self_modules_fc_parameters_weight_`."""
    dotted = re.sub(r"_(?:modules|parameters|buffers)_", ".", str(n.target).rstrip("_"))
    return re.sub(r"_?\.+_?", ".", dotted.partition(".")[2] or dotted)
