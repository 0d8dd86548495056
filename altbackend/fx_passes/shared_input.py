"""Merge linears that read the same input: [x W1 | x W2 | ...] = x [W1 | W2 | ...]."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from .context import Context
from .graph import aten, drop_dead, function_of, insert, is_call, propagate, val


def run(gm: GraphModule, ctx: Context) -> int:
    """Merge the linears of an inference graph that share their input."""
    return join(gm, ctx.constant_nodes(gm))


def join(gm: GraphModule, constant: set[Node]) -> int:
    """Concatenate the constant weights of matmuls that share their input; return the number of groups."""
    groups: dict[tuple[object, ...], list[Node]] = {}
    for n in gm.graph.nodes:
        if is_call(n, aten.mm.default, aten.addmm.default) and not n.kwargs and _suits(n, constant):
            x, w = n.args[-2:]
            groups.setdefault((x, n.target, val(w).dtype), []).append(n)
    count = 0
    for members in groups.values():
        if len(members) > 1 and _join(gm, members, constant):
            count += 1
    return count


def _suits(n: Node, constant: set[Node]) -> bool:
    *bias, x, w = n.args
    if x in constant or w not in constant or any(b not in constant or val(b).dim() != 1 for b in bias):
        return False
    # results become column slices with larger strides; only views are sure to accept those
    return all(is_call(u, aten.view.default) for u in n.users)


def _side_by_side(weights: list[Node], call: Callable[..., Node]) -> list[Node]:
    """Insert the calls that compute [W1 | W2 | ...]; return them, the result last.

    The weight of a linear is a transposed parameter. Stacking the parameters copies contiguous blocks and gives the
    layout that libraries prefer; copying and packing their transposes side by side is four times as slow.
    """
    if not all(is_call(w, aten.t.default) for w in weights):
        return [call(aten.cat.default, weights, 1)]
    below = call(aten.cat.default, [w.args[0] for w in weights], 0)
    return [below, call(aten.t.default, below)]


def _weight(product: Node) -> Node:
    weight = product.args[-1]
    assert isinstance(weight, Node)
    return weight


def _join(gm: GraphModule, members: list[Node], constant: set[Node]) -> bool:
    first = members[0]
    x = first.args[-2]

    def call(target: Callable[..., object], *args: Argument) -> Node:
        return insert(gm.graph, first, target, args)

    new = _side_by_side([_weight(m) for m in members], call)
    weight = new[-1]
    bias: tuple[Node, ...] = ()
    if first.target is aten.addmm.default:
        bias = (call(aten.cat.default, [m.args[0] for m in members]),)
        new.extend(bias)
    constant.update(new)
    merged = call(function_of(first), *bias, x, weight)
    begin = 0
    parts = []
    for m in members:
        end = begin + val(m).shape[1]
        parts.append(call(aten.slice.Tensor, merged, 1, begin, end))
        begin = end
    before = {n: n.meta.get("val") for n in gm.graph.nodes}
    for m, part in zip(members, parts, strict=True):
        m.replace_all_uses_with(part)
    try:
        propagate(gm, parts)
    except RuntimeError:  # a view whose source must be contiguous
        for m, part in zip(members, parts, strict=True):
            part.replace_all_uses_with(m)
        for n, fake in before.items():
            n.meta["val"] = fake
        drop_dead(gm.graph)
        return False
    for m in members:
        gm.graph.erase_node(m)
    return True
