"""Compute small matrix products in generated kernels: sum_k a[i, k] b[k, j].

A product of depth 1 is an outer product, which is pointwise.

On a CPU, memory bounds products with one column, and batches of products with one row. The library takes 1.0 to 12
times as long as a generated kernel. For one column, oneDNN with a packed weight takes 1.0 to 2.4 times as long (64 to
100,000 rows, depths up to 1,024). With one row, a packed weight is as fast.

On a GPU, memory bounds many rows, or many matrices, of little depth and width. A generated kernel reads them as fast as
the library does, and fuses with its neighbours. A product of many rows and few columns is such a kernel, too. Each
column is the sum of a row times a vector, and the kernel reads the row once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ..aten.name import operator_name
from ..aten.pointwise import COSTLY, WINDOWS, is_elementwise
from ..aten.view import is_view
from .context import Context
from .graph import aten, insert, is_call, propagate, val

MANY = 8192  # rows, or matrices of a batch
FEW = 16  # depth, and width of the results
# Terms of a row, depth times width. On an H100, a million rows take the library 0.14 ms or more with TF32, and 0.05 ms
# in 16 bits. A generated kernel took 0.43 ms for 256 terms of float32, and 0.3 ms for 64 terms of bfloat16.
MOST_TERMS, MOST_TERMS_OF_16_BITS = 64, 12

# Terms that are written out, and those of the widest row of a tile, which operands that lie along them fill. On an
# H200, 100,000 products of 16x16x16 in float32 took 161 us with such operands and 721 with others (library: 239 and
# 263), of 16x12x16 in bfloat16 166 and 1,093 (91 and 95), and of 8x8x8 in float32 44 and 43 (189 and 198).
WRITTEN_OUT, ROW = 8, 16

# The greatest depth by the most columns of many rows. On an H100, the library's kernels for widths of whole
# vectors read memory once; for others they take 1.2 to 6 times as long (a million rows of 64 in bfloat16 and two
# columns: 247 us for 48). With 4 columns of 256 float32 numbers both take the same time, and so they do with 6 of 256
# in 16 bits.
MOST_DEPTH = {3: 1024, 6: 128}


def run(gm: GraphModule, ctx: Context) -> int:
    """Rewrite products of depth 1 and those bound by memory; return their number."""
    new = []
    for n in list(gm.graph.nodes):
        if _suits(n, ctx.device):
            new.append(_decompose(gm, n))
        elif ctx.device == "gpu" and _has_few_columns(n):
            new.append(_columns(gm, n))
    propagate(gm, new)
    return len(new)


def _has_few_columns(n: Node) -> bool:
    """Return whether a product has many contiguous rows and so few columns that the library reads memory slowly."""
    if not is_call(n, aten.mm.default, aten.addmm.default) or n.kwargs:
        return False
    a, b = (val(x) for x in n.args[-2:])
    (rows, depth), width = a.shape, b.shape[1]
    if not a.dtype.is_floating_point or a.dtype != b.dtype or a.dtype == torch.float64:
        return False
    if not all(isinstance(s, int) for s in (rows, depth, width)) or a.stride(1) != 1:
        return False
    most = max((d for columns, d in MOST_DEPTH.items() if 0 < width <= columns), default=0)
    return bool(rows >= MANY and 0 < depth <= most)


def _columns(gm: GraphModule, n: Node) -> Node:
    """Replace a product by the sums that are its columns, side by side."""
    *bias, a, b = n.args
    dtype = val(n).dtype

    def call(target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        return insert(gm.graph, n, target, args, kwargs)

    def exact(x: Argument) -> Argument:
        return call(aten._to_copy.default, x, dtype=torch.float32) if dtype.itemsize == 2 else x

    wide, columns = exact(a), list[Node]()
    added = call(aten.expand.default, bias[0], list(val(n).shape)) if bias else None
    for k in range(val(n).shape[1]):
        total = call(aten.sum.dim_IntList, call(aten.mul.Tensor, wide, exact(call(aten.select.int, b, 1, k))), [1])
        if added is not None:
            total = call(aten.add.Tensor, total, exact(call(aten.select.int, added, 1, k)))
        total = call(aten._to_copy.default, total, dtype=dtype) if dtype.itemsize == 2 else total
        columns.append(call(aten.unsqueeze.default, total, 1))
    result = call(aten.cat.default, columns, 1) if len(columns) > 1 else columns[0]
    n.replace_all_uses_with(result)
    gm.graph.erase_node(n)
    return result


def _suits(n: Node, device: str) -> bool:
    if not is_call(n, aten.mm.default, aten.bmm.default, aten.addmm.default) or n.kwargs:
        return False
    a, b = (val(x) for x in n.args[-2:])
    sizes = (*a.shape, b.shape[-1])
    if not a.dtype.is_floating_point or a.dtype != b.dtype or not all(isinstance(s, int) for s in sizes[-2:]):
        return False
    rows, depth, width = sizes[-3:]
    if depth == 1 and n.target is not aten.addmm.default:
        return True
    if device == "cpu":
        return depth > 0 and (width == 1 or (len(sizes) == 4 and isinstance(rows, int) and rows == 1))
    if not isinstance(rows, int) or any(_is_costly(x) for x in n.args[-2:]):
        return False
    along_terms = depth == ROW and a.stride(-1) == b.stride(-2) == 1
    return _bound_by_memory(sizes, a.dtype.itemsize) and (depth <= WRITTEN_OUT or along_terms)


def _is_costly(x: Argument) -> bool:
    """Return whether pointwise work with roots, quotients or the like computes an operand, or a window of another.

    Each result would compute its terms anew: 20,320 products of 13x13 normalised matrices took 0.30 ms, where the
    library takes 0.05.
    """
    pending, seen = [x], set[Node]()
    while pending:
        n = pending.pop()
        if not isinstance(n, Node) or n in seen:
            continue
        if operator_name(n.target) in COSTLY | WINDOWS:
            return True
        if not (is_elementwise(n.target) or is_view(n)):
            continue
        seen.add(n)
        pending += n.all_input_nodes
    return False


def _bound_by_memory(sizes: Sequence[int], itemsize: int) -> bool:
    rows, depth, width = sizes[-3:]
    if not 0 < depth <= FEW or not 0 < width <= FEW:
        return False
    batch = sizes[0] if len(sizes) == 4 else 1
    most_terms = MOST_TERMS_OF_16_BITS if itemsize == 2 else MOST_TERMS
    many_rows = rows >= MANY and depth * width <= most_terms
    return isinstance(batch, int) and (many_rows or (batch >= MANY and rows <= FEW))


def _decompose(gm: GraphModule, n: Node) -> Node:
    *bias, a, b = n.args

    def call(target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        return insert(gm.graph, n, target, args, kwargs)

    if val(a).shape[-1] == 1 and not bias:
        new = call(aten.mul.Tensor, a, b)  # (i, 1) * (1, j)
    else:
        new = call(aten.sum.dim_IntList, _terms(call, a, b), [-2])
        new = call(aten.add.Tensor, new, bias[0]) if bias else new
        new = call(aten._to_copy.default, new, dtype=val(n).dtype) if val(n).dtype.itemsize == 2 else new
    n.replace_all_uses_with(new)
    gm.graph.erase_node(n)
    return new


def _terms(call: Callable[..., Node], a: Argument, b: Argument) -> Node:
    """Return a[i, k] b[k, j]; of 16 bits in float32, as the library, which adds so and rounds once."""
    c, d = call(aten.unsqueeze.default, a, -1), call(aten.unsqueeze.default, b, -3)
    if val(a).dtype.itemsize == 2:
        c, d = (call(aten._to_copy.default, x, dtype=torch.float32) for x in (c, d))
    return call(aten.mul.Tensor, c, d)
