"""Restore the traced strides of a graph's results after passes have changed layouts inside the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from .context import Context
from .graph import aten, insert, is_call, layout, val


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
    """Give every result the layout of its value in `traced`, by a copy if need be; return how many needed one."""
    out = gm.graph.output_node()
    results, spec = pytree.tree_flatten(out.args)
    copies: dict[Node, Node] = {}
    for k, (n, fake) in enumerate(zip(results, traced, strict=True)):
        if isinstance(n, Node) and isinstance(fake, torch.Tensor) and layout(val(n)) != layout(fake):
            if n not in copies:
                copies[n] = n if _store_so(n, out, fake) else _copy(gm, out, n, fake)
            results[k] = copies[n]
    out.args = pytree.tree_unflatten(results, spec)
    return len(copies)


def store_concatenations(gm: GraphModule, ctx: Context) -> int:
    """Store concatenations that only the caller reads in the layout that it was traced with; return their number."""
    out = gm.graph.output_node()
    fakes, roots = out.meta.get("fakes", ()), out.meta.get("roots", ())
    results = out.args[0] if isinstance(out.args[0], (tuple, list)) else out.args
    count = 0
    for n, fake, root in zip(results, fakes, roots, strict=False):
        if root is None and isinstance(fake, torch.Tensor) and isinstance(n, Node) and layout(val(n)) != layout(fake):
            count += _store_so(n, out, fake)
    return count


def _store_so(n: Node, out: Node, fake: torch.Tensor) -> bool:
    """Let the kernels of a concatenation that only `out` reads store its parts in the layout of `fake`.

    Return whether they do. A copy behind it would store the parts, read them and store them again.
    """
    is_own = is_call(n, aten.cat.default) and [*n.users] == [out] and isinstance(val(n), torch.Tensor)
    if not is_own or val(n).shape != fake.shape or val(n).dtype != fake.dtype:
        return False
    n.meta["val"] = fake
    return True


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
