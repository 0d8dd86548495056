"""`numerics="eager"`: decide which pointwise operators a generated kernel computes with exactly eager's bits.

Three conditions decide whether a kernel is generated for an operator. Every scalar operator in it is `decided`
(`ir.ops`). Eager's compiler could not contract two of its steps. All of eager's loops round it alike in 16 bits. Every
other operator is a library call of eager's own kernel. Its tensors have the shapes and strides of eager's, because
eager's vector loop and the scalar loop for the last elements may differ.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..aten.name import operator_name
from ..aten.pointwise import ROUNDED_ONCE
from ..compat import torch_api
from ..ir import value as va
from ..ir.ops import LOW_PRECISION, OPS, WIDE
from ..ir.value import Value
from .context import Ctx
from .registry import FallBack
from .scalar import round_to
from .tensor import Operand, Tensor

_STEPS = frozenset({"add", "sub", "mul", "truediv", "reciprocal"})  # each rounds its result
# Operand positions at which eager's 16-bit CPU kernels take a Python number or a 0-d tensor as float32. At all other
# positions the number is first rounded to the dtype of the other operands.
_NUMBERS_AS_FLOAT32 = {"mul": (0, 1), "div": (1,)}


def is_eager(ctx: Ctx) -> bool:
    """Return whether results must have eager's bits."""
    return ctx.cfg.numerics == "eager"


def check(ctx: Ctx, value: Value, leaves: Collection[Value | None], dtype: torch.dtype) -> None:
    """Raise FallBack unless a kernel that computes `value` has eager's bits.

    `value`: the scalar of one operator. `leaves`: the scalars of its operands. `dtype`: the dtype of its result.
    """
    low, steps = dtype in LOW_PRECISION, 0
    for v in _operator_values(value, leaves):
        if v.op not in OPS or not v.args[-1].dtype.is_floating_point:
            continue
        decided = OPS[v.op].decided
        if not decided:
            raise FallBack(f"{v.op} of floats: only eager's own function gives its last bit")
        if low and decided == WIDE:
            raise FallBack(f"{v.op} in 16 bits: eager's vector loop and its scalar loop round it differently")
        if v.op in ("add", "sub") and any(_is_product(a, leaves) for a in v.args):
            raise FallBack("a product in a sum: eager's compiler may contract the two steps")
        steps += v.op in _STEPS
    if low and steps > 1 and _operator(ctx) not in ROUNDED_ONCE:
        raise FallBack("several steps in 16 bits: eager's vector loop and its scalar loop round them differently")


def _operator_values(value: Value, leaves: Collection[Value | None]) -> list[Value]:
    """Return the values of a tree down to its operands, which are left out."""
    values: dict[Value, None] = {}
    stack = [value]
    while stack:
        v = stack.pop()
        if v not in values and v not in leaves:
            values[v] = None
            stack.extend(v.args)
    return list(values)


def _is_product(v: Value, leaves: Collection[Value | None]) -> bool:
    while v.op == "neg" and v not in leaves:
        v = v.args[0]
    return v.op == "mul" and v not in leaves


def _operator(ctx: Ctx) -> str:
    return operator_name(ctx.node.target)


def operand(ctx: Ctx, arg: Operand, position: int, value: Value, common: torch.dtype) -> Value:
    """Return `value`, the scalar of operand `arg` at `position`, rounded as eager rounds it to the 16-bit `common`."""
    tensor = arg if isinstance(arg, Tensor) else None
    if tensor is not None and tensor.dtype == common:
        return value
    if tensor is not None and (tensor.sizes or ctx.gpu):
        return round_to(value, common)
    # eager's kernels on a GPU take Python numbers as float32
    if ctx.gpu or position in _NUMBERS_AS_FLOAT32.get(_operator(ctx), ()):
        return value
    return va.const(_rounded(value.attr, common), value.dtype) if value.op == "const" else round_to(value, common)


def _rounded(number: float, dtype: torch.dtype) -> float:
    with torch_api.real_tensors():
        return float(torch.tensor(number, dtype=dtype).item())
