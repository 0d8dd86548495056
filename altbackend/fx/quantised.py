"""Finalise a quantised graph: products of dequantised bytes become calls of oneDNN with packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..config.resolve import resolve
from ..debug.trace import Trace
from ..fx_passes.context import Context
from ..fx_passes.graph import aten, complete, insert, propagate, val
from ..fx_passes.quantised import convolutions, linears, products
from ..runtime.quantised import convolution_added_to, quantised_convolution, quantised_linear
from .freeze import clone, freeze_module, mutable_attributes, remove_unread
from .inline import inline
from .module import Program, attribute, drop_unread, graph_module

_ADDED = 12  # position of the argument `added` of `quantised_convolution`


def finalize_quantized(module: Program, preserved_attrs: Sequence[str] = ()) -> GraphModule:
    """Return a frozen copy of a quantised program whose linears and convolutions compute with bytes.

    The program is what `torch.export` gives after quantisation, with `quantize` and `dequantize` operators around its
    products. Weights are packed for oneDNN, what follows a product (bias, activation, quantisation) joins its call, and
    everything that depends on constants alone is folded. The rules are those of the compiler; what no rule takes stays
    as it is. `preserved_attrs` and errors are those of `freeze_module`. Raise ValueError for a graph without the sizes
    and dtypes that `torch.export` records.
    """
    gm = clone(graph_module(module))
    gm.training = False  # modules that export makes have no eval(); their calls carry their mode
    inline(gm)
    _complete(gm)
    _take_apart(gm)
    excluded = {*preserved_attrs, *mutable_attributes(gm)}
    constants = [str(n.target) for n in gm.graph.find_nodes(op="get_attr") if n.target not in excluded]
    cfg = resolve(options={"freezing": True})
    ctx = Context(cfg, Trace("finalize_quantized", cfg), attributes=frozenset(constants))
    for rule in (linears.call_onednn, products.run, convolutions.run):
        rule(gm, ctx)
    drop_unread(gm)
    ctx.trace.finish()
    frozen = freeze_module(gm, preserved_attrs)
    _call_operators(frozen)
    remove_unread(frozen, preserved_attrs)
    return frozen


def _complete(gm: GraphModule) -> None:
    inputs = gm.graph.find_nodes(op="placeholder")
    if any("val" not in n.meta for n in inputs):
        raise ValueError("the graph has no sizes and dtypes of its inputs; make it by torch.export.export")
    complete(gm)


def _take_apart(gm: GraphModule) -> None:
    """Write `linear` and `conv2d` as the operators that the rules know."""
    new: list[Node] = []
    for n in list(gm.graph.nodes):
        if n.op != "call_function":
            continue
        if n.target is aten.conv2d.default and not isinstance(n.args[4] if len(n.args) > 4 else 0, str):
            new.append(_convolution(gm, n))
        elif n.target is aten.linear.default:
            new.append(_linear(gm, n))
    propagate(gm, new)


def _replaced(n: Node, new: Node) -> Node:
    new.meta = {**n.meta, **new.meta}
    n.replace_all_uses_with(new)
    n.graph.erase_node(n)
    return new


def _pair(sizes: int | list[int] | tuple[int, ...]) -> list[int]:
    numbers: list[int] = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes]
    return numbers * 2 if len(numbers) == 1 else numbers


def _convolution(gm: GraphModule, n: Node) -> Node:
    arguments: tuple[Any, ...] = (*n.args, *(None, 1, 0, 1, 1)[len(n.args) - 2 :])
    x, weight, bias, stride, padding, dilation, groups = arguments
    geometry = (_pair(stride), _pair(padding), _pair(dilation))
    args = (x, weight, bias, *geometry, False, [0, 0], groups)
    return _replaced(n, insert(gm.graph, n, aten.convolution.default, args))


def _linear(gm: GraphModule, n: Node) -> Node:
    x, weight, *rest = n.args
    assert isinstance(x, Node)
    bias = rest[0] if rest else None
    shape = val(n).shape
    rows = x if val(x).dim() == 2 else insert(gm.graph, n, aten.reshape.default, (x, [-1, val(x).shape[-1]]))
    wt = insert(gm.graph, n, aten.permute.default, (weight, [1, 0]))
    target, first = (aten.mm.default, ()) if bias is None else (aten.addmm.default, (bias,))
    y = insert(gm.graph, n, target, (*first, rows, wt))
    if len(shape) == 2:
        return _replaced(n, y)
    sizes = [-1 if isinstance(s, torch.SymInt) else s for s in shape]
    return _replaced(n, insert(gm.graph, n, aten.reshape.default, (y, sizes)))


def _call_operators(gm: GraphModule) -> None:
    """Call oneDNN itself where the constant zero points of a weight are known to be 0."""
    for n in list(gm.graph.nodes):
        if n.target is quantised_convolution:
            _call_operator(gm, n, torch.ops.onednn.qconv_pointwise.default)
        elif n.target is quantised_linear:
            tensors = isinstance(n.args[1], Node)
            op = torch.ops.onednn.qlinear_pointwise
            _call_operator(gm, n, op.tensor if tensors else op.default)
    drop_unread(gm)
    gm.graph.lint()
    gm.recompile()


def _call_operator(gm: GraphModule, n: Node, op: torch._ops.OpOverload) -> None:
    arguments: tuple[Any, ...] = n.args
    x, scale, zero, packed, symmetric, weight, scales, zeros, bias, *lists = arguments[:_ADDED]
    if symmetric is not None and (symmetric.op != "get_attr" or not bool(attribute(gm, str(symmetric.target)))):
        return
    if not isinstance(zeros, Node):
        with gm.graph.inserting_before(n):
            sizes = [attribute(gm, str(weight.target)).shape[0]]
            zeros = gm.graph.call_function(aten.zeros.default, (sizes,), {"dtype": torch.int64})
    added = arguments[_ADDED:]
    operands = (x, scale, zero, packed, scales, zeros, bias)
    with gm.graph.inserting_before(n):
        if added:
            *most, post = lists
            (total, total_scale, total_zero), flat = added[0], [a for one in most for a in one]
            args = (total, *operands, *flat, total_scale, total_zero, "sum", 1.0, *post)
            new = gm.graph.call_function(convolution_added_to, args)
        else:
            new = gm.graph.call_function(op, (*operands, *(a for one in lists for a in one)))
    _replaced(n, new)
