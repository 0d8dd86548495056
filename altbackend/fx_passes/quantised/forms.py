"""The parts of a dequantised tensor: integers, a scale and a zero point.

Operators are recognised by name, since a library defines them when a program imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

from ..graph import aten, is_call, val

Parameter = Node | float  # a number, or a tensor

QUANTISE, DEQUANTISE, CHOOSE = "quantize_", "dequantize_", "choose_qparams"
_LIBRARIES = ("quantized_decomposed", "torchao")
BYTES = (torch.uint8, torch.int8)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Dequantised:
    """(integers - zero) * scale. `axis`: the dimension along which both vary, or None where they are single numbers.

    `per_row`: scale and zero are tensors (..., 1) with a number for each row of the last dimension. A matrix may have
    both: its rows lie along dimension 0.
    """

    integers: Node
    scale: Parameter
    zero: Parameter | None
    axis: int | None = None
    per_row: bool = False

    @property
    def has_no_zero(self) -> bool:
        """Return whether the zero point is known to be 0."""
        return self.zero is None or (not isinstance(self.zero, Node) and self.zero == 0)


def operator_of_library(n: object) -> str:
    """Return "quantize_per_tensor.tensor" of a call of `quantized_decomposed` or torchao, "" for other nodes."""
    target = n.target if isinstance(n, Node) and n.op == "call_function" else None
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in _LIBRARIES:
        return ""
    return f"{target._opname}.{target._overloadname}"


def is_quantise(n: object) -> bool:
    """Return whether a node converts to or from integers, or chooses a scale for that."""
    return operator_of_library(n).startswith((QUANTISE, DEQUANTISE, CHOOSE))


def dequantised(n: object) -> Dequantised | None:
    """Return the parts of a dequantised tensor of bytes, by a call or by arithmetic, or None."""
    name = operator_of_library(n)
    if not isinstance(n, Node) or not name.startswith(DEQUANTISE):
        return _by_arithmetic(n) if isinstance(n, Node) else None
    q = n.args[0]
    if not isinstance(q, Node) or val(q).dtype not in BYTES:
        return None
    kind, arguments = name.split(".")[0], n.args
    match kind:
        case "dequantize_per_tensor":
            scale, zero = (_parameter(a) for a in arguments[1:3])
            return None if scale is None or zero is None else Dequantised(q, scale, zero)
        case "dequantize_per_channel":
            scale, zero, axis = _parameter(arguments[1]), _parameter(arguments[2]), arguments[3]
            if scale is None or not isinstance(axis, int):
                return None
            return Dequantised(q, scale, zero, axis)
        case "dequantize_per_token":
            scale, zero = (_parameter(a) for a in arguments[1:3])
            rows = all(_are_rows(val(q), val(p)) for p in (scale, zero) if isinstance(p, Node))
            return Dequantised(q, scale, zero, per_row=True) if rows and isinstance(scale, Node) else None
    return None


def _by_arithmetic(n: Node) -> Dequantised | None:
    """Return the parts of `(cast(q) - zero) * scale` and `cast(q) * scale` of a matrix q, or None."""
    n = _without_casts(n)
    if not is_call(n, aten.mul.Tensor) or n.kwargs or val(n).dim() != 2:
        return None
    arguments: tuple[Any, ...] = n.args
    for k in (0, 1):
        moved: Any = arguments[k]
        scale = _parameter(arguments[1 - k])
        zero: Parameter | None = None
        if is_call(moved, aten.sub.Tensor) and not moved.kwargs:
            moved, zero = moved.args[0], _parameter(_without_casts(moved.args[1]))
            if zero is None:
                continue
        q = _without_casts(moved)
        if scale is not None and isinstance(moved, Node) and q is not moved and val(q).dtype in BYTES:
            return _with_parameters(q, scale, zero)
    return None


def _with_parameters(q: Node, scale: Parameter, zero: Parameter | None) -> Dequantised | None:
    """Return the parts of a matrix with a scale and a zero point for all of it, or for each row."""
    shapes = {tuple(val(p).shape) for p in (scale, zero) if isinstance(p, Node)}
    if isinstance(scale, Node) and not val(scale).dtype.is_floating_point:
        return None
    if all(val(q).shape[0] != 1 and shape == (val(q).shape[0], 1) for shape in shapes) and isinstance(scale, Node):
        return Dequantised(q, scale, zero, axis=0, per_row=True)
    return Dequantised(q, scale, zero) if all(n == 1 for shape in shapes for n in shape) else None


def _without_casts(a: Any) -> Any:
    """Return what a chain of casts to floats, and of reshapes to the same sizes, converts."""
    while is_call(a, aten._to_copy.default, *VIEWS):
        source = a.args[0]
        to_float = is_call(a, aten._to_copy.default) and val(a).dtype.is_floating_point
        if not to_float and tuple(val(source).shape) != tuple(val(a).shape):
            break
        if is_call(a, aten._to_copy.default) and not to_float:
            break
        a = source
    return a


def _parameter(a: object) -> Parameter | None:
    if is_call(a, aten.zeros_like.default, aten.zeros.default):
        return 0
    if is_call(a, aten.full.default, aten.full_like.default) and isinstance(a, Node) and a.args[1] == 0:
        return 0
    return a if isinstance(a, (Node, float, int)) and not isinstance(a, bool) else None


def _are_rows(q: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a parameter has one number for each row of the last dimension."""
    return parameter.dim() == q.dim() and tuple(parameter.shape) == (*q.shape[:-1], 1)


def below_views(n: object) -> tuple[Node | None, list[Node]]:
    """Return the first node below a chain of reshapes, and the chain from top to bottom."""
    chain: list[Node] = []
    while is_call(n, *VIEWS) and isinstance(n, Node):
        chain.append(n)
        n = n.args[0]
    return (n if isinstance(n, Node) else None), chain
