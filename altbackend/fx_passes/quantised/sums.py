"""Graphs that others have lowered: a quantised convolution that adds to its operand becomes a call without effects.

AOTAutograd wraps an operator that writes its operand into a higher-order operator, which takes no packed weights.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from ...aten.name import operator_of
from ...runtime.quantised import convolution_added_to
from ..context import Context
from ..graph import is_call, val

_WRAPPED = torch.ops.higher_order.auto_functionalized_v2
_ACCUMULATES = "qaccum"


def run(gm: GraphModule, ctx: Context) -> int:
    """Unwrap convolutions that accumulate; return their number."""
    op = operator_of("onednn::qconv2d_pointwise.binary")
    return sum(_unwrap(gm, n, op) for n in list(gm.graph.nodes) if op and is_call(n, _WRAPPED) and n.args[0] is op)


def _unwrap(gm: GraphModule, n: Node, op: torch._ops.OpOverload) -> bool:
    arguments, index = dict(n.kwargs), n.kwargs.get(f"_{_ACCUMULATES}_base_index")
    bases = arguments.get("_all_bases")
    views = [name for name in arguments if name.startswith(f"_{_ACCUMULATES}_") and not name.endswith("_base_index")]
    reads = all(is_call(u, operator.getitem) and u.args[1] in (0, 1) for u in n.users)
    if not isinstance(index, int) or not isinstance(bases, (list, tuple)) or views or not reads:
        return False  # it accumulates into a part of a tensor
    rest = [arguments.get(a.name, a.default_value) for a in op._schema.arguments if a.name != _ACCUMULATES]
    with gm.graph.inserting_before(n):
        new = gm.graph.call_function(convolution_added_to, (bases[index], *rest))
    new.meta = {**n.meta, "val": val(n)[0]}
    for user in list(n.users):  # the result is the memory that was accumulated into
        user.replace_all_uses_with(new)
        gm.graph.erase_node(user)
    gm.graph.erase_node(n)
    return True
