"""Compute independent linears of equal sizes as one batched product: [x W, y V, ...] = bmm([x, y, ...], [W, V, ...]).

On a GPU a small product takes the time of a launch, and a batch of them too. The weights are stacked once; stacking
the inputs is one small kernel, which fuses with what computes them. Products are independent if none needs another.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from .context import Context
from .graph import aten, insert, is_call, propagate, stable_sort, val

LEAST = 4  # products in a batch: fewer save less than stacking costs
MOST_OPERATIONS = 1 << 26  # multiplications of one product; a larger one fills the GPU alone


def run(gm: GraphModule, ctx: Context) -> int:
    """Join independent linears with constant weights; return the number of batches."""
    return join(gm, ctx.constant_nodes(gm))


def join(gm: GraphModule, constant: set[Node]) -> int:
    """Join the groups of equal, independent linears; return the number of groups."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    level: dict[Node, int] = {}  # products on the longest path to a node
    for n in gm.graph.nodes:
        level[n] = max(
            (level[a] + is_call(a, aten.mm.default, aten.addmm.default) for a in n.all_input_nodes), default=0
        )
        if _suits(n, constant):
            *_, x, w = n.args
            key = (level[n], n.target, tuple(val(x).shape), tuple(val(w).shape), val(x).dtype)
            groups.setdefault(key, []).append(n)
    joined = [group for group in groups.values() if len(group) >= LEAST]
    for group in joined:
        _join(gm, group, constant)
    if joined:
        stable_sort(gm)
        propagate(gm)
    return len(joined)


def _suits(n: Node, constant: set[Node]) -> bool:
    if not is_call(n, aten.mm.default, aten.addmm.default) or n.kwargs:
        return False
    *bias, x, w = n.args
    sizes = (*val(x).shape, *val(w).shape)
    if x in constant or w not in constant or any(b not in constant or val(b).dim() != 1 for b in bias):
        return False
    if not all(isinstance(s, int) for s in sizes) or 0 in sizes or not val(n).dtype.is_floating_point:
        return False
    return bool(sizes[0] * sizes[1] * sizes[3] <= MOST_OPERATIONS)


def _join(gm: GraphModule, group: list[Node], constant: set[Node]) -> None:
    last = group[-1]
    xs, ws = ([n.args[k] for n in group] for k in (-2, -1))
    weights, rows = _stack(gm, last, ws), _stack(gm, last, xs)
    constant.add(weights)
    if is_call(last, aten.addmm.default):
        biases = _stack(gm, last, [n.args[0] for n in group])
        wide = insert(gm.graph, last, aten.unsqueeze.default, (biases, 1))
        constant.update((biases, wide))
        batch = insert(gm.graph, last, aten.baddbmm.default, (wide, rows, weights))
    else:
        batch = insert(gm.graph, last, aten.bmm.default, (rows, weights))
    for k, n in enumerate(group):
        part = insert(gm.graph, last, aten.select.int, (batch, 0, k))
        n.replace_all_uses_with(part)
    for n in group:
        gm.graph.erase_node(n)


def _stack(gm: GraphModule, before: Node, parts: Sequence[Argument]) -> Node:
    layers = [insert(gm.graph, before, aten.unsqueeze.default, (p, 0)) for p in parts]
    return insert(gm.graph, before, aten.cat.default, (layers,))
