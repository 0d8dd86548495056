"""Copy a transposed operand of a batched product as it lies, and transpose the copy as a view.

`matmul` merges the batch dimensions of an operand by a contiguous copy. For the keys of an attention, y = k^T, the
copy would transpose every matrix, element by element:

    bmm(q, view(contiguous(k^T))) = bmm(q, view(contiguous(k))^T)

The library reads both layouts equally fast, and the copy of `k` often exists already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from .context import Context
from .graph import aten, insert, is_call, only_user, propagate, replace, val

_VIEWS = (aten._unsafe_view.default, aten.view.default, aten.reshape.default)
_TRANSPOSED = (aten.transpose.int, aten.permute.default)


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite the copies of transposed operands; return their number."""
    count = 0
    copies: dict[Node, Node] = {}  # the first contiguous copy of each tensor
    for n in list(gm.graph.nodes):
        if not is_call(n, aten.clone.default) or n.kwargs.get("memory_format") is not torch.contiguous_format:
            continue
        if _is_operand(n):
            _keep_order(gm, n, copies)
            count += 1
        elif (first := copies.setdefault(_expanded(n.args[0]), n)) is not n and count:
            replace(n, first)
    return count


def _expanded(n: Any) -> Node:
    """Return what an expansion that changes no size expands; other nodes are returned unchanged."""
    while is_call(n, aten.expand.default) and val(n).shape == val(n.args[0]).shape:
        n = n.args[0]
    assert isinstance(n, Node)
    return n


def _is_operand(copy: Node) -> bool:
    """Return whether a contiguous copy transposes matrices, and only batched products read it, through one view."""
    source, view = val(copy.args[0]), only_user(copy)
    if source.dim() < 3 or view is None:
        return False
    transposed = statically_known_true(source.stride(-2) == 1) and not statically_known_true(source.stride(-1) == 1)
    if not transposed or not is_call(view, *_VIEWS) or val(view).dim() != 3:
        return False
    same = all(statically_known_true(a == b) for a, b in zip(val(view).shape[-2:], source.shape[-2:], strict=True))
    return same and any(is_call(u, aten.bmm.default) for u in view.users) and all(map(_is_product, view.users))


def _is_product(user: Node) -> bool:
    """Return whether a user is a batched product, or a transposition that only batched products read."""
    if is_call(user, *_TRANSPOSED):
        return all(is_call(u, aten.bmm.default) for u in user.users)
    return is_call(user, aten.bmm.default)


def _keep_order(gm: GraphModule, copy: Node, copies: dict[Node, Node]) -> None:
    (view,) = copy.users
    sizes = view.args[1]
    assert isinstance(sizes, (list, tuple))
    batch, rows, columns = sizes

    def call(target: torch._ops.OpOverload, *args: Argument, **kwargs: Argument) -> Node:
        return insert(gm.graph, copy, target, args, kwargs)

    source = _expanded(copy.args[0])
    source = _before_transposition(source) or call(aten.transpose.int, source, -2, -1)
    if source not in copies:
        copies[source] = call(aten.clone.default, source, memory_format=torch.contiguous_format)
    merged = call(view.target, copies[source], [batch, columns, rows])  # type: ignore[arg-type]
    views = [u for u in view.users if is_call(u, *_TRANSPOSED)]
    replace(view, call(aten.transpose.int, merged, -2, -1))
    gm.graph.erase_node(copy)
    propagate(gm, views)


def _before_transposition(n: Node) -> Node | None:
    """Return the tensor of which a node swaps the last two dimensions, or None."""
    if not is_call(n, aten.transpose.int):
        return None
    source, *dims = n.args
    assert isinstance(source, Node)
    rank = val(n).dim()
    return source if {d % rank for d in dims} == {rank - 1, rank - 2} else None
