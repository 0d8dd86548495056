"""Operators whose result differs between equal calls: random ones, and those that leave memory uninitialised."""

from __future__ import annotations

import torch

from .name import operator_name


def is_random(target: object) -> bool:
    """Return whether an operator draws from torch's random number generator."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_uninitialised(target: object) -> bool:
    """Return whether an operator returns memory with arbitrary content, as `empty` and `new_empty` do."""
    return "empty" in operator_name(target)
