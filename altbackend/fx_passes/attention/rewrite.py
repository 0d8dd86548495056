"""The pass: every attention that a form describes becomes `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ...debug.trace import DecisionKind
from .. import attention_mask
from ..context import Context
from ..pattern.rules import Rewrite, Rules, described
from ..simplify import same_layout, same_sizes
from . import gates, masks, shapes
from .builder import Builder
from .form import Form, form_of
from .obstacles import obstacle
from .operators import PRODUCTS, aten, dtype_of, read, shape_of, value_of
from .sink_kernels import attention_with_sink
from .tiled_kernel import attention_in_tf32
from .writes import read_results

_FUSED = torch.nn.functional.scaled_dot_product_attention


def run(gm: GraphModule, ctx: Context) -> int:
    """Fuse the attentions of a graph and of the graphs inside it; return their number."""
    if ctx.config.attention == "off":
        return 0
    done = [rewrite for graph in graphs_of(gm) for rewrite in fuse(graph, ctx)]
    for rewrite in done:
        ctx.trace.decision(DecisionKind.SIMPLIFY, rewrite.rule, "fused", str(rewrite))
    return len(done)


def graphs_of(gm: GraphModule) -> list[Graph]:
    """Return the graph of a module and those of the modules that it calls, for example checkpointed ones."""
    return [m.graph for m in gm.modules() if isinstance(m, GraphModule)]


def fuse(graph: Graph, ctx: Context) -> list[Rewrite]:
    """Fuse the attentions of one graph, in place; return what was done."""
    if not any(read(n).name == "softmax" for n in graph.nodes):
        return []
    reason = gates.refused_graph(graph)
    if reason:
        ctx.trace.decision(DecisionKind.SIMPLIFY, "attention", "kept", reason)
        return []
    read_results(graph)
    done = Rules([Attention(ctx, gates.mapped(graph))], "attention", last_first=False).apply(graph)
    if done and graph.owning_module is not None:
        graph.owning_module.recompile()
    return done


class Attention:
    """The rule: it starts at the last product of an attention."""

    name = "attention"
    targets: tuple[object, ...] = PRODUCTS
    inner: tuple[object, ...] = ()

    def __init__(self, ctx: Context, mapped: Collection[Node] = ()) -> None:
        self.ctx, self.mapped = ctx, mapped
        self._values: dict[Node, object] = {}  # of nodes that depend on no input

    def constant(self, n: Node) -> object:
        """Return the value of a node that depends on no input, or None."""
        return attention_mask.known_value(n, self._values)

    def rewrite(self, n: Node) -> Rewrite | None:
        """Fuse the attention whose last product is a node, if the kernels take it exactly and faster."""
        if n in self.mapped:
            return None
        form = form_of(n, self.constant)
        if form is None:
            if reason := obstacle(n):
                self.ctx.trace.decision(DecisionKind.SIMPLIFY, f"attention {n.name}", "kept", reason)
            return None
        reason = gates.refused(form, self.ctx) or gates.slower(form, self.ctx)
        new = reason or self._fused(form)
        if isinstance(new, str):
            self.ctx.trace.decision(DecisionKind.SIMPLIFY, f"attention {n.name}", "kept", new)
            return None
        rewrite = Rewrite(self.name, tuple(map(described, form.interior)), (described(new),))
        n.replace_all_uses_with(new)
        for old in reversed(form.interior):
            if not old.users:
                old.graph.erase_node(old)
        return rewrite

    def _fused(self, form: Form) -> Node | str:
        """Insert the fused call and return the node of its result; or why it is not possible, without any change."""
        build = Builder(form.result)
        new = self._built(build, form)
        if isinstance(new, str):
            build.erase_unused()
            return new
        if not same_layout(value_of(new), value_of(form.result)):
            build.erase_unused()
            return "the result has strides that the fused call cannot give"
        new.meta = {**form.result.meta, **new.meta}
        _erase_but(build, new)
        return new

    def _built(self, build: Builder, form: Form) -> Node | str:
        device = value_of(form.result).device.type
        lead = shapes.lead_of(form)
        operands = None if lead is None else _operands(build, form, lead)
        if operands is not None:
            operands = _narrow(build, operands, dtype_of(form.result))
            operands = _padded(build, operands, gates.missing_features(form)) if device == "cpu" else operands
        if lead is None or operands is None:
            return "its operands have symbolic sizes that must be reshaped"
        mask = masks.mask_of(build, form, lead, device, self._values)
        if isinstance(mask, str):
            return mask
        reason = gates.refused_mask(form, mask, self.ctx)
        if reason or form.sink is None:
            return reason or _result(build, form, attend(build, form, operands, mask), mask)
        sink = masks.placed_sink(build, form.sink, lead)
        if sink is None:
            return "its sink has symbolic sizes that must be reshaped"
        mask = masks.beside_sink(build, mask, sink)
        return _result(build, form, attend(build, form, operands, mask, sink), mask)


def _erase_but(build: Builder, new: Node) -> None:
    for n in reversed(build.inserted):
        if n is not new and not n.users:
            n.graph.erase_node(n)


@dataclass(frozen=True)
class Operands:
    """Query, keys and values with four dimensions. `grouped`: several heads share keys and values."""

    query: Node
    key: Node
    value: Node
    grouped: bool = False


def _operands(build: Builder, form: Form, lead: shapes.Lead) -> Operands | None:
    """Return the operands, or None. On a CPU, keys that were repeated for several heads are read where they are."""
    expected = shape_of(form.scores)[:-2]
    query = shapes.operand(build, form.query, expected, lead)
    if query is not None and value_of(query).device.type == "cpu" and (shared := _shared(build, form)) is not None:
        return Operands(shapes.row_major(build, query), *shared, grouped=True)
    turned = shapes.operand(build, form.key, expected, lead)
    value = shapes.operand(build, form.value, shapes.before_order(shape_of(form.result), form.order)[:-2], lead)
    if query is None or turned is None or value is None:
        return None
    key = build.call(aten.transpose.int, turned, -2, -1)
    query, key, value = (shapes.row_major(build, n) for n in (query, key, value))
    return Operands(query, key, value)


def _narrow(build: Builder, x: Operands, dtype: torch.dtype) -> Operands:
    """Return operands in the dtype that the fused kernel reads; it holds the numbers of those that are wider."""
    query, key, value = (
        n if dtype_of(n) == dtype else build.call(aten._to_copy.default, n, dtype=dtype)
        for n in (x.query, x.key, x.value)
    )
    return Operands(query, key, value, x.grouped)


def _padded(build: Builder, x: Operands, missing: tuple[int, int]) -> Operands:
    """Return operands of one number of features: more features that are 0 change no score, and no other feature."""
    to_query, to_value = missing
    query, key, value = (
        build.call(aten.constant_pad_nd.default, n, [0, more], 0.0) if more else n
        for n, more in ((x.query, to_query), (x.key, to_query), (x.value, to_value))
    )
    return Operands(query, key, value, x.grouped)


def _shared(build: Builder, form: Form) -> tuple[Node, Node] | None:
    """Return keys and values before they were repeated for the heads, or None if one of them was not."""
    turned = read(form.key.node)
    source = turned.get("input")
    whole = form.key.order is None and form.value.order is None and value_of(form.scores).dim() == 4
    if not whole or turned.name != "transpose" or value_of(form.key.node).dim() != 4:
        return None
    if {d % 4 for d in (turned.get("dim0"), turned.get("dim1")) if isinstance(d, int)} != {2, 3}:
        return None
    key, value = shapes.ungrouped(build, source), shapes.ungrouped(build, form.value.node)
    if key is None or value is None or not same_sizes(shape_of(key)[:-2], shape_of(value)[:-2]):
        return None
    return shapes.row_major(build, key), shapes.row_major(build, value)


def attend(build: Builder, form: Form, operands: Operands, mask: masks.Mask, sink: Node | None = None) -> Node:
    """Insert the fused call. Its result has the dtype of the query."""
    options: dict[str, Argument] = {"dropout_p": form.dropout, "is_causal": mask.causal, "scale": mask.scale}
    if operands.grouped:
        options["enable_gqa"] = True
    target = _FUSED if build.key == "example_value" else aten.scaled_dot_product_attention.default
    query, key, value = operands.query, operands.key, operands.value
    for factor, divides in mask.factors:
        query = build.call(aten.div.Tensor if divides else aten.mul.Tensor, query, factor)
    fake = value_of(query)
    result = fake.new_empty((*fake.shape[:-1], value_of(value).shape[-1]))
    if gates.takes_tiles_of_tf32(form):
        return build.with_value(
            result, attention_in_tf32, query, key, value, mask.node, causal=mask.causal, scale=mask.scale
        )
    if sink is not None:
        given = (mask.node, mask.causal, mask.scale)
        return build.with_value(result, attention_with_sink, query, key, value, sink, given)
    return build.with_value(result, target, query, key, value, mask.node, **options)


def _result(build: Builder, form: Form, n: Node, mask: masks.Mask) -> Node | str:
    """Return the result in the sizes and strides of the last product's."""
    if value_of(n).device.type == "cpu" and (more := gates.missing_features(form)[1]):
        n = build.call(aten.slice.Tensor, n, -1, 0, shape_of(n)[-1] - more)
    n = build.call(aten.clone.default, n, **shapes.CONTIGUOUS)
    if mask.hidden_rows is not None:
        n = build.call(aten.mul.Tensor, n, mask.hidden_rows)
        if value_of(n).dtype != value_of(form.result).dtype:
            n = build.call(aten._to_copy.default, n, dtype=value_of(form.result).dtype)
    own = shapes.before_order(shape_of(form.result), form.order)
    here = shapes.with_lead(build, n, shape_of(n)[:-2], own[:-2]) if len(own) >= 4 else _narrowed(build, n, own)
    if here is None:
        return "its result has symbolic sizes that must be reshaped"
    if form.order is None:
        return here
    return _laid_out(build, build.call(aten.permute.default, here, list(form.order)), form.result)


def _laid_out(build: Builder, n: Node, like: Node) -> Node:
    """Return a result, or a copy of it, with the order of dimensions in memory that another tensor has."""
    fake = value_of(like)
    if same_layout(value_of(n), fake) or not all(isinstance(s, int) for s in (*fake.shape, *fake.stride())):
        return n
    order = sorted(range(fake.dim()), key=lambda dim: (-fake.stride(dim), -fake.shape[dim]))
    dense = build.call(aten.permute.default, n, order)
    dense = build.call(aten.clone.default, dense, **shapes.CONTIGUOUS)
    return build.call(aten.permute.default, dense, [order.index(dim) for dim in range(fake.dim())])


def _narrowed(build: Builder, n: Node, own: shapes.Lead) -> Node | None:
    """Return a result of four dimensions with the two or three of `own`."""
    leading = shape_of(n)[: 4 - len(own)]
    if all(isinstance(s, int) and s == 1 for s in leading):
        for _ in leading:
            n = build.call(aten.squeeze.dim, n, 0)
        return n
    return build.call(aten.reshape.default, n, list(own)) if all(isinstance(s, int) for s in own) else None
