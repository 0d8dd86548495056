"""Rows that masks hide in full by finite numbers, in training: the gradients of the fused kernels are wrong there.

The kernels save the logarithm of the sum of exponentials of each row in float32. For a row of n times -3e38 this is
-3e38, since log(n) is lost. The gradient then computes probabilities of 1 in place of 1/n.

A row without scores and without a mask has the same result, the mean of the values, and the right gradient of the
values. Filled scores have no gradient, and such a row gives none. Scores to which a mask is added have one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from .. import attention_mask
from .form import Step
from .operators import aten, is_tensor, read, value_of

LOW = -1e5  # below it, float32 adds log(n) with an error that exceeds that of the scores' own rounding
MOST_CALLS = 60  # that are searched for a low number
_VIEWS = ("view", "expand", "copy", "cast", "transpose")
_SUMS = ("add", "sub")


class Hiding(enum.Enum):
    """The effect of masks on a row: hide no row, hide one so that its scores have no gradient, or with a gradient.

    `PART`: a mask that is a constant hides columns, but no row alone.
    """

    NONE = "none"
    PART = "part"
    WITHOUT_GRADIENT = "without gradient"
    WITH_GRADIENT = "with gradient"


def hiding_of(steps: Sequence[Step], total: object, values: dict[Node, object]) -> Hiding:
    """Return what the masks of an attention may do to a row.

    `total`: the sum of all masks if it is known, `values`: known values by node. Learned numbers hide nothing. A tensor
    for which the program writes no low number counts as `WITHOUT_GRADIENT`. A row that only holds -inf is no hidden
    row: its results are NaN.
    """
    if isinstance(total, torch.Tensor):
        most = total.amax(-1)
        hidden = bool(((most <= LOW) & (most > -math.inf)).any())
        return Hiding.WITH_GRADIENT if hidden else Hiding.NONE
    floored = any(step.kind == "floor" for step in steps)
    effects: list[Hiding] = []
    for step in steps:
        if step.kind == "fill" and (step.number != -math.inf or floored):
            effects.append(Hiding.WITHOUT_GRADIENT)
        elif step.kind in ("add", "subtract") and step.mask is not None:
            effects += [_of_sum(leaf, values) for leaf in _leaves(step.mask)]
    parts = effects.count(Hiding.PART)
    together = parts > 1 or (parts and Hiding.WITHOUT_GRADIENT in effects)
    if together or Hiding.WITH_GRADIENT in effects:
        return Hiding.WITH_GRADIENT
    return Hiding.WITHOUT_GRADIENT if Hiding.WITHOUT_GRADIENT in effects else Hiding.NONE


def _leaves(n: Node) -> Iterator[Node]:
    """Yield the tensors whose sum a mask is, seen through views."""
    call = read(n)
    if call.name in _SUMS and all(is_tensor(call.get(x)) for x in ("input", "other")):
        yield from _leaves(call.get("input"))
        yield from _leaves(call.get("other"))
    elif (call.name in _VIEWS or n.target is aten.unsqueeze.default) and is_tensor(call.get("input")):
        yield from _leaves(call.get("input"))
    else:
        yield n


def _of_sum(leaf: Node, values: dict[Node, object]) -> Hiding:
    fake = value_of(leaf)
    if fake.requires_grad or not fake.is_floating_point():
        return Hiding.NONE
    constant = attention_mask.known_value(leaf, values)
    if isinstance(constant, torch.Tensor) and constant.dim():
        low = constant.abs() >= -LOW
        partly = Hiding.PART if bool(low.any()) else Hiding.NONE
        return Hiding.WITH_GRADIENT if bool(low.all(-1).any()) else partly
    return Hiding.WITH_GRADIENT if _has_low_number(leaf) else Hiding.WITHOUT_GRADIENT


def _has_low_number(n: Node) -> bool:
    """Return whether a low finite number is an argument of one of the calls that compute a tensor."""
    seen: set[Node] = set()
    stack = [n]
    while stack and len(seen) < MOST_CALLS:
        m = stack.pop()
        if m in seen:
            continue
        seen.add(m)
        numbers = [x for x in (*m.args, *m.kwargs.values()) if isinstance(x, (int, float))]
        if any(-math.inf < x <= LOW for x in numbers):
            return True
        stack += m.all_input_nodes
    return False
