"""Compute attentions of few queries and keys, such as those of windows of an image, by the memory-efficient kernel.

torch prefers the kernels of cuDNN and FlashAttention, whose tiles have 64 or 128 rows by 128 keys. With at most 64 of
each, most of such a tile is empty. The range was measured on an H100 in 16 bits, forward and gradient. For 16 to 64
queries and keys of 32 and 64 features, the memory-efficient kernel takes 0.27 to 0.87 of cuDNN's time. It takes 0.3 to
0.6 of that of FlashAttention. With 80 keys or features it takes 1.2 to 2.6 times cuDNN's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from .context import Context
from .graph import aten, insert, is_call, propagate, replace, val
from .pattern.match import arguments

MOST, FEWEST_QUERIES, FEATURES_OF_ROW = 64, 16, 8  # tile rows and columns; queries; features in 16 bytes
_CUDNN, _FLASH = aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention.default
_CUDNN_GRADIENT = aten._scaled_dot_product_cudnn_attention_backward.default
_FLASH_GRADIENT = aten._scaled_dot_product_flash_attention_backward.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_EFFICIENT_GRADIENT = aten._scaled_dot_product_efficient_attention_backward.default
_BIAS_COLUMNS = 16  # torch pads the rows of a bias to as many elements


def run(gm: GraphModule, ctx: Context) -> int:
    """Exchange the kernels of attentions without a gradient in a graph; return their number."""
    return sum(_exchange(gm, n, []) for n in _calls(gm) if not _extra_results(n))


def run_joint(gm: GraphModule, ctx: Context) -> int:
    """Exchange the kernels of attentions and of their gradients in a joint graph; return the number of attentions.

    The gradient of the memory-efficient kernel may vary from run to run.
    """
    if ctx.config.deterministic or torch.are_deterministic_algorithms_enabled():
        return 0
    return sum(_exchange(gm, n, gradients) for n in _calls(gm) if (gradients := _gradients(n)) is not None)


def _calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if is_call(n, _CUDNN, _FLASH) and _suits(n)]


def _named(n: Node) -> dict[str, Any]:
    """Return the arguments of a call of an operator by their names, with defaults."""
    assert isinstance(n.target, torch._ops.OpOverload)
    names = (argument.name for argument in n.target._schema.arguments)
    return dict(zip(names, arguments(n.target, n.args, n.kwargs) or (), strict=True))


def _suits(n: Node) -> bool:
    given = _named(n)
    q, k, v = (val(given[name]) for name in ("query", "key", "value"))
    if q.dtype not in (torch.float16, torch.bfloat16) or given["dropout_p"] or given["return_debug_mask"]:
        return False
    if q.dim() != 4 or not all(isinstance(s, int) for x in (q, k, v) for s in x.shape):
        return False
    queries, keys = q.shape[-2], k.shape[-2]
    if not FEWEST_QUERIES <= queries <= MOST or not 1 < keys <= MOST or (given["is_causal"] and queries != keys):
        return False
    if k.shape[1] != q.shape[1] or v.shape[1] != q.shape[1]:  # several heads share keys
        return False
    if any(x.shape[-1] > MOST or x.shape[-1] % FEATURES_OF_ROW or x.stride(-1) != 1 for x in (q, k, v)):
        return False
    bias = given.get("attn_bias")
    return bias is None or (val(bias).dim() == 4 and val(bias).shape[-1] == keys and val(bias).dtype == q.dtype)


def _extra_results(n: Node) -> list[Node]:
    """Return the readers of all results of a call but the first."""
    return [u for u in n.users if not is_call(u, operator.getitem) or u.args[1] != 0]


def _gradients(n: Node) -> list[Node] | None:
    """Return the calls of the gradient of an attention; None if anything else reads its additional results."""
    readers = {r for u in _extra_results(n) for r in u.users}
    backward = _CUDNN_GRADIENT if n.target is _CUDNN else _FLASH_GRADIENT
    if any(not is_call(u, operator.getitem) for u in n.users) or not all(is_call(r, backward) for r in readers):
        return None
    own = [r for r in n.graph.nodes if r in readers]
    for r in own:
        given = _named(r)
        if any(
            not is_call(given[name], operator.getitem) or given[name].args[0] is not n for name in ("out", "logsumexp")
        ):
            return None
    return own


def _exchange(gm: GraphModule, n: Node, gradients: list[Node]) -> bool:
    """Replace one call and the calls of its gradient."""
    given = _named(n)
    bias = given.get("attn_bias")
    if bias is not None:
        bias = _padded(n, bias, val(given["query"]).shape, val(given["key"]).shape[-2])
    operands, rest = (given["query"], given["key"], given["value"], bias), (0.0, given["is_causal"])
    more = {"scale": given["scale"]}
    new = insert(gm.graph, n, _EFFICIENT, (*operands, bool(gradients), *rest), more)
    parts = [insert(gm.graph, n, operator.getitem, (new, k)) for k in range(4)]
    changed = [_replace_gradient(gm, g, operands, parts, more) for g in gradients]
    for u in list(n.users):
        if u.args[1] == 0:
            replace(u, parts[0])
    for u in list(n.users):
        gm.graph.erase_node(u)
    gm.graph.erase_node(n)
    for part in parts:
        if not part.users:
            gm.graph.erase_node(part)
    propagate(gm, [parts[0], *(u for call in changed for u in call.users)])
    return True


def _padded(n: Node, bias: Node, queries: torch.Size, keys: int) -> Node:
    """Return a bias for each head whose rows begin at multiples of 32 bytes in memory that is the graph's own."""
    sizes = [*queries[:-1], keys]
    for dim in range(3):
        if val(bias).stride(dim) == 0 and val(bias).shape[dim] > 1:
            bias = insert(n.graph, n, aten.slice.Tensor, (bias, dim, 0, 1))
    if more := -keys % _BIAS_COLUMNS:
        bias = insert(n.graph, n, aten.constant_pad_nd.default, (bias, [0, more], 0.0))
    bias = insert(n.graph, n, aten.clone.default, (bias,), {"memory_format": torch.contiguous_format})
    if more:
        bias = insert(n.graph, n, aten.slice.Tensor, (bias, 3, 0, keys))
    return insert(n.graph, n, aten.expand.default, (bias, sizes))


def _replace_gradient(
    gm: GraphModule, old: Node, operands: tuple[Argument, ...], parts: list[Node], more: dict[str, Argument]
) -> Node:
    given = _named(old)
    incoming = given["grad_out"]
    if val(incoming).stride(-1) != 1:
        incoming = insert(gm.graph, old, aten.clone.default, (incoming,), {"memory_format": torch.contiguous_format})
    mask = [True, True, True, False]
    args = (incoming, *operands, *parts, 0.0, mask, given["is_causal"])
    new = insert(gm.graph, old, _EFFICIENT_GRADIENT, args, more)
    for u in list(old.users):
        replace(u, insert(gm.graph, u, operator.getitem, (new, u.args[1])))
    gm.graph.erase_node(old)
    return new
