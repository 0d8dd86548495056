"""The values that the calls of idioms equal: a node, a constant, or NOTHING where that is not known."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Node
from torch.fx.node import Argument

from .attention.builder import Builder
from .attention.operators import value_of
from .graph import function_of
from .simplify import same_layout

aten = torch.ops.aten
NOTHING = object()


# --- lists and dictionaries


def literal(x: object) -> bool:
    return isinstance(x, (list, tuple, dict)) and not isinstance(x, torch.Size)


def length(n: Node) -> object:
    items = n.args[0]
    return len(items) if isinstance(items, (list, tuple, dict)) and literal(items) else NOTHING


def element(n: Node) -> object:
    items, key = n.args[0], n.args[1]
    if not literal(items) or isinstance(key, Node) or (isinstance(key, slice) and holds_node(key)):
        return NOTHING
    try:
        return items[key]  # type: ignore[index]
    except (IndexError, KeyError, TypeError):
        return NOTHING  # the call raises when it runs


def holds_node(s: slice) -> bool:
    return any(isinstance(x, Node) for x in (s.start, s.stop, s.step))


def joined(n: Node) -> object:
    a, b = n.args[:2]
    same = type(a) is type(b) or (isinstance(a, list) and isinstance(b, list))
    return [*a, *b] if same and isinstance(a, list) and isinstance(b, list) else NOTHING


def copied(n: Node) -> object:
    if len(n.args) != 1 or n.kwargs or not isinstance(n.args[0], (list, tuple)) or not literal(n.args[0]):
        return NOTHING
    return function_of(n)(n.args[0])


def looked_up(n: Node) -> object:
    items = n.args[0]
    if not isinstance(items, dict) or len(n.args) < 2 or isinstance(n.args[1], Node):
        return NOTHING
    return items.get(n.args[1], n.args[2] if len(n.args) > 2 else None)


def listed(n: Node) -> object:
    items = n.args[0]
    return list(getattr(items, str(n.target))()) if isinstance(items, dict) else NOTHING


def contained(n: Node) -> object:
    items, key = n.args[:2]
    return key in items if isinstance(items, dict) and not isinstance(key, Node) else NOTHING


# --- queries


def tensor(n: object) -> torch.Tensor | None:
    value = value_of(n) if isinstance(n, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def static(x: object) -> object:
    """Return a size, or all sizes as a list, if they are numbers; NOTHING if one is symbolic."""
    if isinstance(x, (tuple, list)):
        return list(x) if all(isinstance(s, int) for s in x) else NOTHING
    return x if isinstance(x, int) else NOTHING


def size(n: Node) -> object:
    x = tensor(n.args[0])
    if x is None or any(isinstance(a, Node) for a in n.args[1:]):
        return NOTHING
    dim = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim")
    return static(x.shape) if dim is None else static(x.shape[dim]) if isinstance(dim, int) else NOTHING


def of_tensor(query: Callable[[torch.Tensor], object]) -> Callable[[Node], object]:
    def value(n: Node) -> object:
        x = tensor(n.args[0])
        return NOTHING if x is None or len(n.args) > 1 else query(x)

    return value


ATTRIBUTES: dict[str, Callable[[torch.Tensor], object]] = {
    "dtype": lambda x: x.dtype,
    "device": lambda x: x.device,
    "ndim": lambda x: x.dim(),
    "is_cuda": lambda x: x.is_cuda,
    "is_sparse": lambda x: x.is_sparse,
    "layout": lambda x: x.layout,
}


def attribute(n: Node) -> object:
    x = tensor(n.args[0])
    name = str(n.args[1])
    return ATTRIBUTES[name](x) if x is not None and name in ATTRIBUTES else NOTHING


def shape_attribute(n: Node) -> object:
    x = tensor(n.args[0])
    return static(x.shape) if x is not None and n.args[1] == "shape" else NOTHING


def is_none(n: Node) -> object:
    a, b = n.args[:2]
    other = b if a is None else a if b is None else NOTHING
    if other is NOTHING or (isinstance(other, Node) and tensor(other) is None):
        return NOTHING
    return (other is None) == (n.target is operator.is_)


# --- views and copies; a call that returns its argument itself needs no alias analysis


def argument(n: Node) -> Node | None:
    return n.args[0] if n.args and isinstance(n.args[0], Node) else None


def itself(n: Node) -> object:
    """Return the argument of a conversion that changes nothing, which then returns its argument."""
    x, source = tensor(n), argument(n)
    y = tensor(source)
    if x is None or y is None or n.kwargs.get("copy") or x.device != y.device or len(n.args) > 2:
        return NOTHING
    return source if same_layout(x, y) else NOTHING


def not_dropped(n: Node) -> object:
    training = n.args[2] if len(n.args) > 2 else n.kwargs.get("training", n.kwargs.get("train", True))
    return n.args[0] if training is False else NOTHING


def turned_back(n: Node) -> object:
    inner = argument(n)
    if inner is None or inner.target is not n.target or inner.op != n.op or n.kwargs or inner.kwargs:
        return NOTHING
    if len(n.args) == 1:
        return inner.args[0]  # x.t().t()
    x = tensor(n)
    dims = [[d % x.dim() for d in m.args[1:] if isinstance(d, int)] for m in (n, inner)] if x is not None else []
    return inner.args[0] if dims and len(dims[0]) == 2 and set(dims[0]) == set(dims[1]) else NOTHING


def permuted_back(n: Node) -> object:
    inner = argument(n)
    if inner is None or inner.target is not n.target or inner.op != n.op:
        return NOTHING
    outer, first = order(n), order(inner)
    if outer is None or first is None or [first[k] for k in outer] != list(range(len(outer))):
        return NOTHING
    return inner.args[0]


def order(n: Node) -> list[int] | None:
    dims = n.args[1] if len(n.args) == 2 and isinstance(n.args[1], (list, tuple)) else n.args[1:]
    if not isinstance(dims, (list, tuple)) or not all(isinstance(d, int) for d in dims):
        return None
    return [d % len(dims) for d in dims if isinstance(d, int)]


def squeezed(n: Node) -> object:
    inner = argument(n)
    x = tensor(inner)
    if inner is None or x is None or len(n.args) != 2 or len(inner.args) != 2:
        return NOTHING
    if inner.target not in (torch.unsqueeze, "unsqueeze", aten.unsqueeze.default) or isinstance(
        n.args[1], (list, tuple)
    ):
        return NOTHING
    dims = [m.args[1] % x.dim() for m in (n, inner) if isinstance(m.args[1], int)]
    return inner.args[0] if len(dims) == 2 and dims[0] == dims[1] else NOTHING


def one_view(n: Node) -> object:
    """Return the view of a view of contiguous memory as one view."""
    inner = argument(n)
    base = argument(inner) if inner is not None and inner.target is n.target and inner.op == n.op else None
    x = tensor(base)
    if inner is None or base is None or x is None or not x.is_contiguous() or tensor(n) is None:
        return NOTHING
    with n.graph.inserting_before(n):
        new = n.graph.create_node(n.op, n.target, (base, *n.args[1:]), dict(n.kwargs))
    new.meta = dict(n.meta)
    return new


def whole_cat(n: Node) -> object:
    """Return cat([cat([a, b], d), c], d) as cat([a, b, c], d)."""
    parts = n.args[0] if n.args else None
    if not isinstance(parts, (list, tuple)) or axis(n) is None:
        return NOTHING
    flat: list[Argument] = []
    for part in parts:
        inner = part.args[0] if isinstance(part, Node) and part.op == n.op and part.target is n.target else None
        same = isinstance(inner, (list, tuple)) and isinstance(part, Node) and axis(part) == axis(n)
        flat += inner if same and len(part.users) == 1 and same_dtype(inner) else [part]  # type: ignore[arg-type]
    if len(flat) == len(parts):
        return NOTHING
    with n.graph.inserting_before(n):
        new = n.graph.create_node(n.op, n.target, (flat, *n.args[1:]), dict(n.kwargs))
    new.meta = dict(n.meta)
    return new


def axis(n: Node) -> int | None:
    x, dim = tensor(n), n.args[1] if len(n.args) > 1 else n.kwargs.get("dim", 0)
    return dim % x.dim() if x is not None and isinstance(dim, int) and x.dim() else None


def same_dtype(parts: Iterable[object]) -> bool:
    """Return whether all tensors have one dtype and rank; `cat` promotes dtypes and skips empty vectors."""
    tensors = [tensor(p) for p in parts]
    return len({(t.dtype, t.dim()) for t in tensors if t is not None}) == 1 and None not in tensors


def addmm(n: Node) -> object:
    """Return mm(a, b) + c as addmm(c, a, b), for c that is broadcast to the product, of its dtype."""
    if n.kwargs.get("alpha", 1) != 1 or len(n.args) != 2:
        return NOTHING
    for product, bias in (n.args, n.args[::-1]):
        x, y = tensor(product), tensor(bias)
        is_product = (
            isinstance(product, Node) and product.target in (torch.mm, aten.mm.default) and len(product.users) == 1
        )
        if not is_product or x is None or y is None or y.dtype != x.dtype or y.dim() > 2 or tensor(n) is None:
            continue
        if not same_layout(value_of(n), x):
            continue
        assert isinstance(product, Node)
        target = aten.addmm.default if product.target is aten.mm.default else torch.addmm
        return Builder(n).call(target, bias, *product.args)
    return NOTHING
