"""Drop the lists of a block mask that FlexAttention does not read.

The forward reads the blocks by rows, not those by columns, which only its gradient reads. A call without a block mask
has one block of all rows and columns; its lists say nothing, and eager code builds them by a dozen small calls.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .context import Context

WHOLE = 1 << 30  # rows or columns of the one block of a call without a block mask
_LISTS, _BY_COLUMN = 2, 6  # positions in the tuple of a block mask: behind two sizes, and behind the lists by rows
_LENGTHS = (13, 17)  # lengths of the tuple in older and newer versions of torch
# for each operator, the position of the block mask among its arguments, and whether it reads the lists by columns
_OPERATORS = {
    torch.ops.higher_order.flex_attention: (4, False),
    torch.ops.higher_order.flex_attention_backward: (9, True),
}


def run(gm: GraphModule, ctx: Context) -> int:
    """Replace the unread lists by None; return the number of calls that changed."""
    return sum(_simplify(n, *_OPERATORS[n.target]) for n in gm.graph.nodes if n.target in _OPERATORS)


def _simplify(n: Node, position: int, by_column: bool) -> bool:
    mask = n.args[position] if position < len(n.args) else None
    if not isinstance(mask, (tuple, list)) or len(mask) not in _LENGTHS:
        return False
    last = len(mask) - 3
    whole = all(isinstance(size, int) and size >= WHOLE for size in mask[last : last + 2])
    first = _LISTS if whole else last if by_column else _BY_COLUMN
    new = (*mask[:first], *([None] * (last - first)), *mask[last:])
    if new == tuple(mask):
        return False
    n.update_arg(position, new)
    return True
