"""Calls that AOTAutograd orders by effect tokens, `with_effects(token, operator, *args) -> (token, *results)`."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

_TOKENS = ("_make_token.default", "_sink_tokens.default")


def without_tokens(gm: GraphModule, suits: Callable[[torch._ops.OpOverload], bool]) -> int:
    """Replace ordered calls whose operator `suits` by the calls themselves, whose order in the graph stays.

    Return their number. Tokens that nothing needs any more disappear.
    """
    graph = gm.graph
    calls = graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
    replaced = [n for n in calls if isinstance(n.args[1], torch._ops.OpOverload) and suits(n.args[1])]
    for n in replaced:
        _replace(gm, n)
    gone, ends = set(replaced), len(replaced) == len(calls)  # other ordered calls still need their tokens
    for n in reversed(graph.nodes):
        is_token = ends and n.op == "call_function" and getattr(n.target, "__name__", "") in _TOKENS
        if (is_token or n in gone) and not n.users:
            graph.erase_node(n)
    if replaced:
        gm.recompile()
    return len(replaced)


def _replace(gm: GraphModule, n: Node) -> None:
    token, op, *args = n.args
    assert isinstance(op, torch._ops.OpOverload)
    with gm.graph.inserting_before(n):
        call = gm.graph.call_function(op, tuple(args), n.kwargs)
    call.meta.update(n.meta)
    results = n.meta.get("val", (None,))[1:]
    single = len(op._schema.returns) <= 1
    call.meta["val"] = (results[0] if results else None) if single else tuple(results)
    for user in list(n.users):
        if user.target is not operator.getitem:
            continue
        number = user.args[1]
        assert isinstance(number, int)
        if number == 0:
            assert isinstance(token, Node)
            user.replace_all_uses_with(token)
        elif single:
            user.replace_all_uses_with(call)
        else:
            user.update_arg(0, call)
            user.update_arg(1, number - 1)
            continue
        gm.graph.erase_node(user)
