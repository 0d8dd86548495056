"""Let the library write float32 products of 16-bit matrices that a graph returns as float32.

Gradients of autocast weights are such products. The library has float32 sums anyway, so writing them takes no longer
and saves the kernel that would cast the 16-bit product.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .context import Context
from .graph import aten, is_call, only_user, propagate, replace, val

_LOW = (torch.bfloat16, torch.float16)
_LARGE = 1 << 23  # elements of a result that takes 16 MiB more as float32
_LARGE_SHARE = 1 / 8  # of the elements of all such products
_VIEWS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default)


def run(gm: GraphModule, ctx: Context) -> int:
    """Let the library write the float32 products of a graph."""
    return widen(gm)


def widen(gm: GraphModule) -> int:
    """Rewrite the products on a GPU whose only reader casts them to results of the graph; return their number.

    A product that is a large part of all, such as that of a vocabulary, stays in 16 bits: its gradient is the first of
    a backward, when memory peaks, and is cast later.
    """
    casts = [(n, product) for n in gm.graph.nodes if (product := _product_of(n)) is not None]
    total = sum(_results(product) for _, product in casts)
    casts = [(n, product) for n, product in casts if _results(product) <= max(_LARGE, _LARGE_SHARE * total)]
    for cast, product in casts:
        product.target = aten.mm.dtype
        product.args = (*product.args, torch.float32)
        product.meta["val"] = val(product).float()
        source = cast.args[0]
        assert isinstance(source, Node)
        source.meta["val"] = val(cast)
        replace(cast, source)
    propagate(gm, [product for _, product in casts])
    return len(casts)


def _results(product: Node) -> int:
    n = val(product).numel()
    return n if isinstance(n, int) else 0


def _product_of(cast: Node) -> Node | None:
    """Return the product that `cast` converts to float32 for results of the graph only, or None."""
    if not is_call(cast, aten._to_copy.default) or not isinstance(cast.args[0], Node):
        return None
    options = {k: x for k, x in cast.kwargs.items() if x is not None and x != torch.preserve_format}
    if options.pop("dtype", None) != torch.float32 or options.keys() - {"device", "layout"} or not _only_returned(cast):
        return None
    x, reader = cast.args[0], cast
    while is_call(x, *_VIEWS) and only_user(x) is reader and isinstance(x.args[0], Node):
        x, reader = x.args[0], x
    product = is_call(x, aten.mm.default) and not x.kwargs and only_user(x) is reader
    return x if product and val(x).dtype in _LOW and val(x).device.type == "cuda" else None


def _only_returned(n: Node) -> bool:
    return all(u.op == "output" or (is_call(u, *_VIEWS) and _only_returned(u)) for u in n.users)
