"""The weights of an attention: from its last product back to the softmax."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from altbackend.lazy_dataclass import dataclass

from ..simplify import same_sizes
from .einsum import explicit, output_order
from .operators import Operand, Operation, is_tensor, read, shape_of, value_of
from .sinks import dropped_column


@dataclass(frozen=True)
class Weights:
    """The softmax of an attention, what stands between it and the last product, and the value.

    `order`: how the result's dimensions are permuted. `dropped`: the place of the column of weights that is dropped, if
    there is one. `zeroed`: a mask where weights are set to 0, and whether it is true at those that stay.
    """

    softmax: Node
    value: Operand
    order: tuple[int, ...] | None
    dropout: float = 0.0
    calls: tuple[Node, ...] = ()
    dropped: int | None = None
    zeroed: tuple[Node, bool] | None = None


def weighted(n: Node) -> Weights | None:
    """Return the weights of a product with values, or None if no operand comes from a softmax."""
    call = read(n)
    if call.name == "einsum" and len(call.args["operands"]) == 2 and all(map(is_tensor, call.args["operands"])):
        orders = output_order(explicit(call.args["equation"], *(value_of(x).dim() for x in call.args["operands"])))
        weights, value = call.args["operands"]
        return None if orders is None else _softmax_of(weights, Operand(value, orders[0]), orders[1])
    if call.name != "matmul" or not is_tensor(call.get("input")) or not is_tensor(call.get("other")):
        return None
    left, right = call.args["input"], call.args["other"]
    return _softmax_of(left, Operand(right), None) or _turned(n, left, right)


def _turned(n: Node, value: Node, weights: Node) -> Weights | None:
    """Return the weights of v w^T, which is (w v^T)^T."""
    source = _exchanged(weights)
    dims = value_of(value).dim()
    if source is None or dims < 2 or not is_tensor(n) or not same_sizes(shape_of(value)[:-2], shape_of(n)[:-2]):
        return None
    order = (*range(dims - 2), dims - 1, dims - 2)
    inner = _softmax_of(source, Operand(value, order), order)
    return None if inner is None else replace(inner, calls=(*inner.calls, weights))


def _exchanged(n: Node) -> Node | None:
    """Return the tensor whose last two dimensions a view exchanges, or None."""
    call = read(n)
    source = call.get("input")
    if call.name not in ("transpose", "permute") or not is_tensor(source) or value_of(source).dim() < 2:
        return None
    turned, same = value_of(source).transpose(-2, -1), value_of(n)
    equal = same_sizes(turned.shape, same.shape) and same_sizes(turned.stride(), same.stride())
    return source if equal else None


def _softmax_of(n: object, value: Operand, order: tuple[int, ...] | None) -> Weights | None:
    """Return how attention weights come from a softmax, or None."""
    dropout, dropped, calls = 0.0, None, list[Node]()
    zeroed: tuple[Node, bool] | None = None
    while is_tensor(n):
        call = read(n)
        source = call.get("input")
        if call.name == "softmax":
            return Weights(n, value, order, dropout, tuple(reversed(calls)), dropped, zeroed)
        if call.name == "dropout":
            p = call.get("p", 0.5) if call.get("training", True) else 0.0
            if not isinstance(p, (int, float)) or (p and dropout) or call.get("inplace"):
                return None
            dropout = float(p) or dropout
        elif (column := dropped_column(n)) is not None and dropped is None:
            dropped = column[1]
        elif (zeros := _zeroed(call, n)) is not None and zeroed is None:
            source, zeroed = zeros[0], zeros[1:]
        elif not keeps_rows(call, n):
            return None
        calls.append(n)
        n = source
    return None


def _zeroed(call: Operation, n: Node) -> tuple[Node, Node, bool] | None:
    """Return (weights, mask, whether it is true at those that stay) of a call that sets weights to 0, or None."""
    match call.name:
        case "masked_fill":
            source, mask, zero, keep = call.get("input"), call.get("mask"), call.get("value"), False
        case "where":
            mask, source, zero, keep = call.get("condition"), call.get("input"), call.get("other"), True
        case _:
            return None
    if type(zero) not in (int, float) or zero != 0 or not is_tensor(source) or not is_tensor(mask):
        return None
    return (source, mask, keep) if same_sizes(shape_of(source), shape_of(n)) else None


def keeps_rows(call: Operation, n: Node) -> bool:
    """Return whether a call changes only dtype, strides or leading sizes."""
    source = call.get("input")
    if not is_tensor(source) or call.name not in ("cast", "copy", "view", "expand"):
        return False
    before, after = value_of(source), value_of(n)
    if before.device != after.device or not after.is_floating_point() or min(before.dim(), after.dim()) < 2:
        return False
    if call.name == "view":  # elements keep their order, so rows stay rows if their sizes stay
        return same_sizes(after.shape[-2:], before.shape[-2:])
    return same_sizes(after.shape, before.shape)
