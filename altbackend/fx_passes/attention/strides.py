"""The pass: calls of `scaled_dot_product_attention` get operands that torch's fused kernels take.

torch computes an attention in float32 and stores its scores in two cases: the last dimension of an operand is not
contiguous, or operands have three dimensions. A bias that is a permuted embedding is such an operand, and so are the
points of an image as tokens. A copy of the operand, or one more dimension, costs less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from altbackend.lazy_dataclass import dataclass

from ...compat import torch_api
from ..context import Context
from ..simplify import same_layout
from . import gates
from .builder import Builder
from .operators import aten, dtype_of, is_tensor, shape_of, value_of
from .rewrite import graphs_of

_FUSED = torch.nn.functional.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MOST_HEADS = 65535  # rows of a grid of programs


@dataclass(frozen=True)
class Call:
    """Arguments of one call. `more`: `scale` and `enable_gqa`, where the call gives them."""

    query: Node
    key: Node
    value: Node
    mask: Node | None
    dropout: float
    causal: bool
    more: dict[str, Argument]

    @property
    def operands(self) -> tuple[Node, ...]:
        """Query, keys, values, and the mask if there is one."""
        return tuple(n for n in (self.query, self.key, self.value, self.mask) if n is not None)


def run(gm: GraphModule, ctx: Context) -> int:
    """Change operands that keep attentions from the fused kernels; return the number of attentions."""
    count = 0
    for graph in graphs_of(gm):
        mapped = gates.mapped(graph)
        calls = [n for n in graph.nodes if n.op == "call_function" and n.target is _FUSED and n not in mapped]
        done = 0 if not calls or gates.refused_graph(graph) else sum(_rearrange(n, ctx) for n in calls)
        if done and graph.owning_module is not None:
            graph.owning_module.recompile()
        count += done
    return count


def _rearrange(n: Node, ctx: Context) -> bool:
    call = _read(n)
    if call is None or _is_fused(call) or _varies(call, ctx) or not _gains(call):
        return False
    build = Builder(n)
    changed = _changed(build, call)
    new = _result(build, n, changed) if changed is not None and _is_fused(changed) else None
    if new is None:
        build.erase_unused()
        return False
    new.meta = {**n.meta, **new.meta}
    n.replace_all_uses_with(new)
    n.graph.erase_node(n)
    return True


def _read(n: Node) -> Call | None:
    """Return the arguments of a call; None if they are of other types or shapes than the pass knows."""
    given: dict[str, Argument] = dict(zip(_NAMES, n.args, strict=False)) | n.kwargs
    operands: list[Any] = [given.pop(name, None) for name in _NAMES[:3]]
    mask, dropout, causal = (
        given.pop(name, default) for name, default in zip(_NAMES[3:], (None, 0.0, False), strict=True)
    )
    if not all(map(is_tensor, operands)) or (mask is not None and not is_tensor(mask)) or not is_tensor(n):
        return None
    if not isinstance(dropout, (int, float)) or not isinstance(causal, bool):
        return None
    if set(given) - {"scale", "enable_gqa"} or any(isinstance(x, Node) for x in given.values()):
        return None
    ranks = {value_of(x).dim() for x in operands}
    if ranks not in ({3}, {4}) or (mask is not None and value_of(mask).dim() not in (1, 2, 3, 4)):
        return None
    query, key, value = operands
    return Call(query, key, value, mask, float(dropout), causal, given)


def _varies(call: Call, ctx: Context) -> bool:
    """Return whether the fused kernel would draw other numbers than eager, or give gradients that vary, unasked."""
    if call.dropout and ctx.config.fallback_random:
        return True
    trains = any(value_of(x).requires_grad for x in call.operands)
    repeats = ctx.config.deterministic or torch.are_deterministic_algorithms_enabled()
    return trains and repeats and value_of(call.query).device.type != "cpu"


def _gains(call: Call) -> bool:
    """Return whether the fused kernel takes these numbers, and faster than products and a softmax in float32."""
    device, dtype = value_of(call.query).device.type, dtype_of(call.query)
    if {dtype_of(x) for x in (call.query, call.key, call.value)} != {dtype} or dtype not in gates.TYPES.get(device, ()):
        return False
    if any(statically_known_true(size == 0) for x in call.operands for size in shape_of(x)):
        return False
    if dtype != torch.float32:
        return True
    if device != "cpu":
        return not torch_api.allows_tf32()
    scores = (*shape_of(call.query)[:-1], shape_of(call.key)[-2])
    return value_of(call.query).requires_grad or not gates.separate_is_faster(scores, dtype)


def _is_fused(call: Call) -> bool:
    mask = None if call.mask is None else value_of(call.mask)
    grouped = bool(call.more.get("enable_gqa", False))
    values = (value_of(call.query), value_of(call.key), value_of(call.value))
    return torch_api.fuses_attention(torch_api.Attention(*values, mask, call.dropout, call.causal, grouped))


def _changed(build: Builder, call: Call) -> Call | None:
    """Return the call with four dimensions, of which the last one is contiguous; None if sizes do not allow it."""
    lifts = value_of(call.query).dim() == 3
    if lifts and not all(isinstance(s, int) and s <= _MOST_HEADS for s in shape_of(call.query)[:1]):
        return None
    query, key, value = (_contiguous(build, _lifted(build, x) if lifts else x) for x in call.operands[:3])
    mask = call.mask
    if mask is not None:
        if value_of(mask).dim() in (1, 3):
            mask = _lifted(build, mask, 1 if lifts and value_of(mask).dim() == 3 else 0)
        mask = _contiguous(build, _narrowed(build, mask, shape_of(key)[-2]))
    return replace(call, query=query, key=key, value=value, mask=mask)


def _lifted(build: Builder, x: Node, dim: int = 1) -> Node:
    return build.call(aten.unsqueeze.default, x, dim)


def _contiguous(build: Builder, x: Node) -> Node:
    if statically_known_true(value_of(x).stride(-1) == 1):
        return x
    return build.call(aten.clone.default, x, memory_format=torch.contiguous_format)


def _narrowed(build: Builder, mask: Node, keys: int | torch.SymInt) -> Node:
    """Return a mask that has a column for each key, and size 1 where its elements are the same, so a copy is small."""
    value = value_of(mask)
    for dim in range(value.dim() - 1):
        if statically_known_true(value.stride(dim) == 0) and not statically_known_true(value.shape[dim] == 1):
            mask = build.call(aten.slice.Tensor, mask, dim, 0, 1)
    if statically_known_true(value.shape[-1] == 1) and isinstance(keys, int) and keys != 1:
        mask = build.call(aten.expand.default, mask, [*(-1 for _ in range(value.dim() - 1)), keys])
    return mask


def _result(build: Builder, n: Node, call: Call) -> Node | None:
    """Insert the call, and return its result with the sizes and strides of the result of `n`."""
    attend: Callable[..., object] = _FUSED
    new = build.call(
        attend, *call.operands[:3], attn_mask=call.mask, dropout_p=call.dropout, is_causal=call.causal, **call.more
    )
    if value_of(n).dim() == 3:
        new = build.call(aten.squeeze.dim, new, 1)
    if not same_layout(value_of(new), value_of(n)) and value_of(n).is_contiguous():
        new = build.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    return new if same_layout(value_of(new), value_of(n)) else None
