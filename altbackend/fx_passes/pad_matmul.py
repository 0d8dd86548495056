"""Pad matmuls with zeros to sizes that the library computes fast, and slice the result.

cuBLAS falls back to kernels that are several times slower if rows in memory are not multiples of 16 bytes, as with a
vocabulary of 50257. In inference the weight is padded once, in the prologue of parameters. In training the operands of
all three products are padded when they are computed, and the slice is a view.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .context import Context
from .graph import aten, insert, is_call, propagate, val

_LOW = (torch.bfloat16, torch.float16)
_MULTIPLE = 8  # elements of 16 bits in 16 bytes
_LEAST = 1 << 27  # fewest multiplications for which padding pays for the copy that slices the result
_ROWS = 512  # fewest rows for which the product is bound by arithmetic, so that copying the weight is a small part
_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


def run(gm: GraphModule, ctx: Context) -> int:
    """Pad the matmuls of an inference graph whose weights are constant."""
    return pad_weights(gm, ctx.constant_nodes(gm), each_call=not ctx.freezes)


def run_joint(gm: GraphModule, ctx: Context) -> int:
    """Pad the matmuls of a joint graph."""
    return pad_products(gm)


def pad_weights(gm: GraphModule, constant: set[Node], each_call: bool = False) -> int:
    """Pad the width of matmuls that gain from it; return their number.

    `each_call`: weights are copied in every call.
    """
    count = 0
    for n in list(gm.graph.nodes):
        if is_call(n, aten.mm.default, aten.addmm.default) and _gains(n, constant, each_call):
            _widen(gm, n, constant)
            count += 1
    return count


def _operands(n: Node) -> tuple[Node, Node, Node | None]:
    """Return (x, weight, bias) of a matmul."""
    if n.target is aten.mm.default:
        return n.args[0], n.args[1], None  # type: ignore[return-value]
    return n.args[1], n.args[2], n.args[0]  # type: ignore[return-value]


def _gains(n: Node, constant: set[Node], each_call: bool) -> bool:
    x, w, b = _operands(n)
    sizes = (*val(x).shape, val(w).shape[1])
    if w not in constant or val(w).dtype not in _LOW or n.kwargs or not all(isinstance(s, int) for s in sizes):
        return False
    if b is not None and (b not in constant or val(b).dim() != 1):
        return False
    rows, depth, width = sizes
    enough = rows >= (_ROWS if each_call else 1)
    return bool(width % _MULTIPLE and enough and rows * depth * width >= _LEAST)


def _widen(gm: GraphModule, n: Node, constant: set[Node]) -> None:
    x, w, b = _operands(n)
    width = val(w).shape[1]
    more = -width % _MULTIPLE

    def once(target: object, *args: object) -> Node:
        new = insert(gm.graph, n, target, args)  # type: ignore[arg-type]
        constant.add(new)
        return new

    if is_call(w, *_TRANSPOSES) and val(w.args[0]).is_contiguous():
        source = w.args[0]  # pad the stored parameter and transpose the copy, which keeps the memory order
        wide = once(aten.t.default, once(aten.constant_pad_nd.default, source, [0, 0, 0, more]))
    else:
        wide = once(aten.constant_pad_nd.default, w, [0, more])
    if b is None:
        product = insert(gm.graph, n, aten.mm.default, (x, wide))
    else:
        product = insert(gm.graph, n, aten.addmm.default, (once(aten.constant_pad_nd.default, b, [0, more]), x, wide))
    sliced = insert(gm.graph, n, aten.slice.Tensor, (product, 1, 0, width))
    n.replace_all_uses_with(sliced)
    gm.graph.erase_node(n)
    propagate(gm, [sliced])


def pad_products(gm: GraphModule) -> int:
    """Pad the large matmuls of a joint graph, forward and backward; return their number.

    Every dimension that is contiguous in an operand or in the result is padded. Zeros along the summed dimension do not
    change the result; along the others they add rows or columns, which are sliced off.
    """
    padded: dict[tuple[Node, int, int], Node] = {}
    products = [n for n in gm.graph.nodes if is_call(n, aten.mm.default, aten.addmm.default)]
    slices = [_pad_all(gm, n, more, padded) for n in products if (more := _missing(n))]
    propagate(gm, slices)
    return len(slices)


def _missing(n: Node) -> tuple[int, int, int] | None:
    """Return the padding of rows, depth and width of a matmul, in elements, or None if padding does not pay."""
    a, b, bias = _operands(n)
    sizes = (*val(a).shape, val(b).shape[1])
    if val(a).dtype not in _LOW or n.kwargs or not all(isinstance(s, int) for s in sizes):
        return None
    if bias is not None and val(bias).dim() != 1:
        return None
    rows, depth, width = sizes
    transposed = val(a).stride(0) == 1 and val(a).stride(1) != 1
    more = (-rows % _MULTIPLE if transposed else 0, -depth % _MULTIPLE, -width % _MULTIPLE)
    return more if any(more) and rows * depth * width >= _LEAST else None


def _pad_all(gm: GraphModule, n: Node, more: tuple[int, int, int], padded: dict[tuple[Node, int, int], Node]) -> Node:
    """Replace a matmul by a slice of a padded one; return the slice."""
    a, b, bias = _operands(n)
    rows, depth, width = more
    operands = (_padded(gm, a, rows, depth, padded), _padded(gm, b, depth, width, padded))
    if bias is None:
        sliced = insert(gm.graph, n, aten.mm.default, operands)
    else:
        wide = insert(gm.graph, n, aten.constant_pad_nd.default, (bias, [0, width])) if width else bias
        sliced = insert(gm.graph, n, aten.addmm.default, (wide, *operands))
    for dim, extra in ((0, rows), (1, width)):
        if extra:
            sliced = insert(gm.graph, n, aten.slice.Tensor, (sliced, dim, 0, val(n).shape[dim]))
    n.replace_all_uses_with(sliced)
    gm.graph.erase_node(n)
    return sliced


def _padded(gm: GraphModule, x: Node, rows: int, columns: int, padded: dict[tuple[Node, int, int], Node]) -> Node:
    """Return `x` with zero rows and columns added; a matrix and its transpose share one padded copy."""
    if not rows and not columns:
        return x
    if is_call(x, *_TRANSPOSES):
        source = x.args[0]
        assert isinstance(source, Node)
        copy = _padded(gm, source, columns, rows, padded)
        return insert(gm.graph, _following(x), aten.t.default, (copy,))
    if (x, rows, columns) not in padded:
        padded[x, rows, columns] = insert(
            gm.graph, _following(x), aten.constant_pad_nd.default, (x, [0, columns, 0, rows])
        )
    return padded[x, rows, columns]


def _following(x: Node) -> Node:
    """Return the first node after `x` that is not an input."""
    after = x.next
    while after.op == "placeholder":
        after = after.next
    return after
