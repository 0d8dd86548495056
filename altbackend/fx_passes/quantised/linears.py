"""Linears of dequantised bytes as one call of oneDNN, with packed weights, activation and quantisation.

For few rows, and where weights cannot be kept, the compiler prefers products of integers (`products.py`), whose
epilogues are generated kernels. In a graph that runs operator by operator, one call is better than ten.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from ...aten.name import operator_of
from ...compat.torch_api import exact_byte_products
from ...debug.trace import DecisionKind
from ...runtime.quantised import quantised_linear
from ..context import Context
from ..graph import aten, insert, is_call, replace, val
from .convolutions import as_arguments, checked_zeros, epilogue, erase_unread, scales_of
from .products import DEEPEST, Product, is_of_rows, is_whole, product_of

# A call of oneDNN starts in 40 us, a product of integers in 15, but that reorders the weight in every call. One thread
# of AVX-512 takes, rows x depth x width: 1 x 1024 x 1024 43 against 16 us, 32 x 1024 x 1024 180 against 226,
# 32 x 4096 x 1024 1,670 against 3,100.
FEWEST_ROWS = 8


def run(gm: GraphModule, ctx: Context) -> int:
    """Call oneDNN for linears of dequantised bytes and many rows; return their number."""
    return call_onednn(gm, ctx, FEWEST_ROWS)


def call_onednn(gm: GraphModule, ctx: Context, fewest_rows: int = 0) -> int:
    """Call oneDNN for linears of dequantised bytes and at least so many rows; return their number."""
    constant, count = ctx.constant_nodes(gm), 0
    for n in list(gm.graph.nodes):
        product = product_of(n) if is_call(n, aten.mm.default, aten.addmm.default) else None
        if product is None:
            continue
        rows = val(n).shape[0]
        few = isinstance(rows, int) and rows < fewest_rows
        reason = f"{rows} rows" if few else _refusal(product, constant)
        if reason:
            ctx.trace.decision(DecisionKind.QUANTISED, n.name, "no quantised linear", reason)
            continue
        ctx.trace.decision(DecisionKind.QUANTISED, n.name, "quantised linear", "bytes and packed weights")
        _rewrite(gm, product)
        count += 1
    return count


def _refusal(p: Product, constant: set[Node]) -> str:
    """Return why a product is no call of oneDNN, or ""."""
    w = p.weight
    if any(isinstance(a, Node) and a not in constant for a in (w.integers, w.scale, w.zero, p.bias)):
        return "a weight that is no parameter"
    if val(p.x.integers).dtype != torch.uint8 or val(w.integers).dtype != torch.int8:
        return "oneDNN multiplies uint8 with int8"
    if p.x.axis is not None or p.x.per_row or not is_of_rows(w) or w.per_row:
        return "a scale for each row"
    if not is_whole(p.x) or not is_whole(w) or (not isinstance(w.zero, Node) and w.zero not in (None, 0)):
        return "zero points that oneDNN does not take"
    if val(p.call).dtype != torch.float32 or (p.bias is not None and val(p.bias).dim() != 1):
        return "a result of 16 bits, or a bias that is no vector"
    if not 0 < val(w.integers).shape[1] <= DEEPEST:
        return f"sums of more than {DEEPEST} terms"
    if operator_of("onednn::qlinear_pointwise.tensor") is None:
        return "this version of torch has no such call of oneDNN"
    return "" if exact_byte_products() else "this processor's products of bytes are not exact"


def _rewrite(gm: GraphModule, p: Product) -> None:
    n, w = p.call, p.weight
    q = p.x.integers
    for view in reversed(p.views):
        q = insert(gm.graph, n, view.target, (q, *view.args[1:]))  # type: ignore[arg-type]
    x_scale, x_zero = _one(gm, n, p.x.scale, torch.float32), _one(gm, n, p.x.zero or 0, torch.int64)
    if isinstance(x_scale, Node) != isinstance(x_zero, Node):
        x_scale, x_zero = (_as_tensor(gm, n, a) for a in (x_scale, x_zero))
    with gm.graph.inserting_before(n):
        packed = gm.graph.call_function(torch.ops.onednn.qlinear_prepack.default, (w.integers, None))
    packed.meta = {"val": val(w.integers), "opaque": True}
    scales = scales_of(gm, n, w, val(w.integers).shape[0])
    zero, symmetric = checked_zeros(gm, n, w)
    unary, quantise = epilogue(n)
    out, post = as_arguments(unary, quantise)
    last = quantise.call if quantise is not None else unary[1] if unary is not None else n
    arguments = (q, x_scale, x_zero, packed, symmetric, w.integers, scales, zero, p.bias, out, post)
    with gm.graph.inserting_before(last):
        new = gm.graph.call_function(quantised_linear, arguments)
    new.meta = dict(last.meta)
    replace(last, new)
    erase_unread(gm, n, unary)


def _one(gm: GraphModule, before: Node, a: Argument, dtype: torch.dtype) -> Argument:
    """Return a number, or a tensor of one element as a vector of `dtype`."""
    if not isinstance(a, Node):
        return a
    if val(a).dtype != dtype:
        a = insert(gm.graph, before, aten._to_copy.default, (a,), {"dtype": dtype})
    return insert(gm.graph, before, aten.reshape.default, (a, [1]))


def _as_tensor(gm: GraphModule, before: Node, a: Argument) -> Argument:
    if isinstance(a, Node):
        return a
    dtype = torch.float32 if isinstance(a, float) else torch.int64
    return insert(gm.graph, before, aten.full.default, ([1], a), {"dtype": dtype})
