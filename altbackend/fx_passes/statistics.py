"""Decompose normalisations of a joint graph into their statistics and pointwise operators.

The statistics are small. As values of their own, the partitioner can save them and let the backward recompute the
normalised results, pointwise and fused into their readers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .context import Context
from .graph import aten, insert, is_call, val


def run(gm: GraphModule, ctx: Context) -> int:
    """Decompose the normalisations of a joint graph."""
    return expose(gm)


def expose(gm: GraphModule) -> int:
    """Rewrite log-softmaxes and batch normalisations in training; return their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten._log_softmax.default):
            count += _log_softmax(gm, n)
        elif is_call(n, aten._native_batch_norm_legit_functional.default) and n.args[5] is True:
            count += _batch_norm(gm, n)
        elif is_call(n, aten.native_batch_norm_backward.default) and n.args[7] is True:
            n.update_arg(3, None)  # a backward with batch statistics does not read the running ones
            n.update_arg(4, None)
        elif is_call(n, aten.max_pool2d_with_indices.default):
            _narrow_positions(gm, n)
    return count


def _narrow_positions(gm: GraphModule, n: Node) -> None:
    """Narrow the positions that a backward of max pooling reads to 16 or 32 bits, which suffice for an image."""
    x, result = n.args[0], next((u for u in n.users if u.target is operator.getitem and u.args[1] == 1), None)
    height, width = val(x).shape[-2:]
    if result is None or not isinstance(height, int) or not isinstance(width, int):
        return
    users = [u for u in result.users if u.op == "call_function"]
    if len(users) != len(result.users) or not users:  # the graph returns the positions
        return
    after = _After(gm, result)
    narrow = after.cast(result, torch.int16 if height * width < 2**15 else torch.int32)
    wide = after.cast(narrow, val(result).dtype)
    for u in users:
        u.replace_input_with(result, wide)


class _After:
    """Inserts calls after a node, in order; they inherit its source line."""

    def __init__(self, gm: GraphModule, after: Node) -> None:
        self.gm, self.before = gm, after.next

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return insert(self.gm.graph, self.before, target, args, kwargs)

    def cast(self, n: Node, dtype: torch.dtype) -> Node:
        return n if val(n).dtype == dtype else self.call(aten._to_copy.default, n, dtype=dtype)


def _log_softmax(gm: GraphModule, n: Node) -> bool:
    # (x - max) - log sum exp(x - max)
    x, dim, _ = n.args
    out = val(n)
    assert isinstance(x, Node)
    if not out.dtype.is_floating_point or out.numel() == 0 or out.dim() == 0:
        return False
    after = _After(gm, n)
    wide = after.cast(x, torch.float64 if out.dtype == torch.float64 else torch.float32)
    shifted = after.call(aten.sub.Tensor, wide, after.call(aten.amax.default, wide, [dim], True))
    total = after.call(aten.sum.dim_IntList, after.call(aten.exp.default, shifted), [dim], True)
    y = after.cast(after.call(aten.sub.Tensor, shifted, after.call(aten.log.default, total)), out.dtype)
    return _take_over(n, y)


def _batch_norm(gm: GraphModule, n: Node) -> bool:
    # (x - mean) / std * weight + bias
    x, weight, bias = n.args[:3]
    results = {u.args[1]: u for u in n.users if u.target is operator.getitem}
    out, mean, _ = val(n)[:3]
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    if 0 not in results or mean.dtype != wide or out.dim() < 2:
        return False
    assert isinstance(x, Node)
    for k in (1, 2):
        if k not in results:
            with gm.graph.inserting_after(n):
                results[k] = gm.graph.call_function(operator.getitem, (n, k))
            results[k].meta["val"] = val(n)[k]
    after = _After(gm, max(results.values(), key=list(gm.graph.nodes).index))
    shape = [1, -1] + [1] * (out.dim() - 2)

    def channels(v: Node) -> Node:
        return after.call(aten.view.default, after.cast(v, wide), shape)

    y = after.call(aten.sub.Tensor, after.cast(x, wide), channels(results[1]))
    y = after.call(aten.mul.Tensor, y, channels(results[2]))
    if isinstance(weight, Node):
        y = after.call(aten.mul.Tensor, y, channels(weight))
    if isinstance(bias, Node):
        y = after.call(aten.add.Tensor, y, channels(bias))
    return _take_over(results[0], after.cast(y, out.dtype))


def _take_over(old: Node, new: Node) -> bool:
    """Replace `old` in its users by `new`, of equal dtype and shape; return False if the strides differ."""
    if val(new).stride() != val(old).stride():
        return False
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return True
