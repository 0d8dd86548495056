"""Decompose normalisations of a joint graph into their statistics and pointwise operators.

The statistics are small. As values of their own, the partitioner can save them and let the backward recompute the
normalised results, pointwise and fused into their readers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from .context import Context
from .graph import aten, insert, is_call, val


def run(gm: GraphModule, ctx: Context) -> int:
    """Decompose the normalisations of a joint graph."""
    return expose(gm)


def expose(gm: GraphModule) -> int:
    """Rewrite log-softmaxes, and batch and group normalisations by their own statistics; return their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten._log_softmax.default):
            count += _log_softmax(gm, n)
        elif is_call(n, aten._native_batch_norm_legit_functional.default) and n.args[5] is True:
            count += _batch_norm(gm, n)
        elif is_call(n, aten.native_group_norm.default):
            count += _group_norm(gm, n)
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

    def call(self, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
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
    results = _results(gm, n)
    out = val(n)[0]
    if results is None or out.dim() < 2:
        return False
    after = _After(gm, max(results.values(), key=list(gm.graph.nodes).index))
    shape = [1, -1] + [1] * (out.dim() - 2)
    mean, rstd = (after.call(aten.view.default, results[k], shape) for k in (1, 2))
    return _take_over(results[0], _normalised(after, n, mean, rstd))


def _group_norm(gm: GraphModule, n: Node) -> bool:
    # (x - mean of the group) / std of the group * weight + bias
    results = _results(gm, n)
    out, groups = val(n)[0], n.args[6]
    if results is None or not all(isinstance(k, int) for k in out.shape) or out.numel() == 0:
        return False
    after = _After(gm, max(results.values(), key=list(gm.graph.nodes).index))
    batch, channels = out.shape[:2]

    def of_channels(v: Node) -> Node:
        v = after.call(aten.unsqueeze.default, v, 2)
        v = after.call(aten.expand.default, v, [batch, groups, channels // groups])
        return after.call(aten.reshape.default, v, [batch, channels] + [1] * (out.dim() - 2))

    return _take_over(results[0], _normalised(after, n, of_channels(results[1]), of_channels(results[2])))


def _results(gm: GraphModule, n: Node) -> dict[object, Node] | None:
    """Return the results of a normalisation: output, mean, inverse deviation. None if the statistics are rounded."""
    results: dict[object, Node] = {u.args[1]: u for u in n.users if u.target is operator.getitem}
    out, mean = val(n)[:2]
    if 0 not in results or mean.dtype != _wide(out.dtype):
        return None
    for k in (1, 2):
        if k not in results:
            with gm.graph.inserting_after(n):
                results[k] = gm.graph.call_function(operator.getitem, (n, k))
            results[k].meta["val"] = val(n)[k]
    return results


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _normalised(after: _After, n: Node, mean: Node, rstd: Node) -> Node:
    """Insert the pointwise operators of a normalisation whose statistics have the shape of channels."""
    x, weight, bias = n.args[:3]
    dtype = val(n)[0].dtype
    assert isinstance(x, Node)
    shape = [1, -1] + [1] * (val(x).dim() - 2)
    y = after.call(aten.sub.Tensor, after.cast(x, _wide(dtype)), mean)
    y = after.call(aten.mul.Tensor, y, rstd)
    for parameter, op in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
        if isinstance(parameter, Node):
            y = after.call(op, y, after.call(aten.view.default, after.cast(parameter, _wide(dtype)), shape))
    return after.cast(y, dtype)


def _take_over(old: Node, new: Node) -> bool:
    """Replace `old` in its users by `new`, of equal dtype and shape; return False if the strides differ."""
    if val(new).stride() != val(old).stride():
        return False
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return True
