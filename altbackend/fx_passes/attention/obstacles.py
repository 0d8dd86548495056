"""Find the call for which an attention has no form that the fused kernels know, for the record of decisions."""

from __future__ import annotations

from torch.fx import Node

from .operators import PRODUCTS, is_tensor, read
from .weights import weighted

MOST = 12  # calls between the first product and the softmax
_KNOWN = (
    "cast",
    "copy",
    "view",
    "expand",
    "mul",
    "div",
    "add",
    "sub",
    "masked_fill",
    "where",
    "maximum",
    "cat",
    "clamp",
)


def obstacle(last: Node) -> str:
    """Return the first call between the two products of an attention that no form has; "" if it is no attention."""
    after = weighted(last)
    if after is None:
        return ""
    softmax = after.softmax
    seen = _products_before(softmax)
    if not seen:
        return ""
    n = read(softmax).get("input")
    for _ in range(MOST):
        if not is_tensor(n) or n.target in PRODUCTS:
            break
        call = read(n)
        if call.name not in _KNOWN:
            name = str(getattr(n.target, "__name__", n.target))
            return f"{name} stands between its first product and the softmax, and the fused kernels have none"
        inputs = [m for m in n.all_input_nodes if m in seen]
        n = inputs[0] if inputs else None
    return ""


def _products_before(softmax: Node) -> set[Node]:
    """Return the nodes that lead from a product to a softmax over few calls; empty if no product does."""
    paths: set[Node] = set()
    stack: list[tuple[Node, tuple[Node, ...]]] = [(m, (m,)) for m in softmax.all_input_nodes]
    visited: set[Node] = set()
    while stack:
        n, path = stack.pop()
        if n.target in PRODUCTS:
            paths.update(path)
        elif n not in visited and len(path) < MOST:
            visited.add(n)
            stack += [(m, (*path, m)) for m in n.all_input_nodes]
    return paths
