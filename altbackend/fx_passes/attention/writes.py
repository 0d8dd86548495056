"""Calls that write in place and whose result nothing reads: later calls read it in place of what was written.

`s.mul_(2)` returns `s` itself, so both are one tensor, and the steps of scores become a chain.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from .operators import is_tensor

_METHODS = frozenset(("add_", "sub_", "mul_", "div_", "masked_fill_"))


def read_results(graph: Graph) -> None:
    """Let calls read the results of calls that write in place, wherever they read later what was written."""
    position = {n: k for k, n in enumerate(graph.nodes)}
    for n in graph.nodes:
        if n.op != "call_method" or n.target not in _METHODS or n.users or not is_tensor(n) or not n.args:
            continue
        written = n.args[0]
        if isinstance(written, Node) and written.op != "placeholder" and is_tensor(written):
            for u in list(written.users):
                if position[u] > position[n]:
                    u.replace_input_with(written, n)
