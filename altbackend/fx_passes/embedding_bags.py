"""Compute the bag of each index where the library returns none.

On a CPU, sums of bfloat16 rows are a fast path that returns an empty tensor in place of the bags. The operator's fake
kernel knows this path for float32 and float16 alone, so a traced gradient would read the empty tensor out of bounds.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from .context import Context
from .graph import aten, insert, is_call, val

_SUM = 0  # the operator's number for this mode


def run(gm: GraphModule, ctx: Context) -> int:
    """Replace the bags that fake kernels promise and the library does not return; return their number."""
    bags = [n for n in gm.graph.nodes if is_call(n, operator.getitem) and n.args[1] == 1 and _is_empty(n.args[0])]
    wrong = [n for n in bags if n.users and val(n).shape[0] != 0]
    for n in wrong:
        _compute(gm, n)
    return len(wrong)


def _is_empty(call: Argument) -> bool:
    """Return whether `call` is an embedding bag on the fast path of bfloat16 on a CPU."""
    if not isinstance(call, Node) or not is_call(call, aten._embedding_bag.default):
        return False
    names = (a.name for a in aten._embedding_bag.default._schema.arguments)
    given: dict[str, Any] = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    weight, scales = val(given["weight"]), val(given.get("per_sample_weights"))
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.stride(1) != 1:
        return False
    plain = given.get("mode", _SUM) == _SUM and given.get("padding_idx", -1) < 0
    return bool(plain and (scales is None or scales.stride(0) == 1))


def _compute(gm: GraphModule, bags: Node) -> None:
    """Replace `bags`, (indices,), by the number of offsets up to each position, minus one."""
    call = bags.args[0]
    assert isinstance(call, Node)
    indices, offsets = call.args[1:3]
    ones = insert(gm.graph, bags, aten.ones_like.default, (indices,))
    ordinal = insert(gm.graph, bags, aten.cumsum.default, (ones, 0))
    position = insert(gm.graph, bags, aten.sub.Tensor, (ordinal, 1))
    count = insert(gm.graph, bags, aten.bucketize.Tensor, (position, offsets), {"right": True})
    bag = insert(gm.graph, bags, aten.sub.Tensor, (count, 1))
    if val(bag).dtype != val(bags).dtype:
        bag = insert(gm.graph, bags, aten._to_copy.default, (bag,), {"dtype": val(bags).dtype})
    bags.replace_all_uses_with(bag)
    gm.graph.erase_node(bags)
