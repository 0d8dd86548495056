"""The half of a joint graph that a node belongs to, where the cut may not decide it."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch.fx import Graph, GraphModule, Node

from ..aten.mutates import is_mutable
from ..aten.name import operator_name
from ..aten.random import is_random

Half = Literal["forward", "backward", ""]
_TAG = "partitioner_tag"  # AOTAutograd's mark of the half that traced a node
_STATES = ("bwd_seed", "bwd_base_offset", "bwd_rng_state")


def half_of(n: Node) -> Half:
    """Return the half that alone may run a node, or "".

    An operator that writes to an argument runs once, in the half that traced it.
    """
    tag = n.meta.get(_TAG)
    if tag in ("must_be_in_forward", "must_be_in_backward"):
        return "forward" if tag == "must_be_in_forward" else "backward"
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload) or not is_mutable(n.target):
        return ""
    return "backward" if tag == "is_backward" else "forward"


def bind_effects(graph: Graph) -> None:
    """Bind calls with effects that the backward traced to the backward, so that the forward does not run them too."""
    for n in graph.nodes:
        if n.op == "call_function" and n.meta.get(_TAG) == "is_backward" and not is_random(n.target) and n.is_impure():
            n.meta[_TAG] = "must_be_in_backward"


def is_tangent(n: Node) -> bool:
    """Return whether a node is an input that is the gradient of a result."""
    return n.op == "placeholder" and "tangents" in str(n.target)


def is_given_to_backward(n: Node) -> bool:
    """Return whether a node is an input that only the backward has: a gradient, or its random generator's state."""
    return n.op == "placeholder" and ("tangents" in str(n.target) or any(s in str(n.target) for s in _STATES))


def is_argument(n: Node) -> bool:
    """Return whether a node is an input of the traced function: no gradient, and no state of a random generator."""
    states = (*_STATES, *(s.replace("bwd", "fwd") for s in _STATES))
    return n.op == "placeholder" and not is_tangent(n) and not any(s in str(n.target) for s in states)


def results_of(joint: GraphModule) -> list[object]:
    """Return the results of a joint graph: those of the forward, then the gradients."""
    leaves: list[object] = []
    pending: list[object] = [joint.graph.output_node().args]
    while pending:
        x = pending.pop()
        if isinstance(x, (tuple, list)):
            pending.extend(reversed(x))
        else:
            leaves.append(x)
    return leaves


def producer(n: Node) -> Node:
    """Return the call that computes a value; for an element of a tuple, the call that returns the tuple."""
    while n.target is operator.getitem and isinstance(n.args[0], Node):
        n = n.args[0]
    return n


def reads_number(n: Node) -> bool:
    """Return whether a call reads a number from a tensor's memory."""
    return n.op == "call_function" and operator_name(n.target) == "_local_scalar_dense"


def is_collective(n: Node) -> bool:
    """Return whether a call exchanges data with other processes."""
    return isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "_c10d_functional"
