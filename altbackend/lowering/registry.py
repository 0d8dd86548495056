"""The registry of lowerings: operator overload -> function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..aten.name import operator_of

Lowering = Callable[..., Any]
LOWERINGS: dict[object, Lowering] = {}
LATER: dict[str, Lowering] = {}  # by name: operators that a module of torch defines when it is imported
L = TypeVar("L", bound=Lowering)

SUPPORTED_DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


class FallBack(Exception):
    """Raised by a lowering that leaves an operator to ATen, as a library call; the text is the reason."""


def lowers(*names: str) -> Callable[[L], L]:
    """Register a lowering for overloads: "add.Tensor" of `aten`, or with a namespace as "prims::iota.default"."""

    def register(fn: L) -> L:
        for name in names:
            op = operator_of(name)
            if op is not None:
                LOWERINGS[op] = fn
            else:
                LATER[name] = fn
        return fn

    return register


def lowering_of(target: object) -> Lowering | None:
    """Return the lowering of a call's target, or None."""
    lowering = LOWERINGS.get(target)
    if lowering is None and isinstance(target, torch._ops.OpOverload):
        lowering = LATER.get(f"{target.namespace}::{target._opname}.{target._overloadname}")
    return lowering
