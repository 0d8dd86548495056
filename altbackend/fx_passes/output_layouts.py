"""Restore the traced strides of a graph's results after passes have changed layouts inside the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from .context import Context
from .graph import aten, insert, layout, val


def record(gm: GraphModule, ctx: Context) -> int:
    """Record the traced values of the results in the output node."""
    gm.graph.output_node().meta["result_layouts"] = of(gm)
    return 0


def restore_recorded(gm: GraphModule, ctx: Context) -> int:
    """Restore the recorded layouts of the results; return the number of copies."""
    return restore(gm, gm.graph.output_node().meta.pop("result_layouts"))


def of(gm: GraphModule) -> list[Any]:
    """Return the fake values of the results, in order."""
    return [val(n) for n in pytree.tree_leaves(gm.graph.output_node().args)]


def restore(gm: GraphModule, traced: Sequence[object]) -> int:
    """Copy every result whose layout differs from that of its value in `traced`; return the number of copies."""
    out = gm.graph.output_node()
    results, spec = pytree.tree_flatten(out.args)
    copies: dict[Node, Node] = {}
    for k, (n, fake) in enumerate(zip(results, traced, strict=True)):
        if isinstance(n, Node) and isinstance(fake, torch.Tensor) and layout(val(n)) != layout(fake):
            if n not in copies:
                copies[n] = _copy(gm, out, n, fake)
            results[k] = copies[n]
    out.args = pytree.tree_unflatten(results, spec)
    return len(copies)


def _copy(gm: GraphModule, out: Node, n: Node, fake: torch.Tensor) -> Node:
    for format_ in (torch.contiguous_format, torch.channels_last):
        if (fake.dim() == 4 or format_ is torch.contiguous_format) and fake.is_contiguous(memory_format=format_):
            copied = insert(gm.graph, out, aten.clone.default, (n,), {"memory_format": format_})
            if layout(val(copied)) == layout(fake):
                return copied
            gm.graph.erase_node(copied)
    kind: dict[str, Argument] = {"dtype": fake.dtype, "device": fake.device}
    empty = insert(gm.graph, out, aten.empty_strided.default, (list(fake.shape), list(fake.stride())), kind)
    return insert(gm.graph, out, aten.copy.default, (empty, n))
