"""Collectives: calls that start communication between processes, and the call that waits for its end."""

from __future__ import annotations

import torch

from .name import operator_name

NAMESPACES = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def is_collective(target: object) -> bool:
    """Return whether a call starts communication, or waits for it; all processes make such calls in one order."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES


def is_start(target: object) -> bool:
    """Return whether a call starts communication. It reads its operands until a wait for its result has returned."""
    return is_collective(target) and not is_wait(target)


def is_wait(target: object) -> bool:
    """Return whether a call waits for the communication that fills its argument, and returns the argument."""
    return is_collective(target) and operator_name(target) == "wait_tensor"
