"""A torch function as a flat graph of torch calls, recorded while it runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_OPERATORS = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}


class Recorder(TorchFunctionMode):
    """Appends to a graph every call that gives tensors or writes to one. Sizes are numbers in it."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.nodes: dict[int, torch.fx.Node] = {}
        self.tensors: list[torch.Tensor] = []  # so that no identity is used twice
        for k, x in enumerate(inputs):
            self.name(x, self.graph.placeholder(f"x{k}"))

    def name(self, x: torch.Tensor, node: torch.fx.Node) -> None:
        self.nodes[id(x)] = node
        self.tensors.append(x)

    def node_of(self, x: Any) -> Any:
        return self.nodes[id(x)] if isinstance(x, torch.Tensor) else x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.__name__
        parts = [out] if isinstance(out, torch.Tensor) else list(out) if isinstance(out, (tuple, list)) else []
        if name != "__setitem__" and not (parts and all(isinstance(t, torch.Tensor) for t in parts)):
            return out
        arguments = torch.utils._pytree.tree_map(self.node_of, (args, kwargs))
        if name in _OPERATORS:
            function: Any = _OPERATORS[name]
            node = self.graph.call_function(function, *arguments)
        elif getattr(torch.Tensor, name, None) is func:
            node = self.graph.call_method(name, *arguments)
        else:
            node = self.graph.call_function(func, *arguments)
        if isinstance(out, torch.Tensor):
            self.name(out, node)
        else:
            for k, t in enumerate(parts):
                self.name(t, self.graph.call_function(operator.getitem, (node, k)))
        return out


def record(fn: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """`fn` as a graph for tensors like `inputs`, which it may write to. Raises what `fn` raises."""
    with Recorder(inputs) as recorder:
        results = fn(*inputs)
    recorder.graph.output([recorder.node_of(t) for t in results])
    return torch.fx.GraphModule(torch.nn.Module(), recorder.graph)
