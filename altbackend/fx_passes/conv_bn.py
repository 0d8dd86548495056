"""Fold a batch normalisation with fixed statistics into the convolution, transposed or not, or the matmul before it.

bn(conv(x, w) + b) = conv(x, w * s) + (b - mean) * s + beta,   s = gamma / sqrt(var + eps)
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ..compat import torch_api
from .constant_products import product_of
from .context import Context
from .graph import aten, drop_dead, insert, is_call, only_user, val


def run(gm: GraphModule, ctx: Context) -> int:
    """Fold batch normalisations into convolutions; without freezing, only where the weights are small."""
    return fold(gm, ctx.constant_nodes(gm), always if ctx.freezes else smaller_than_image)


def always(conv: Node) -> bool:
    """Return True: folded weights are computed once, so folding costs a call nothing."""
    return True


def smaller_than_image(conv: Node) -> bool:
    """Return whether folding the weights in every call takes less than the pass over the result that it saves."""
    image, weight = val(conv), val(conv.args[1] if is_call(conv, aten.convolution.default) else conv.args[-1])
    return not torch_api.has_symbolic_geometry(image) and weight.numel() <= image.numel()


def fold(gm: GraphModule, constant: set[Node], pays: Callable[[Node], bool] = always) -> int:
    """Fold if weights and statistics are constant and `pays` holds for the convolution; return the number of folds."""
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(
            n, aten._native_batch_norm_legit_no_training.default, aten._native_batch_norm_legit_functional.default
        ):
            count += _fold(n, constant, pays)
    if count:
        drop_dead(gm.graph)
    return count


def _fold(bn: Node, constant: set[Node], pays: Callable[[Node], bool]) -> int:
    conv = bn.args[0]
    functional = bn.target is aten._native_batch_norm_legit_functional.default
    if functional and bn.args[5]:
        return 0
    product = product_of(conv, constant) if isinstance(conv, Node) else None
    if product is None or only_user(product.call) is not bn or not pays(product.call):
        return 0
    conv, w, b = product.call, product.weight, product.bias
    _, gamma, beta, mean, var = bn.args[:5]
    eps = bn.args[7 if functional else 6]
    if any(isinstance(p, Node) and p not in constant for p in (gamma, beta, mean, var)):
        return 0
    result = next((u for u in bn.users if u.target is operator.getitem and u.args[1] == 0), None)
    if result is None or any(u.args[1] != 0 and u.users for u in bn.users):
        return 0
    new: list[Node] = []

    def call(target: Callable[..., object], *args: Argument) -> Node:
        new.append(insert(bn.graph, conv, target, args))
        return new[-1]

    low = val(w).dtype not in (torch.float32, torch.float64)

    def wide(p: Argument) -> Node:
        new.append(insert(bn.graph, conv, aten._to_copy.default, (p,), {"dtype": torch.float32}))
        return new[-1]

    if low:  # compute in float32 and round once
        b, gamma, beta, mean, var = (None if p is None else wide(p) for p in (b, gamma, beta, mean, var))
    scale = call(aten.rsqrt.default, call(aten.add.Scalar, var, eps))
    if gamma is not None:
        scale = call(aten.mul.Tensor, scale, gamma)
    weight = call(aten.mul.Tensor, wide(w) if low else w, call(aten.view.default, scale, product.along))
    centre = call(aten.neg.default, mean) if b is None else call(aten.sub.Tensor, b, mean)
    shift = call(aten.mul.Tensor, centre, scale)
    if beta is not None:
        shift = call(aten.add.Tensor, shift, beta)
    if low:
        weight, shift = (_narrow(bn, conv, new, p, val(w).dtype) for p in (weight, shift))
    constant.update(new)
    if is_call(conv, aten.convolution.default):
        conv.args = (conv.args[0], weight, shift, *conv.args[3:])
        result.replace_all_uses_with(conv)
    else:
        result.replace_all_uses_with(insert(bn.graph, conv, aten.addmm.default, (shift, conv.args[-2], weight)))
    return 1


def _narrow(bn: Node, before: Node, new: list[Node], p: Node, dtype: torch.dtype) -> Node:
    new.append(insert(bn.graph, before, aten._to_copy.default, (p,), {"dtype": dtype}))
    return new[-1]
