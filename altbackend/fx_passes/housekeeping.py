"""Passes that optimise nothing themselves but prepare the graph for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from ..compat import torch_api
from . import constants
from .context import Context
from .graph import complete, drop_dead


def eliminate_dead_code(gm: GraphModule, ctx: Context) -> int:
    """Erase calls without users and without effects; return their number."""
    before = len(gm.graph.nodes)
    drop_dead(gm.graph)
    return before - len(gm.graph.nodes)


def complete_fake_values(gm: GraphModule, ctx: Context) -> int:
    """Compute the fake values of nodes that have none."""
    complete(gm)
    return 0


def move_constants_up(gm: GraphModule, ctx: Context) -> int:
    """Move calls on only parameters directly behind the inputs."""
    constants.move_up(gm, ctx.constant_nodes(gm))
    return 0


def move_constants_down(gm: GraphModule, ctx: Context) -> int:
    """Move calls on only parameters that every call computes in front of their first users."""
    constants.move_down(gm, ctx.constant_nodes(gm))
    return 0


def record_result_strides(gm: GraphModule, ctx: Context) -> int:
    """Record the traced values of the results in the output node, since users get the traced strides."""
    out = gm.graph.output_node()
    flat = out.args[0] if isinstance(out.args[0], (tuple, list)) else (out.args[0],)
    fakes = tuple(n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in flat)
    out.meta["fakes"] = fakes
    out.meta["roots"] = _roots(gm, fakes)
    return 0


def _roots(gm: GraphModule, fakes: Sequence[object]) -> tuple[tuple[str, torch.Tensor] | None, ...]:
    """Return for each result that shares its storage with another one (name, value) of the first node of that storage.

    The node gets its name as `root` in its meta; a node that replaces it inherits the entry.
    """
    storages = [torch_api.storage_of(x) for x in fakes]
    shared = {s for s, count in Counter(storages).items() if s is not None and count > 1}
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for n in gm.graph.nodes if shared else ():
        if (s := torch_api.storage_of(n.meta.get("val"))) is not None and s in shared and s not in first:
            first[s] = n.name, n.meta["val"]
            n.meta["root"] = n.name
    return tuple(None if s is None else first.get(s) for s in storages)
