"""`numerics="eager"`: which results of pointwise operators have one possible value, whatever code computes them.

An operator stays generated if every scalar operator in it is `decided` (`ir.ops`), eager's compiler could contract
nothing in it, and eager's loops round it alike in 16 bits. Anything else is left to eager's own kernel, a library call
on tensors with the shapes and strides that eager would see: its vectors and the scalars of a loop's end may differ.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..compat import torch_api
from ..ir import value as va
from ..ir.ops import LOW_PRECISION, OPS, WIDE
from ..ir.value import Value
from .context import Ctx
from .registry import FallBack
from .scalar import round_to
from .tensor import Tensor

aten = torch.ops.aten

_STEPS = frozenset({"add", "sub", "mul", "truediv", "reciprocal"})  # each rounds
# Of several steps that eager's 16-bit kernels compute in float32, vectors and scalars alike, and round once.
_ROUNDED_ONCE = frozenset({aten.addcdiv, aten.hardsigmoid, aten.hardswish, aten.native_dropout_backward})
# Positions at which a single number, Python's or that of a tensor without dimensions, enters a CPU's 16-bit kernel as
# float32; everywhere else it is first rounded to the dtype of the others.
_NUMBERS_AS_FLOAT32 = {aten.mul: (0, 1), aten.div: (1,)}


def wanted(ctx: Ctx) -> bool:
    return ctx.cfg.numerics == "eager"


def check(ctx: Ctx, value: Value, leaves: Collection[Value | None], dtype: torch.dtype) -> None:
    """Raise NotHere unless `value`, the scalar of one operator on `leaves` with a result of `dtype`, is decided."""
    low, steps = dtype in LOW_PRECISION, 0
    for v in _own(value, leaves):
        if v.op not in OPS or not v.args[-1].dtype.is_floating_point:
            continue
        decided = OPS[v.op].decided
        if not decided:
            raise FallBack(f"{v.op} of floats: the last bit is up to eager's own function")
        if low and decided == WIDE:
            raise FallBack(f"{v.op} in 16 bits: eager's vectors and its scalars round it differently")
        if v.op in ("add", "sub") and any(_is_product(a, leaves) for a in v.args):
            raise FallBack("a product in a sum: whether it is rounded is up to eager's compiler")
        steps += v.op in _STEPS
    if low and steps > 1 and _packet(ctx) not in _ROUNDED_ONCE:
        raise FallBack("several steps in 16 bits: eager's vectors and its scalars round them differently")


def _own(value: Value, leaves: Collection[Value | None]) -> list[Value]:
    """What an operator computes itself: the tree down to its operands."""
    found: dict[Value, None] = {}
    stack = [value]
    while stack:
        v = stack.pop()
        if v not in found and v not in leaves:
            found[v] = None
            stack.extend(v.args)
    return list(found)


def _is_product(v: Value, leaves: Collection[Value | None]) -> bool:
    while v.op == "neg" and v not in leaves:
        v = v.args[0]
    return v.op == "mul" and v not in leaves


def _packet(ctx: Ctx) -> Any:
    assert ctx.graph_node is not None
    return getattr(ctx.graph_node.target, "overloadpacket", None)


def operand(ctx: Ctx, given: Any, position: int, value: Value, common: torch.dtype) -> Value:
    """`value`, the scalar of operand number `position`, rounded as eager rounds it to `common`, a 16-bit dtype."""
    tensor = isinstance(given, Tensor)
    if tensor and given.dtype == common:
        return value
    if tensor and (given.sizes or ctx.gpu):
        return round_to(value, common)
    # a GPU's kernels take Python's numbers as float32
    if ctx.gpu or position in _NUMBERS_AS_FLOAT32.get(_packet(ctx), ()):
        return value
    return va.const(_rounded(value.attr, common), value.dtype) if value.op == "const" else round_to(value, common)


def _rounded(number: float, dtype: torch.dtype) -> float:
    with torch_api.real_tensors():
        return float(torch.tensor(number, dtype=dtype).item())
