"""A value of which a library call reads a padded copy is stored in that copy alone; kernels read it from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from ..aten.pointwise import is_pointwise
from ..aten.view import is_view
from ..debug.trace import DecisionKind
from ..ir import expr as ex
from .context import Ctx
from .operators.view import first_positions, padded
from .temporary_layout import is_computed
from .tensor import Tensor, points

MOST_STEPS = 6  # operators between a value and its padding


def padding_of(ctx: Ctx, node: Node) -> Node | None:
    """Return the one padding of a node's value that a library call reads, if kernels are all other readers; else None.

    Kernels take any strides. For a GPU alone: a CPU's loops over padded rows would begin at less aligned addresses.
    """
    paddings = [u for u in node.users if u.target is torch.ops.aten.constant_pad_nd.default]
    if len(paddings) != 1 or ctx.returned[node] or ctx.returned[paddings[0]]:
        return None
    (padding,) = paddings
    cuts = any(not isinstance(n, int) or n < 0 for n in padding.args[1])  # type: ignore[union-attr]
    others = [u for u in node.users if u is not padding]
    if cuts or not others or not all(map(_is_kernel, others)) or not _is_read_by_call(padding):
        return None
    return padding


def is_padded_behind_views(ctx: Ctx, node: Node) -> bool:
    """Return whether all readers of a node read one view of it, and that has a padding which is to be stored."""
    view = node
    while len(view.users) == 1 and is_view(reader := next(iter(view.users))) and not ctx.returned[view]:
        view = reader
    return view is not node and padding_of(ctx, view) is not None


def leads_to_one_padding(ctx: Ctx, node: Node) -> bool:
    """Return whether a few pointwise operators alone read a node, and all lead to one padding, of a call's operand.

    The padding's kernel then computes them all, once. Stored without padding, the value would be a pass over memory of
    its own: rows of another length cannot be in the kernel of the padded ones.
    """
    reached, pending, paddings = {node}, [node], set[Node]()
    while pending:
        n = pending.pop()
        if ctx.returned[n] or len(reached) > MOST_STEPS:
            return False
        for u in n.users:
            if u.target is torch.ops.aten.constant_pad_nd.default:
                paddings.add(u)
            elif not is_pointwise(u.target):
                return False
            elif u not in reached:
                reached.add(u)
                pending.append(u)
    return len(paddings) == 1 and all(not ctx.returned[p] and _is_read_by_call(p) for p in paddings)


def _is_kernel(n: Node) -> bool:
    return is_computed(n) or n.target is torch.ops.aten._to_copy.default


def _is_read_by_call(n: Node) -> bool:
    return any(_is_read_by_call(u) if is_view(u) else not _is_kernel(u) for u in n.users)


def store(ctx: Ctx, t: Tensor, padding: Node) -> Tensor:
    """Store `t` with its padding as the value of the node `padding`; return the part that is `t`, a view of it."""
    fake: torch.Tensor = padding.meta["val"]
    number: Any = padding.args[2] if len(padding.args) > 2 else padding.kwargs.get("value", 0)
    before = first_positions(ctx, cast(Sequence[int], padding.args[1]), len(t.sizes))
    whole = ctx.realize(padded(t, ctx.shape(fake.shape), before, number), fake)
    ctx.bind(padding, whole)
    ctx.decision(DecisionKind.LOWERING, padding.name, "stored early", "kernels read its operand from it")
    inner = [ex.add(p, b) for p, b in zip(points(t.sizes), before, strict=True)]
    return Tensor(t.sizes, t.dtype, whole.at(inner))
