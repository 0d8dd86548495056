"""Insert calls into a captured or an ATen graph, with their traced values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from .operators import value_of


class Builder:
    """Inserts calls before a node. `unused` erases those that nothing reads in the end."""

    def __init__(self, before: Node) -> None:
        self.graph: Graph = before.graph
        self.before = before
        self.key = "example_value" if "example_value" in before.meta else "val"
        self.inserted: list[Node] = []

    def call(self, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        """Insert a call and compute its traced value from those of its arguments."""
        values = [torch.fx.node.map_arg(x, value_of) for x in (args, kwargs)]
        mode = getattr(value_of(self.before), "fake_mode", None) or contextlib.nullcontext()
        with mode:
            value = target(*values[0], **values[1])  # type: ignore[arg-type]
        return self.with_value(value, target, *args, **kwargs)

    def with_value(self, value: object, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> Node:
        """Insert a call whose traced value is known."""
        with self.graph.inserting_before(self.before):
            n = self.graph.call_function(target, args, kwargs)
        n.meta[self.key] = value
        if "stack_trace" in self.before.meta:
            n.meta["stack_trace"] = self.before.meta["stack_trace"]
        self.inserted.append(n)
        return n

    def erase_unused(self) -> None:
        """Erase the inserted calls that have no users."""
        for n in reversed(self.inserted):
            if not n.users:
                self.graph.erase_node(n)
