"""Floating-point operations of library calls, by the formulas of torch's flop counter."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import Argument
from torch.utils.flop_counter import flop_registry

UNBACKED = 4096  # the size that stands for one that only data decides


def of_call(n: Node) -> int:
    """Return the operations of a call; 0 for one that moves data only, or that no formula fits."""
    formula = flop_registry.get(getattr(n.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), lambda a: _sized(a.meta.get("val")))
    try:
        return int(formula(*args, **kwargs, out_val=_sized(n.meta.get("val"))))
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return 0  # an estimate must not stop a compilation


def size_hint(x: int | torch.SymInt) -> int:
    """Return a size as a number: the hint of a symbolic size, 4096 for an unbacked one."""
    if isinstance(x, int):
        return x
    example = getattr(x.node, "hint", None)
    return int(example) if isinstance(example, int) else UNBACKED


def _sized(val: Argument) -> Argument:
    """Return a traced value with numbers as sizes, so that a formula sets no conditions on symbols."""
    if isinstance(val, torch.Tensor):
        shape = [*map(size_hint, val.shape)]
        return torch.empty(shape, dtype=val.dtype, device="meta")
    if isinstance(val, (tuple, list)):
        return type(val)(map(_sized, val))
    return size_hint(val) if isinstance(val, torch.SymInt) else val
