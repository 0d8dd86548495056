"""Restore `torch.addcdiv` and `torch.addcmul` calls that Dynamo has decomposed, so that results have eager's bits.

Dynamo captures `torch.addcdiv(x, a, b, value=v)` as `x + (a / b) * v`. Eager computes `x + (v * a) / b`, which rounds
differently. Under `numerics="eager"` this pass replaces the three calls by one. It also replaces the two forms in which
Dynamo captures calls in place:

    x.addcmul_(a, b, value=v)  ->  prims.fma(a * b, v, x)
    x.addcdiv_(a, b, value=v)  ->  prims.fma(a / b, v, x)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .context import Context


def run(gm: GraphModule, ctx: Context) -> int:
    """Replace the decomposed calls, in place; return their number."""
    count = 0
    for total in gm.graph.find_nodes(op="call_function", target=torch.add):
        parts = _parts(total)
        if parts is None:
            continue
        quotient, product = parts
        with gm.graph.inserting_before(total):
            call = gm.graph.call_function(torch.addcdiv, (total.args[0], *quotient.args), {"value": product.args[1]})
        call.meta = dict(total.meta)
        total.replace_all_uses_with(call)
        for n in (total, product, quotient):
            gm.graph.erase_node(n)
        count += 1
    count += _restore_in_place(gm)
    if count:
        gm.recompile()
    return count


def _restore_in_place(gm: GraphModule) -> int:
    """Replace the calls as which in-place forms were captured; return their number."""
    whole = {torch.mul: torch.addcmul, torch.div: torch.addcdiv}
    count = 0
    for n in list(gm.graph.nodes):
        inner = n.args[0] if _is_fma(n) else None
        if not isinstance(inner, Node) or inner.target not in whole or n.prev is not inner or inner.kwargs:
            continue
        if len(inner.users) > 1 or type(n.args[1]) not in (int, float):
            continue
        with gm.graph.inserting_before(n):
            call = gm.graph.call_function(whole[inner.target], (n.args[2], *inner.args), {"value": n.args[1]})
        call.meta = dict(n.meta)
        n.replace_all_uses_with(call)
        gm.graph.erase_node(n)
        gm.graph.erase_node(inner)
        count += 1
    return count


def _is_fma(n: Node) -> bool:
    """Return whether a node calls `prims.fma`, which torch defines only once its own compiler is imported."""
    return isinstance(n.target, torch._ops.OpOverload) and str(n.target) == "prims.fma.default"


def _parts(total: Node) -> tuple[Node, Node] | None:
    """Return (quotient, product) of a sum into which Dynamo has decomposed an `addcdiv`, or None for other sums."""
    product = total.args[1] if len(total.args) == 2 else None
    quotient = product.args[0] if isinstance(product, Node) and product.target is torch.mul else None
    if not isinstance(product, Node) or not isinstance(quotient, Node) or quotient.target is not torch.div:
        return None
    three = (quotient, product, total)
    side_by_side = total.prev is product and product.prev is quotient
    alone = all(len(n.users) == 1 for n in (quotient, product)) and not any(n.kwargs for n in three)
    number = type(product.args[1]) in (int, float)
    return (quotient, product) if side_by_side and alone and number and _of_one_call(three) else None


def _of_one_call(calls: tuple[Node, ...]) -> bool:
    """Return whether the calls have one source range (marked from Python 3.11 on) that contains no division."""
    traces = {n.meta.get("stack_trace") or "" for n in calls}
    if len(traces) > 1:
        return False
    lines = [line for line in traces.pop().splitlines() if line.strip(" ^~")]
    return bool(lines) and ("addcdiv" in lines[-1] or "div" not in lines[-1])
