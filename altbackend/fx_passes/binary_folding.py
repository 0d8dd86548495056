"""Fold arithmetic with constants into the weights and the bias of the convolution or the matmul before it.

    conv(x, w, b) * c -> conv(x, w c, b c)    conv(x, w, b) + c -> conv(x, w, b + c)

and so for sub, div and c - conv(x, w, b). `c` is a number, or a constant with one value per output channel. A round may
expose the next constant, so that at most four rounds run. Weights of 16 bits are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from .constant_products import Product, product_of
from .context import Context
from .graph import aten, drop_dead, insert, is_call, only_user, replace, stable_sort, val
from .simplify import same_layout

ROUNDS = 4
_FOLDED: Mapping[object, str] = {
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
}
_REVERSED = (aten.rsub.Scalar, aten.rsub.Tensor)  # rsub(p, c) = c - p
_LOW = (torch.bfloat16, torch.float16)


def run(gm: GraphModule, ctx: Context) -> int:
    """Fold constants into convolutions and matmuls with constant weights; return the number of folded operators."""
    count = 0
    for _ in range(ROUNDS):
        folded = fold(gm, ctx.constant_nodes(gm))
        count += folded
        if not folded:
            break
    return count


def fold(gm: GraphModule, constant: set[Node]) -> int:
    """Fold the operator that directly follows each product once; return the number of folded operators."""
    count = 0
    for n in list(gm.graph.nodes):
        product = product_of(n, constant)
        if product is not None and (step := _step(product, constant)) is not None:
            _fold(gm, product, step, constant)
            count += 1
    if count:
        stable_sort(gm)  # a constant may be computed behind the product that now needs it
        drop_dead(gm.graph)
    return count


@dataclass(frozen=True)
class _Step:
    """The operator after a product. `flipped`: the product is the second operand. `alpha` multiplies the second.

    The result of the changed product at `before` equals that of `last`.
    """

    before: Node
    last: Node
    operator: str
    operand: Argument
    flipped: bool
    alpha: float


def _step(product: Product, constant: set[Node]) -> _Step | None:
    """Return the operator that reads a product alone, or None.

    It may read a view that keeps the channels last, or the product of 16 bits cast to float32 if its result is cast
    back.
    """
    before = source = product.call
    user = only_user(source)
    if product.result_axis == -1 and user is not None and is_call(user, aten.view.default):
        if val(user).shape[-1] != product.channels:
            return None
        before, source, user = user, user, only_user(user)
    cast = user is not None and is_call(user, aten._to_copy.default)
    if cast and user is not None:
        if val(before).dtype not in _LOW or val(user).dtype != torch.float32:
            return None
        source, user = user, only_user(user)
    operation = None if user is None else _operation_on(user, source)
    if user is None or operation is None or not _per_channel(operation[1], source, product, constant):
        return None
    last = only_user(user) if cast else user
    if last is None or (cast and not is_call(last, aten._to_copy.default)) or not same_layout(val(last), val(before)):
        return None
    return _Step(before, last, *operation)


def _operation_on(n: Node, source: Node) -> tuple[str, Argument, bool, float] | None:
    """Return (operator, operand, flipped, alpha) of arithmetic that reads `source` once, or None."""
    if not is_call(n, *_FOLDED, *_REVERSED) or len(n.args) != 2 or set(n.kwargs) - {"alpha"}:
        return None
    left, right = n.args[::-1] if n.target in _REVERSED else n.args
    flipped, alpha = right is source, n.kwargs.get("alpha", 1)
    operand = left if flipped else right
    name = "sub" if n.target in _REVERSED else _FOLDED[n.target]
    if operand is source or (flipped and name == "div") or not isinstance(alpha, (int, float)):
        return None
    # rsub(p, c, alpha) = c - alpha p, as sub(c, p, alpha)
    return (name, operand, flipped, alpha) if val(n).dtype == val(source).dtype else None


def _per_channel(operand: Argument, source: Node, product: Product, constant: set[Node]) -> bool:
    """Return whether an operand has the same value at all points of a channel in each call."""
    if isinstance(operand, (int, float)):
        return True
    if not isinstance(operand, Node) or operand not in constant or not isinstance(val(operand), torch.Tensor):
        return False
    shape, rank = tuple(val(operand).shape), val(source).dim()
    if len(shape) > rank or not all(isinstance(s, int) for s in shape):
        return False
    axis = product.result_axis % rank
    aligned = (1,) * (rank - len(shape)) + shape
    return all(s == 1 or (k == axis and s == product.channels) for k, s in enumerate(aligned))


def _fold(gm: GraphModule, product: Product, step: _Step, constant: set[Node]) -> None:
    call = product.call
    low = val(call).dtype in _LOW

    def new(target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        constant.add(node := insert(gm.graph, call, target, args, kwargs))
        return node

    def wide(n: Node) -> Node:
        return new(aten._to_copy.default, n, dtype=torch.float32) if val(n).dtype in _LOW else n

    def narrow(n: Node) -> Node:
        return new(aten._to_copy.default, n, dtype=val(call).dtype) if low else n

    c: Any = step.operand
    if isinstance(c, Node):
        c = new(aten.reshape.default, wide(c), [-1])  # one value, or one per channel
        if val(c).dtype != (torch.float32 if low else val(call).dtype):
            c = new(aten._to_copy.default, c, dtype=torch.float32 if low else val(call).dtype)
    weight = wide(product.weight)
    bias = None if product.bias is None else wide(product.bias)
    if step.operator in ("mul", "div"):
        operation = _operation(step.operator, c)
        weight = new(operation, weight, new(aten.view.default, c, product.along) if isinstance(c, Node) else c)
        bias = None if bias is None else new(operation, bias, c)
    else:
        # p + a c, p - a c, c + a p, c - a p
        sign = 1 if step.operator == "add" else -1
        of_product, of_constant = (sign * step.alpha, 1) if step.flipped else (1, sign * step.alpha)
        if of_product != 1:
            weight = new(aten.mul.Tensor, weight, of_product)
            bias = None if bias is None else new(aten.mul.Tensor, bias, of_product)
        bias = _shifted(new, product, bias, c, of_constant)
    _replace(gm, product, step, narrow(weight), None if bias is None else narrow(bias))


def _operation(name: str, c: Argument) -> torch._ops.OpOverload:
    return {"mul": aten.mul.Tensor, "div": aten.div.Tensor}[name]


def _shifted(new: Callable[..., Node], product: Product, bias: Node | None, c: Any, factor: float) -> Node:
    """Return the bias with `factor` times the constant added: one value per channel."""
    fake = val(product.weight)
    dtype = torch.float32 if fake.dtype in _LOW else fake.dtype
    base = bias if bias is not None else new(aten.new_zeros.default, product.weight, [product.channels], dtype=dtype)
    if not isinstance(c, Node):
        return new(aten.add.Tensor, base, c * factor)
    return new(aten.add.Tensor, base, c, alpha=factor) if factor != 1 else new(aten.add.Tensor, base, c)


def _replace(gm: GraphModule, product: Product, step: _Step, weight: Node, bias: Node | None) -> None:
    """Let the call take the new weight and bias, and let readers of the folded operator read it."""
    call = product.call
    if is_call(call, aten.convolution.default):
        call.args = (call.args[0], weight, bias, *call.args[3:])
        changed = call
    else:
        x = call.args[-2]
        target = aten.mm.default if bias is None else aten.addmm.default
        changed = insert(gm.graph, call, target, (x, weight) if bias is None else (bias, x, weight))
        replace(call, changed)
    replace(step.last, changed if step.before is call else step.before)
