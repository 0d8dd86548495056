"""Use what is known of a random permutation as an index: its positions are in range, and no two are equal.

x[randperm(n)] reads without checks; x.index_add(0, randperm(n)[:k], v) stores x[p] + v plainly, without atomics
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from .context import Context
from .graph import aten, insert, is_call, val


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite reads and updates at positions of a permutation; return their number."""
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten.index.Tensor):
            count += _read(n)
        elif is_call(n, aten.index_select.default):
            count += _select(gm, n)
        elif is_call(n, aten.index_add.default):
            count += _add(gm, n)
        elif is_call(n, aten.index_put.default):
            count += _put(gm, n)
    return count


def _limit(n: object) -> int | torch.SymInt | None:
    """Return `m` if a node holds different numbers from 0 to m - 1: a part of `randperm(m)`; else None."""
    while isinstance(n, Node) and is_call(n, aten.slice.Tensor, aten.clone.default, aten.alias.default):
        n = n.args[0]
    if not isinstance(n, Node) or not is_call(n, aten.randperm.default):
        return None
    m = n.args[0]
    limit = val(m) if isinstance(m, (int, Node)) else None
    return limit if isinstance(limit, (int, torch.SymInt)) else None


def _fits(x: Node, dim: int, index: object) -> bool:
    """Return whether `index` is a permutation of the positions, or of the first positions, of a dimension."""
    limit = _limit(index)
    return limit is not None and val(index).dtype == torch.int64 and statically_known_true(limit <= val(x).shape[dim])


def _single(indices: object) -> tuple[int, Node] | None:
    """Return the dimension and the node of the only index, or None."""
    if not isinstance(indices, (list, tuple)):
        return None
    given = [(k, i) for k, i in enumerate(indices) if i is not None]
    return given[0] if len(given) == 1 else None


def _read(n: Node) -> int:
    x, indices = n.args
    single = _single(indices)
    if single is None or not isinstance(x, Node) or not _fits(x, *single):
        return 0
    n.target = aten._unsafe_index.Tensor
    return 1


def _at(dim: int, index: Argument) -> list[Argument]:
    return [None] * dim + [index]


def _select(gm: GraphModule, n: Node) -> int:
    x, dim, index = n.args
    assert isinstance(x, Node)
    rank = val(x).dim()
    if not rank or not _fits(x, dim % rank, index):
        return 0
    new = insert(gm.graph, n, aten._unsafe_index.Tensor, (x, _at(dim % rank, index)))
    return _take_over(n, new)


def _add(gm: GraphModule, n: Node) -> int:
    x, dim, index, source = n.args
    assert isinstance(x, Node)
    rank = val(x).dim()
    if not rank or not _fits(x, dim % rank, index) or val(source).dtype != val(x).dtype:
        return 0
    at = _at(dim % rank, index)
    old = insert(gm.graph, n, aten._unsafe_index.Tensor, (x, at))
    if val(old).shape != val(source).shape:
        return 0
    total = insert(gm.graph, n, aten.add.Tensor, (old, source), dict(n.kwargs))
    return _take_over(n, insert(gm.graph, n, aten._unsafe_index_put.default, (x, at, total)))


def _put(gm: GraphModule, n: Node) -> int:
    x, indices, values, *accumulate = n.args
    single = _single(indices)
    if single is None or not isinstance(x, Node) or any(accumulate) or n.kwargs or not _fits(x, *single):
        return 0
    return _take_over(n, insert(gm.graph, n, aten._unsafe_index_put.default, (x, indices, values)))


def _take_over(n: Node, new: Node) -> int:
    if val(new).stride() != val(n).stride():
        new.graph.erase_node(new)
        return 0
    n.replace_all_uses_with(new)
    n.graph.erase_node(n)
    return 1
