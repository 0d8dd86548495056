"""Drop attention masks that mask nothing and replace causal masks by `is_causal`.

Libraries build masks from positions (`arange(n) <= arange(n)[:, None]`). Such a mask depends on no input, so this pass
computes it at compile time. torch's fused kernels are faster with a causal flag or without a mask than with one. The
pass runs before AOTAutograd, which chooses the kernel of the attention.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ..compat import torch_api
from .context import Context
from .graph import function_of

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_LIMIT = 1 << 26  # elements of the largest mask that is computed at compile time
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "empty")


def run(gm: GraphModule, ctx: Context) -> int:
    """Simplify the attention calls of a graph that Dynamo captured; return the number of removed masks."""
    return sum(simplify_masks(gm).values())


def simplify_masks(gm: GraphModule) -> dict[str, int]:
    """Simplify the attention calls of a graph that Dynamo captured; return the numbers of dropped and causal masks."""
    counts = {"dropped": 0, "causal": 0}
    values: dict[Node, object] = {}
    meanings: dict[Node, str] = {}  # by mask: all layers of a model usually share one
    for n in list(gm.graph.nodes):
        if n.op != "call_function" or n.target is not _ATTENTION:
            continue
        mask = _argument(n, 3, "attn_mask")
        if not isinstance(mask, Node) or _argument(n, 5, "is_causal"):
            continue
        if mask not in meanings:
            meanings[mask] = meaning_of(known_value(mask, values))
        meaning = meanings[mask]
        if meaning:
            _replace(n, causal=meaning == "causal")
            counts[meaning] += 1
    masks = [mask for mask, meaning in meanings.items() if meaning]
    if masks:
        _erase_unread(masks)
        gm.recompile()
    return counts


def _erase_unread(masks: list[Node]) -> None:
    """Erase unused nodes that computed these masks.

    Other unused nodes stay: graphs of Dynamo write in place by methods whose results have no users.
    """
    ancestors = {m for mask in masks for m in _ancestors(mask) or ()}
    for n in reversed(list(masks[0].graph.nodes)):
        if n in ancestors and not n.users:
            n.graph.erase_node(n)


def _argument(n: Node, position: int, name: str) -> object:
    return n.args[position] if len(n.args) > position else n.kwargs.get(name)


def _replace(n: Node, causal: bool) -> None:
    args = list(n.args)
    kwargs = dict(n.kwargs)
    if len(args) > 3:
        args[3] = None
    else:
        kwargs.pop("attn_mask", None)
    if causal and len(args) > 5:
        args[5] = True
    elif causal:
        kwargs["is_causal"] = True
    n.args, n.kwargs = tuple(args), kwargs


def meaning_of(mask: object) -> str:
    """Return "dropped" for a mask that masks nothing, "causal" for the lower triangle, else ""."""
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2:
        return ""
    rows, columns = mask.shape[-2:]
    mask = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]  # equal elements once
    if mask.dtype == torch.bool:
        visible = mask
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not (hidden | (mask == 0)).all():
            return ""
        visible = ~hidden
    if visible.all():
        return "dropped"
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and bool((visible == triangle).all()) else ""


def known_value(n: Node, values: dict[Node, object]) -> object:
    """Return the value of `n`, computed on the CPU, or None if it depends on an input or cannot be computed."""
    order = _ancestors(n)
    if order is None:
        return None
    with torch_api.real_tensors(), torch.no_grad():
        for m in order:
            if m not in values:
                try:
                    values[m] = _compute(m, values)
                except Exception:  # the pass is optional: on any error the mask stays
                    return None
    return values[n]


def _compute(n: Node, values: dict[Node, object]) -> object:
    def on_cpu(x: object) -> object:
        if isinstance(x, Node):
            return values[x]
        return torch.device("cpu") if isinstance(x, torch.device) else x

    args, kwargs = pytree.tree_map(on_cpu, (tuple(n.args), dict(n.kwargs)), is_leaf=lambda x: isinstance(x, Node))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    if n.op == "call_method":
        return getattr(args[0], str(n.target))(*args[1:], **kwargs)
    return function_of(n)(*args, **kwargs)


def _ancestors(n: Node) -> list[Node] | None:
    """Return `n` and all nodes that it depends on, in graph order, or None if one is an input, random or a write."""
    seen: set[Node] = set()
    stack = [n]
    while stack:
        m = stack.pop()
        if m in seen:
            continue
        if not _plain(m):
            return None
        seen.add(m)
        stack.extend(m.all_input_nodes)
    return [m for m in n.graph.nodes if m in seen]


def _plain(n: Node) -> bool:
    if n.op not in ("call_function", "call_method") or any(writes_in_place(u) for u in n.users):
        return False
    name = str(n.target) if n.op == "call_method" else getattr(n.target, "__name__", "")
    is_mapped = "functorch" in (getattr(n.target, "__module__", "") or "")  # it needs the level that a region enters
    if writes_in_place(n) or is_mapped or any(r in name for r in _RANDOM):
        return False
    shape = n.meta.get("example_value", None)
    if isinstance(shape, torch.Tensor):
        return all(isinstance(s, int) for s in shape.shape) and shape.numel() <= _LIMIT
    return not isinstance(shape, (torch.SymInt, torch.SymFloat, torch.SymBool))


_OPERATOR_WRITES = frozenset(
    getattr(operator, n)
    for n in (
        *("setitem", "delitem", "iadd", "iand", "ifloordiv", "ilshift", "imod", "imul", "imatmul"),
        *("ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
    )
)


def writes_in_place(n: Node) -> bool:
    if n.op == "call_function" and getattr(n.target, "__module__", "") == "_operator":
        return n.target in _OPERATOR_WRITES  # and_, or_ and not_ end in "_" but do not write
    name = str(n.target) if n.op == "call_method" else getattr(n.target, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in n.kwargs
