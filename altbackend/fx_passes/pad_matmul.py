"""Matmuls with a constant weight whose width is odd to the library's alignment: computed wider, then cut.

cuBLAS falls back to kernels several times slower when rows of the result are not multiples of 16 bytes, as with a
vocabulary of 50257. The weight is padded once, among the work that depends only on parameters.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .graph import aten, insert, is_call, propagate, val

_LOW = (torch.bfloat16, torch.float16)
_MULTIPLE = 8  # elements of 16 bits in 16 bytes
_LEAST = 1 << 27  # multiplications from which the copy that cuts the result is worth it
_TURNS = (aten.t.default, aten.transpose.int, aten.permute.default)


def run(gm: GraphModule, constant: set[Node]) -> int:
    """Widen what gains; gives the number of matmuls."""
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten.mm.default, aten.addmm.default) and _gains(n, constant):
            _widen(gm, n, constant)
            count += 1
    return count


def _operands(n: Node) -> tuple[Node, Node, Node | None]:
    """(x, weight, bias)"""
    if n.target is aten.mm.default:
        return n.args[0], n.args[1], None  # type: ignore[return-value]
    return n.args[1], n.args[2], n.args[0]  # type: ignore[return-value]


def _gains(n: Node, constant: set[Node]) -> bool:
    x, w, b = _operands(n)
    sizes = (*val(x).shape, val(w).shape[1])
    if w not in constant or val(w).dtype not in _LOW or n.kwargs or not all(isinstance(s, int) for s in sizes):
        return False
    if b is not None and (b not in constant or val(b).dim() != 1):
        return False
    rows, depth, width = sizes
    return bool(width % _MULTIPLE and rows * depth * width >= _LEAST)


def _widen(gm: GraphModule, n: Node, constant: set[Node]) -> None:
    x, w, b = _operands(n)
    width = val(w).shape[1]
    more = -width % _MULTIPLE

    def once(target: object, *args: object) -> Node:
        made = insert(gm.graph, n, target, args)  # type: ignore[arg-type]
        constant.add(made)
        return made

    if is_call(w, *_TURNS) and val(w.args[0]).is_contiguous():
        source = w.args[0]  # stays as it lies in memory
        wide = once(aten.t.default, once(aten.constant_pad_nd.default, source, [0, 0, 0, more]))
    else:
        wide = once(aten.constant_pad_nd.default, w, [0, more])
    if b is None:
        product = insert(gm.graph, n, aten.mm.default, (x, wide))
    else:
        product = insert(gm.graph, n, aten.addmm.default, (once(aten.constant_pad_nd.default, b, [0, more]), x, wide))
    cut = insert(gm.graph, n, aten.slice.Tensor, (product, 1, 0, width))
    n.replace_all_uses_with(cut)
    gm.graph.erase_node(n)
    propagate(gm, [cut])
