"""Lower calls that write their first argument in place: the loops store into the argument's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..aten.mutates import IN_PLACE
from ..ir import expr as ex
from ..ir import value as va
from ..ir.loops import Extern
from .context import Ctx
from .registry import LOWERINGS
from .tensor import Tensor, as_view

# an operator with several functional forms is lowered as the first, which checks its positions
FUNCTIONAL = {in_place: functional for functional, in_place in reversed(tuple(IN_PLACE.items()))}

Write = Callable[[Ctx, torch.fx.Node, Tensor, Tensor], Tensor]


def lower(
    ctx: Ctx, node: torch.fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, object], write: Write
) -> Tensor | None:
    """Lower an in-place call as the functional operator with a destination; return the written argument.

    `write` stores a result that the lowering computed elsewhere. Return None if the call has no destination in memory.
    Raises FallBack as the functional operator does.
    """
    into = args[0]
    destination = as_view(into)
    lowering = LOWERINGS.get(FUNCTIONAL[node.target])
    if destination is None or lowering is None:
        return None
    rest, named = torch.utils._pytree.tree_map(lambda x: _apart(ctx, x, destination.buffer), (args[1:], kwargs))
    ctx.before_write(destination.buffer)
    ctx.destination = destination
    try:
        result = lowering(ctx, into, *rest, **named)
    finally:
        ctx.destination = None
    return write(ctx, node, into, result)


def _apart(ctx: Ctx, x: object, buffer: str) -> object:
    """Store a tensor that reads the memory that is about to be written."""
    return ctx.realize(x, fresh=True) if isinstance(x, Tensor) and any(b == buffer for b, _ in va.loads(x.value)) else x


def reusable(ctx: Ctx, base: Tensor, dtype: torch.dtype, reads: list[str]) -> str | None:
    """Return the temporary buffer that holds `base` alone and that nothing reads any more, or None.

    An update of `base` may write into it. `reads`: the buffers that the update reads.
    """
    v = as_view(base)
    if v is None or base.dtype != dtype:
        return None
    b = ctx.buffers[v.buffer]
    whole = (v.sizes, v.strides, v.offset) == (b.sizes, b.strides, 0) and b.dtype == dtype and not b.negative
    if b.kind != "temp" or not whole or b.name in reads or ex.strides_for(b.sizes) != b.strides:
        return None
    if any(isinstance(n, Extern) and (b.name in n.aliases or (n.aliases and b.name in n.outs)) for n in ctx.nodes):
        return None
    return None if ctx.read_later(b.name) else b.name
